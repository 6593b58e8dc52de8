"""Write-back: blobs go from staging to the tiers they are due in, and up to NVMe when they were read from below.

The outbox is in the catalog, so that nothing is forgotten by a crash; a lease on each write keeps two from doing it.
Each tier is written for itself, so that one that is away or slow does not hold up another; in a tier each namespace has
its turn. Small blobs go to NVMe in groups, which share a bracket of staging and what the disk does for a write.

PUTs come first: while they are at work, new writes wait a moment as long as staging has room, then NVMe gets one write
at a time.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from kvgw.gateway.outbox import is_roomy, is_short
from kvgw.gateway.rooms import Rooms
from kvgw.maintenance.pacing import Bucket, Sparing, Turns
from storage.errors import BlobDamaged, BlobMissing, StagingBusy, StorageError
from storage.staging import Fill
from storage.tier import blob_name, parse_name
from storage.together import Together
from tenancy.model import Scope
from tenancy.placements import Claim, DueWrite, Endings

BATCH: Final = 64
BATCH_BYTES: Final = 256 * 1024 * 1024
"""What one write at a time can put away within its time, even on a slow disk."""
SMALL_BYTES: Final = 256 * 1024
GROUP: Final = 16
"""Small blobs that are written at once: a read of the disk waits behind no more of them."""
LEASE_MS: Final = 120_000
"""Longer than any single write to a tier may take."""
WRITE_SECONDS: Final = 60.0
MEMORY_SECONDS: Final = 2.0
"""From its start a batch waits so long for memory at most: what it has written gives memory back when it has ended."""
RETRY_FIRST_MS: Final = 500
RETRY_LAST_MS: Final = 60_000
CONCURRENT: Final = 4
RELIEF_BATCH: Final = 500
STAND_BACK_SECONDS: Final = 1.0
"""So long at most nothing is begun for the sake of PUTs, from when there was something to write."""
STAND_BACK_STEP_SECONDS: Final = 0.02


class WriteBack:
    """Empties the outbox of namespaces. `rates`: bytes per second by tier; 0 or none: no limit."""

    def __init__(self, rooms: Rooms, rates: Mapping[str, int]) -> None:
        self._rooms = rooms
        self._buckets = {tier: Bucket(rates.get(tier, 0), rooms.clock) for tier in rooms.tiers}
        self._turns = {tier: Turns(partial(self._width, tier)) for tier in rooms.tiers}
        self._wanted: dict[str, set[Scope]] = {tier: set() for tier in rooms.tiers}
        self._wanted_at: dict[str, float] = {}
        """Since when (monotonic seconds) a tier has not been at rest."""
        self._work = {tier: asyncio.Event() for tier in rooms.tiers}
        self._rounds = {tier: asyncio.Lock() for tier in rooms.tiers}
        self._measuring = Sparing(rooms.clock)
        self._relieving = Sparing(rooms.clock)

    async def promote(self, scope: Scope, blob_ids: Sequence[bytes]) -> None:
        """Make NVMe writes due for chunks that were read from below."""
        rooms = self._rooms
        added = await rooms.catalog.promote(scope, blob_ids, rooms.time.now_ms())
        for blob_id in set(blob_ids) - added:
            rooms.staging.settle(blob_name(scope.namespace, blob_id))
        rooms.backlog.note_writes(scope)

    def want(self, scopes: Iterable[Scope], tiers: Iterable[str] | None = None) -> None:
        """These namespaces may have writes due, in these tiers or in all."""
        scopes = set(scopes)
        for tier in self._rooms.tiers if tiers is None else tiers:
            self._wanted[tier] |= scopes
            if scopes:
                self._wanted_at.setdefault(tier, self._rooms.clock.monotonic())
                self._work[tier].set()

    async def wait_for_work(self, tier: str) -> None:
        """Return when a namespace may have writes due in a tier."""
        await self._work[tier].wait()

    async def round(self, tier: str, *, stand_back: bool = True) -> bool:
        """Write one batch of each namespace that may have writes due in a tier; whether there may be more.

        A single namespace goes on with its next batch. With `stand_back`, PUTs come first.
        """
        async with self._rounds[tier]:  # whoever asks meanwhile is answered when nobody is at work any more
            self._work[tier].clear()
            scopes, self._wanted[tier] = self._wanted[tier], set()
            for scope in scopes:
                if stand_back:
                    await self._stand_back(tier)
                if await self._write_batches(tier, scope, alone=len(scopes) == 1):
                    self.want([scope], [tier])
            if not self._wanted[tier]:
                self._wanted_at.pop(tier, None)
            return bool(self._wanted[tier])

    async def drain(self, tier: str) -> None:
        """Write everything that is due in a tier, of the namespaces that were wanted; PUTs do not come first."""
        while await self.round(tier, stand_back=False):
            pass

    async def measure(self, scopes: Iterable[Scope]) -> None:
        """Let PUTs know what waits, as often as looking is cheap."""
        if not self._measuring.due:
            return
        with self._measuring.looking():
            for scope in scopes:
                self._rooms.outbox.found(scope, await self._rooms.catalog.own_outbox(scope))

    async def relieve(self, scopes: Iterable[Scope]) -> None:
        """Where staging is short, let go of what has come to this node's disk since: it is written on from there."""
        staging = self._rooms.staging
        if not self._relieving.due or not is_short(staging):
            return
        with self._relieving.looking():
            dirty: defaultdict[object, list[bytes]] = defaultdict(list)
            for name in staging.dirty_names():
                namespace, blob_id = parse_name(name)
                dirty[namespace].append(blob_id)
            for scope in scopes:
                blob_ids = dirty[scope.namespace]
                for start in range(0, len(blob_ids), RELIEF_BATCH):
                    some = blob_ids[start : start + RELIEF_BATCH]
                    for blob_id in await self._rooms.catalog.on_disk(scope, some):
                        staging.settle(blob_name(scope.namespace, blob_id))

    def _width(self, tier: str) -> int:
        return 1 if tier == "nvme" and self._rooms.outbox.foreground else CONCURRENT

    async def _stand_back(self, tier: str) -> None:
        """Return when no PUT is at work, or staging needs it, or `STAND_BACK_SECONDS` after there was work."""
        rooms = self._rooms
        until = self._wanted_at.get(tier, 0.0) + STAND_BACK_SECONDS
        while (left := until - rooms.clock.monotonic()) > 0 and self._has_time:
            await rooms.clock.sleep(min(left, STAND_BACK_STEP_SECONDS))

    @property
    def _has_time(self) -> bool:
        outbox = self._rooms.outbox
        return outbox.foreground and is_roomy(self._rooms.staging) and outbox.behind() is None

    async def _write_batches(self, tier: str, scope: Scope, *, alone: bool) -> bool:
        """Write some of what is due in one namespace, all of it while nobody else waits; whether there may be more."""
        rooms, bucket = self._rooms, self._buckets[tier]
        await bucket.ready()
        now_ms = rooms.time.now_ms()
        claim = self._claim(tier, now_ms)
        due = await rooms.catalog.claim_due(scope, tier, claim.lease_until_ms, now_ms, claim.limit, claim.bytes_max)
        while due:
            bucket.spend(sum(one.length for one in due))
            outcomes = await self._write_all(tier, due)
            goes_on = alone and not bucket.rate and self._wanted[tier] <= {scope}
            due = await self._record(tier, scope, due, outcomes, goes_on=goes_on)
            await self.measure([scope])
            if not goes_on:
                return True
        return False

    def _claim(self, tier: str, now_ms: int) -> Claim:
        return Claim(tier, now_ms + LEASE_MS, BATCH, min(BATCH_BYTES, self._buckets[tier].rate or BATCH_BYTES))

    async def _record(
        self, tier: str, scope: Scope, due: Sequence[DueWrite], outcomes: Mapping[bytes, bool | None], *, goes_on: bool
    ) -> list[DueWrite]:
        """Write down how writes ended: True done, False to be tried again, None lost. What is next, if it goes on."""
        rooms = self._rooms
        now_ms = rooms.time.now_ms()
        done = [one for one in due if outcomes[one.blob_id] is True]
        failed = [(one, now_ms + self._pause_ms(one)) for one in due if outcomes[one.blob_id] is False]
        lost = [one for one in due if outcomes[one.blob_id] is None]
        rooms.metrics.written_back.labels(tier).inc(sum(one.length for one in done))
        claim = self._claim(tier, now_ms) if goes_on else None
        turn = await rooms.catalog.settle_writes(scope, Endings(done, failed, lost), claim, now_ms)
        if turn.unneeded:
            rooms.backlog.note_dead(scope)
        for one in due:
            if one.blob_id in turn.settled:
                rooms.staging.settle(one.object_name)
        return turn.due

    def _pause_ms(self, failed: DueWrite) -> int:
        wait_ms = min(RETRY_LAST_MS, RETRY_FIRST_MS * 2 ** min(failed.attempts, 10))
        return int(wait_ms * (0.75 + 0.5 * self._rooms.rng.jitter()))

    async def _write_all(self, tier: str, due: Sequence[DueWrite]) -> dict[bytes, bool | None]:
        """Write what was claimed: for each blob True when done, False to try again, None when it is nowhere any more.

        The time of all, waiting for their turns included, ends before their lease does: no write outlives its claim.
        """
        outcomes: dict[bytes, bool | None] = {}
        patience = self._rooms.clock.monotonic() + MEMORY_SECONDS
        small_bytes = SMALL_BYTES if tier == "nvme" else 0
        small = [one for one in due if one.length <= small_bytes]
        large = [one for one in due if one.length > small_bytes]
        try:
            async with asyncio.timeout(WRITE_SECONDS), Together() as tasks:
                tasks.create_task(self._write_groups(tier, small, outcomes, patience))
                for one in large:
                    tasks.create_task(self._write_group(tier, [one], outcomes, patience))
        except TimeoutError:
            pass
        late = {one.blob_id: False for one in due if one.blob_id not in outcomes}
        self._rooms.metrics.tier_failures.labels(tier, "put").inc(len(late))
        return outcomes | late

    async def _write_groups(
        self, tier: str, small: Sequence[DueWrite], outcomes: dict[bytes, bool | None], patience: float
    ) -> None:
        for start in range(0, len(small), GROUP):
            await self._write_group(tier, small[start : start + GROUP], outcomes, patience)

    async def _write_group(
        self, tier: str, group: Sequence[DueWrite], outcomes: dict[bytes, bool | None], patience: float
    ) -> None:
        """Write blobs at once, out of staging as far as they are there; then those that have to be read first."""
        async with self._turns[tier].turn():
            rest, below = group, list[DueWrite]()
            while rest:
                blobs = [(one.object_name, one.length) for one in rest]
                with self._rooms.staging.residents(rest[0].scope.tenant, blobs) as readings:
                    async with Together() as tasks:
                        for one, reading in zip(rest, readings, strict=False):
                            tasks.create_task(self._put(one, reading.view, outcomes))
                rest = rest[len(readings) :]
                below += rest[:1]
                rest = rest[1:]
            for one in below:
                await self._put_from_below(one, outcomes, patience)

    async def _put_from_below(self, due: DueWrite, outcomes: dict[bytes, bool | None], patience: float) -> None:
        """Write a blob that may have to be read first, from a tier that has it."""
        limit_s = max(0.0, patience - self._rooms.clock.monotonic())
        try:
            async with self._rooms.staging.read(
                due.scope.tenant, due.object_name, due.length, limit_s, self._filler(due)
            ) as reading:
                await self._put(due, reading.view, outcomes)
        except StagingBusy:
            outcomes[due.blob_id] = False
        except (BlobMissing, BlobDamaged):
            outcomes[due.blob_id] = None
        except (StorageError, TimeoutError):
            self._failed(due, outcomes)

    async def _put(self, due: DueWrite, sealed: memoryview, outcomes: dict[bytes, bool | None]) -> None:
        try:
            await self._rooms.tiers[due.tier].put(due.object_name, sealed)
        except (StorageError, TimeoutError):
            self._failed(due, outcomes)
        else:
            outcomes[due.blob_id] = True

    def _failed(self, due: DueWrite, outcomes: dict[bytes, bool | None]) -> None:
        self._rooms.metrics.tier_failures.labels(due.tier, "put").inc()
        outcomes[due.blob_id] = False

    def _filler(self, due: DueWrite) -> Fill:
        async def fill(view: memoryview) -> None:
            for label, tier in self._rooms.tiers.items():
                if label in due.sources:
                    await tier.get_into(due.object_name, view)
                    return
            raise BlobMissing("neither staging nor any tier has the blob")

        return fill
