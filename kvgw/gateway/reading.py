"""The middle of a GET: tier → sealed resident → window → client. Any doubt is a miss (law 2).

A group of chunks is opened and leaves in one visit to a worker thread: what was just decrypted is still in the cache
when it is sent and zeroed. Only bytes that were opened under their own address leave (law 3). Where the client lends
memory for its chunks they are opened there, and nothing but their indices leaves.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from kvgw.gateway.ahead import Extra, ReadAhead
from kvgw.gateway.directory import Place
from kvgw.gateway.opening import Opening, Part, Room, Wanted, open_all, parts_of, pieces_of
from kvgw.gateway.payloads import (
    INLINE_BYTES,
    VISIT_BYTES,
    VISIT_BYTES_MIN,
    Delivery,
    PayloadSink,
    Turn,
    group_size,
    groups,
    in_turn,
    shared_group_size,
    visit_size,
)
from kvgw.gateway.rooms import Rooms
from storage.access import Reading
from storage.errors import BlobDamaged, BlobMissing, StagingBusy, TierMisconfigured, TierUnavailable
from storage.tier import blob_name
from storage.together import Together
from tenancy.errors import CatalogUnavailable, KeyUnavailable, SealBroken
from tenancy.keys.secret import SecretBytes
from tenancy.model import FormatRow
from tenancy.sealing import BlobAddress

PIPELINE_DEPTH: Final = 2
"""Groups of one GET in windows at once: one on its way to the client, one being read."""

STAGING: Final = "staging"


@dataclass(slots=True)
class GroupReader:
    """Reads the chunks of one GET, group by group, in the order of the keys."""

    rooms: Rooms
    place: Place
    kv_format: FormatRow
    reader: UUID
    """The tenant that staging memory is charged to."""
    deadline: float
    sink: PayloadSink
    shared: Sequence[memoryview]
    """Memory of the client's for the first chunks of its batch."""
    wanted: Sequence[Wanted]
    extra: Extra
    served: dict[int, str] = field(default_factory=dict)
    """Batch index → tier that had the chunk, of those delivered."""
    _ahead: ReadAhead = field(init=False)
    _sealed_as: dict[tuple[int, int, int, int], tuple[SecretBytes, BlobAddress]] = field(default_factory=dict)
    _visit_bytes: int = VISIT_BYTES
    """What is held for a visit: less once one gave way, and only what is sent at once for a client that left some."""
    degraded: str = ""
    """Why chunks that are there could not be read; empty when there was no such reason."""

    async def deliver_all(self) -> None:
        """Deliver what is wanted. Raises whatever the sink raises."""
        shared = [one for one in self.wanted if self._is_shared(one)] if self.shared else []
        rest = [one for one in self.wanted if not self._is_shared(one)] if len(shared) < len(self.wanted) else []
        async with Together() as tasks:
            self._ahead = ReadAhead(
                self.rooms, self._namespace, self.reader, [*shared, *rest], self.deadline, tasks, self.extra
            )
            try:
                await self._deliver_groups(shared, rest)
            finally:
                self._ahead.stop()

    async def _deliver_groups(self, shared: Sequence[Wanted], rest: Sequence[Wanted]) -> None:
        length = self.kv_format.chunk_bytes
        if shared:
            size = shared_group_size(length, with_tier=not self._holds(shared[0]))
            await self._deliver_in([Room(None, self.shared)] * PIPELINE_DEPTH, groups(shared, size), size)
        if rest:
            size = group_size(length, self.rooms.staging.window_share)
            visits = groups(rest, self._visit_size(rest[0], size))
            async with self._windows(rest[:size], len(visits)) as rooms:
                await self._deliver_in(rooms, visits, size)

    def _visit_size(self, first: Wanted, size: int) -> int:
        """Chunks of a group: what one visit to a thread can take, in pieces of `size`, where it can do without us."""
        share = self.rooms.staging.resident_limit // 4
        return visit_size(size, first[1].length, share) if self.sink.pushes and self._holds(first) else size

    def _holds(self, one: Wanted) -> bool:
        return self.rooms.staging.holds(blob_name(self._namespace, one[1].blob_id))

    @asynccontextmanager
    async def _windows(self, group: Sequence[Wanted], count: int) -> AsyncIterator[Sequence[Room]]:
        """Windows for `count` groups as large as this one, which take turns in them and are zeroed at their end alone.

        Only the first is waited for: who has a window and waits for another could wait for its like.
        """
        nbytes = sum(found.length for _, found in group)
        rooms: list[Room] = []
        async with AsyncExitStack() as stack:
            try:
                while len(rooms) < min(PIPELINE_DEPTH, count):
                    window = self.rooms.staging.window(self.reader, nbytes, 0.0 if rooms else self._remaining())
                    rooms.append(Room(await stack.enter_async_context(window), ()))
            except StagingBusy as error:
                self.degraded = self.degraded if rooms else str(error)
            yield rooms

    async def _deliver_in(self, rooms: Sequence[Room], of_all: Sequence[Sequence[Wanted]], size: int) -> None:
        """Deliver groups in their order, one in each room at a time, where `size` chunks are at once."""
        work = in_turn(of_all)
        async with Together() as tasks:
            for room in rooms[: len(of_all)]:
                tasks.create_task(self._deliver_some(room, work, min(len(rooms), len(of_all)), size))

    async def _deliver_some(self, room: Room, work: Iterator[Turn[Wanted]], rooms: int, size: int) -> None:
        for group, left, turn, next_turn in work:
            last = left < rooms  # one of these for each room: it is zeroed at the end of that
            await self._fill_and_deliver(parts_of(group, self._namespace, size), room, turn, last=last)
            await turn.wait()
            next_turn.set()
            if last:
                return

    def _is_shared(self, one: Wanted) -> bool:
        index, found = one
        return index < len(self.shared) and found.length == len(self.shared[index])

    async def _fill_and_deliver(self, parts: Sequence[Part], room: Room, turn: asyncio.Event, *, last: bool) -> None:
        """Runs of residents together, everything else alone. After the `last` part nothing more comes to the room."""
        while parts:
            await self._ahead.reached(parts)
            count = await self._deliver_residents(parts, room, turn, last=last)
            if count == 0:
                if self._ahead.begins(parts[0]):
                    continue
                self._ahead.missed(parts[0])
                await self._deliver_alone(parts[0], room, turn, last=last and len(parts) == 1)
            passed = max(1, count)
            self._ahead.passed(parts[:passed])
            parts = parts[passed:]

    async def _deliver_residents(self, parts: Sequence[Part], room: Room, turn: asyncio.Event, *, last: bool) -> int:
        """Deliver the leading run that staging has, or some of it; how many."""
        if room.window is not None and self.sink.pushes and self.rooms.staging.holds(parts[0].name):
            await turn.wait()  # now, because nobody waits while holding residents
        visited = parts if room.window is None else pieces_of(parts, self._visit_bytes)
        blobs = [(part.name, part.found.sealed_length) for part in visited]
        with self.rooms.staging.residents(self.reader, blobs) as readings:
            openings = self._openings(parts, readings)
            rest, done = await self._open(openings, room, turn, last=last and len(openings) == len(parts))
            if rest is not None or done < len(openings):
                self._visit_bytes = min(self._visit_bytes, 1 if rest is not None else VISIT_BYTES_MIN)
            openings = openings[:done]
            for opening in openings:
                if opening.fault is None:
                    self._promote(opening.origin, opening.part, wanted=not opening.part.found.on_nvme)
        await self._finish(openings, rest, turn)
        for opening in openings:
            if opening.fault is not None:
                await self._refuse(opening.origin, opening.part, opening.fault)
                await self._deliver_alone(opening.part, room, turn, last=False, refused={opening.origin})
        return len(openings)

    def _openings(self, parts: Sequence[Part], readings: Sequence[Reading]) -> list[Opening]:
        """What has a key, up to the first chunk that has none."""
        openings = []
        for part, reading in zip(parts, readings, strict=False):
            try:
                origin = self._ahead.brought(part.name) or STAGING
                openings.append(self._opening(part, reading, origin))
            except KeyUnavailable:
                break
        return openings

    def _opening(self, part: Part, reading: Reading, origin: str) -> Opening:
        found = part.found
        same = found.epoch, found.length, found.created_ms, found.seg_log2
        known = self._sealed_as.get(same)  # chunks that came together share all that is not their own
        if known is None:
            address = BlobAddress(
                tenant=self.place.scope.tenant,
                namespace=self._namespace,
                epoch=found.epoch,
                length=found.length,
                created_ms=found.created_ms,
                fingerprint=self.kv_format.fingerprint,
                seg_log2=found.seg_log2,
            )
            known = self._sealed_as[same] = self.place.keys.data_key(found.epoch), address
        return Opening(part, *known, reading.view, origin)

    async def _deliver_alone(
        self, part: Part, room: Room, turn: asyncio.Event, *, last: bool, refused: Collection[str] = ()
    ) -> None:
        """Deliver a chunk from the first tier whose blob opens, but for `refused` ones; from none it is a miss."""
        refused = {*refused}
        for tier in self._sources(part, refused):
            try:
                async with self._filled(tier, part) as reading:
                    opening = self._opening(part, reading, STAGING if reading.was_resident else tier)
                    rest, _ = await self._open([opening], room, turn, last=last)
                    if opening.fault is None and not reading.was_resident:
                        self._promote(tier, part, wanted="nvme" in refused or not part.found.on_nvme)
                if opening.fault is None:
                    await self._finish([opening], rest, turn)
                    return
                refused.add(tier)
                await self._refuse(tier, part, opening.fault)
            except (BlobMissing, BlobDamaged) as error:
                refused.add(tier)
                await self._refuse(tier, part, error)
            except (TierUnavailable, TierMisconfigured, TimeoutError) as error:
                self.degraded = f"the {tier} tier did not answer: {error}" if str(error) else f"{tier} timed out"
                self.rooms.metrics.tier_failures.labels(tier, "get").inc()
            except (KeyUnavailable, StagingBusy) as error:
                self.degraded = str(error)
                return

    def _sources(self, part: Part, refused: Collection[str]) -> Iterator[str]:
        tiers, found = self.rooms.tiers, part.found
        placed = [tier for tier, there in (("nvme", found.on_nvme), ("s3", found.on_s3)) if there and tier in tiers]
        if self.rooms.staging.holds(part.name):
            yield STAGING
        yield from (tier for tier in placed if tier not in refused)

    @asynccontextmanager
    async def _filled(self, tier: str, part: Part) -> AsyncIterator[Reading]:
        """The resident, filled from `tier` if it is not there, before the deadline."""
        if (answer := self._ahead.answer(tier, part.name)) is not None:
            raise answer

        async def fill(view: memoryview) -> None:
            if tier == STAGING:
                raise BlobMissing("the resident left staging")
            await self.rooms.tiers[tier].get_into(part.name, view)

        limit = self._remaining()
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(limit):
                reading = await stack.enter_async_context(
                    self.rooms.staging.read(self.reader, part.name, part.found.sealed_length, limit, fill)
                )
            yield reading

    async def _open(
        self, openings: Sequence[Opening], room: Room, turn: asyncio.Event, *, last: bool
    ) -> tuple[Delivery | None, int]:
        """Open chunks, and push those that are what they should be if it is their turn; as `open_all` answers.

        It never waits for its turn: whoever holds residents would wait for one who may be waiting for residents.
        """
        workers = self.rooms.workers
        if sum(opening.part.found.length for opening in openings) <= INLINE_BYTES:
            return open_all(openings, room, self.sink, workers.wanted, push=False, last=last)
        push = self.sink.pushes and turn.is_set()
        return await workers.run(lambda: open_all(openings, room, self.sink, workers.wanted, push=push, last=last))

    async def _finish(self, openings: Sequence[Opening], rest: Delivery | None, turn: asyncio.Event) -> None:
        """Deliver what has not left when it was opened, and count what was delivered."""
        if rest is not None:
            await turn.wait()
            await rest.finish()
        moved: Counter[str] = Counter()
        for opening in openings:
            if opening.fault is None:
                self.served[opening.part.index] = opening.origin
                moved[opening.origin] += opening.part.found.length
        for origin, nbytes in moved.items():
            self.rooms.metrics.get_bytes.labels(origin).inc(nbytes)

    async def _refuse(self, tier: str, part: Part, error: BlobMissing | BlobDamaged | SealBroken) -> None:
        """What a tier gave is not the blob: nobody reads it from there again."""
        rooms, found = self.rooms, part.found
        rooms.staging.drop(part.name)
        reason = error.reason if isinstance(error, SealBroken) else type(error).__name__
        rooms.metrics.refused_blobs.labels(tier, reason).inc()
        if tier == STAGING:
            return
        scope, node = self.place.scope, rooms.placement_node(tier)
        try:
            dead = await rooms.catalog.quarantine(scope, found.blob_id, tier, node, rooms.time.now_ms())
        except CatalogUnavailable as error:
            self.degraded = str(error)  # refused again by whoever reads it next; another tier may still have it
            return
        if dead:
            rooms.backlog.note_dead(scope)

    def _promote(self, tier: str, part: Part, *, wanted: bool) -> None:
        """A blob read from below that NVMe has not, or not whole, is due there; until then the resident stays."""
        if tier == "s3" and wanted and "nvme" in self.rooms.tiers and self.rooms.staging.soil(part.name):
            self.rooms.backlog.note_promotion(self.place.scope, part.found.blob_id)

    @property
    def _namespace(self) -> UUID:
        return self.place.scope.namespace

    def _remaining(self) -> float:
        return max(0.0, self.deadline - self.rooms.clock.monotonic())
