"""Write-back: blobs go from staging to the tiers they are due in, and up to NVMe when they were read from below.

The outbox is in the catalog, so that nothing is forgotten by a crash; a lease on each write keeps two from doing it.
Each tier is written for itself, so that one that is away or slow does not hold up another; in a tier each namespace has
its turn. While PUTs are at work, NVMe gets one write at a time: the disk and the CPUs are theirs.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from kvgw.gateway.outbox import is_short
from kvgw.gateway.rooms import Rooms
from kvgw.maintenance.pacing import Bucket, Sparing, Turns
from storage.errors import BlobDamaged, BlobMissing, StorageError
from storage.staging import Fill
from storage.tier import blob_name, parse_name
from tenancy.model import Scope
from tenancy.placements import DueWrite

BATCH: Final = 64
BATCH_BYTES: Final = 256 * 1024 * 1024
"""What one write at a time can put away within its time, even on a slow disk."""
LEASE_MS: Final = 120_000
"""Longer than any single write to a tier may take."""
WRITE_SECONDS: Final = 60.0
RETRY_FIRST_MS: Final = 500
RETRY_LAST_MS: Final = 60_000
CONCURRENT: Final = 4
RELIEF_BATCH: Final = 500


class WriteBack:
    """Empties the outbox of namespaces. `rates`: bytes per second by tier; 0 or none: no limit."""

    def __init__(self, rooms: Rooms, rates: Mapping[str, int]) -> None:
        self._rooms = rooms
        self._buckets = {tier: Bucket(rates.get(tier, 0), rooms.clock) for tier in rooms.tiers}
        self._turns = {tier: Turns(partial(self._width, tier)) for tier in rooms.tiers}
        self._wanted: dict[str, set[Scope]] = {tier: set() for tier in rooms.tiers}
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
                self._work[tier].set()

    async def wait_for_work(self, tier: str) -> None:
        """Return when a namespace may have writes due in a tier."""
        await self._work[tier].wait()

    async def round(self, tier: str) -> bool:
        """Write one batch of each namespace that may have writes due in a tier; whether there may be more."""
        async with self._rounds[tier]:  # whoever asks meanwhile is answered when nobody is at work any more
            self._work[tier].clear()
            scopes, self._wanted[tier] = self._wanted[tier], set()
            for scope in scopes:
                if await self._write_batch(tier, scope):
                    self.want([scope], [tier])
            return bool(self._wanted[tier])

    async def drain(self, tier: str) -> None:
        """Write everything that is due in a tier, of the namespaces that were wanted."""
        while await self.round(tier):
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

    async def _write_batch(self, tier: str, scope: Scope) -> bool:
        """Write some of what is due in one namespace; False when nothing was."""
        rooms, bucket = self._rooms, self._buckets[tier]
        await bucket.ready()
        now_ms = rooms.time.now_ms()
        bytes_max = min(BATCH_BYTES, bucket.rate or BATCH_BYTES)
        due = await rooms.catalog.claim_due(scope, tier, now_ms + LEASE_MS, now_ms, BATCH, bytes_max)
        if not due:
            return False
        bucket.spend(sum(one.length for one in due))
        results = await asyncio.gather(*(self._write(one) for one in due))
        await self._record(scope, due, results)
        await self.measure([scope])
        return True

    async def _record(self, scope: Scope, due: Sequence[DueWrite], results: Sequence[bool | None]) -> None:
        rooms = self._rooms
        now_ms = rooms.time.now_ms()
        done = [one for one, result in zip(due, results, strict=True) if result is True]
        failed = [one for one, result in zip(due, results, strict=True) if result is False]
        lost = [one for one, result in zip(due, results, strict=True) if result is None]
        if await rooms.catalog.finish_writes(scope, done, now_ms):
            rooms.backlog.note_dead(scope)
        await rooms.catalog.postpone_writes(scope, [(one, now_ms + self._pause_ms(one)) for one in failed])
        if await rooms.catalog.drop_writes(scope, lost, now_ms):
            rooms.backlog.note_dead(scope)
        still_due = await rooms.catalog.outstanding(scope, [one.blob_id for one in due])
        for one in due:
            if one.blob_id not in still_due:
                rooms.staging.settle(one.object_name)

    def _pause_ms(self, failed: DueWrite) -> int:
        wait_ms = min(RETRY_LAST_MS, RETRY_FIRST_MS * 2 ** min(failed.attempts, 10))
        return int(wait_ms * (0.75 + 0.5 * self._rooms.rng.jitter()))

    async def _write(self, due: DueWrite) -> bool | None:
        """Write one blob: True when done, False to try again later, None when there is nothing left to write.

        Its time, waiting for its turn included, ends before its lease does: no write outlives its claim.
        """
        rooms = self._rooms
        tier = rooms.tiers.get(due.tier)
        if tier is None:
            return None
        try:
            async with (
                asyncio.timeout(WRITE_SECONDS),
                self._turns[due.tier].turn(),
                rooms.staging.read(
                    due.scope.tenant, due.object_name, due.length, WRITE_SECONDS, self._filler(due)
                ) as reading,
            ):
                await tier.put(due.object_name, reading.view)
        except (BlobMissing, BlobDamaged):
            return None
        except (StorageError, TimeoutError):
            rooms.metrics.tier_failures.labels(due.tier, "put").inc()
            return False
        rooms.metrics.written_back.labels(due.tier).inc(due.length)
        return True

    def _filler(self, due: DueWrite) -> Fill:
        async def fill(view: memoryview) -> None:
            for label, tier in self._rooms.tiers.items():
                if label in due.sources:
                    await tier.get_into(due.object_name, view)
                    return
            raise BlobMissing("neither staging nor any tier has the blob")

        return fill
