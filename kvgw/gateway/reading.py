"""The middle of a GET: tier → sealed resident → window → client. Any doubt is a miss (law 2).

A group of chunks is opened and leaves in one visit to a worker thread: what was just decrypted is still in the cache
when it is sent and zeroed. Only bytes that were opened under their own address leave (law 3).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from uuid import UUID

from kvgw.gateway.directory import Place
from kvgw.gateway.payloads import Chunk, Delivery, PayloadSink, groups
from kvgw.gateway.rooms import Rooms
from kvgw.runtime import first_cause
from storage.access import Reading, Window
from storage.errors import BlobDamaged, BlobMissing, StagingBusy, TierMisconfigured, TierUnavailable
from storage.tier import blob_name
from tenancy.errors import CatalogUnavailable, KeyUnavailable, SealBroken
from tenancy.keys.secret import SecretBytes
from tenancy.model import FormatRow, FoundChunk
from tenancy.sealing import BlobAddress, Sealed, open_sealed

PIPELINE_DEPTH: Final = 2
"""Groups of one GET in windows at once: one on its way to the client, one being read."""

STAGING: Final = "staging"

Wanted: TypeAlias = tuple[int, FoundChunk]
"""Batch index, and what the catalog knows of the chunk."""


@dataclass(slots=True)
class _Part:
    """One chunk of a group, and the part of the group's window that is for it."""

    index: int
    found: FoundChunk
    span: slice


@dataclass(slots=True)
class _Opening:
    """Everything that opening a chunk takes; `fault` tells why it could not be opened."""

    part: _Part
    data_key: SecretBytes
    address: BlobAddress
    sealed: memoryview
    fault: SealBroken | None = None

    def open_into(self, target: memoryview) -> bool:
        found = self.part.found
        try:
            open_sealed(
                self.data_key,
                self.address,
                found.salt,
                Sealed(found.chunk_id, found.tag_root),
                self.sealed,
                target,
            )
        except SealBroken as error:
            # Anew: the one that was raised holds slices of the window in its traceback, which is about to be zeroed.
            self.fault = SealBroken(error.reason, error.detail)
        return self.fault is None


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
    wanted: Sequence[Wanted]
    served: dict[int, str] = field(default_factory=dict)
    """Batch index → tier that had the chunk, of those delivered."""
    degraded: str = ""
    """Why chunks that are there could not be read; empty when there was no such reason."""

    async def deliver_all(self) -> None:
        """Deliver what is wanted. Raises whatever the sink raises."""
        room = asyncio.Semaphore(PIPELINE_DEPTH)
        turn = asyncio.Event()
        turn.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                for group in groups(self.wanted, self.kv_format.chunk_bytes, self.rooms.staging.window_limit):
                    await room.acquire()
                    next_turn = asyncio.Event()
                    task = tasks.create_task(self._deliver(group, turn, next_turn))
                    task.add_done_callback(lambda _: room.release())
                    turn = next_turn
        except BaseExceptionGroup as group_error:
            raise first_cause(group_error) from group_error

    async def _deliver(self, group: Sequence[Wanted], turn: asyncio.Event, next_turn: asyncio.Event) -> None:
        nbytes = sum(found.length for _, found in group)
        try:
            async with self.rooms.staging.window(self.reader, nbytes, self._remaining()) as window:
                await self._fill_and_deliver(_parts(group), window, turn)
        except StagingBusy as error:
            self.degraded = str(error)
        await turn.wait()
        next_turn.set()

    async def _fill_and_deliver(self, parts: Sequence[_Part], window: Window, turn: asyncio.Event) -> None:
        """Runs of residents together, everything else alone."""
        while parts:
            count = await self._deliver_residents(parts, window, turn)
            if count == 0:
                await self._deliver_alone(parts[0], window, turn, last=len(parts) == 1)
            parts = parts[max(1, count) :]

    async def _deliver_residents(self, parts: Sequence[_Part], window: Window, turn: asyncio.Event) -> int:
        """Deliver the leading run that staging has; its length."""
        blobs = [(self._name(part.found), part.found.sealed_length) for part in parts]
        if self.sink.pushes and self.rooms.staging.holds(blobs[0][0]):
            await turn.wait()  # now, because nobody waits while holding residents
        with self.rooms.staging.residents(self.reader, blobs) as readings:
            openings = self._openings(parts, readings)
            rest = await self._open(openings, window, turn, last=len(openings) == len(parts))
        await self._finish(openings, rest, STAGING, turn)
        for opening in openings:
            if opening.fault is not None:
                part = opening.part
                await self._refuse(STAGING, self._name(part.found), part.found, opening.fault)
                await self._deliver_alone(part, window, turn, last=False)
        return len(openings)

    def _openings(self, parts: Sequence[_Part], readings: Sequence[Reading]) -> list[_Opening]:
        """What has a key, up to the first chunk that has none."""
        openings = []
        for part, reading in zip(parts, readings, strict=False):
            try:
                openings.append(self._opening(part, reading))
            except KeyUnavailable:
                break
        return openings

    def _opening(self, part: _Part, reading: Reading) -> _Opening:
        found = part.found
        address = BlobAddress(
            tenant=self.place.scope.tenant,
            namespace=self.place.scope.namespace,
            epoch=found.epoch,
            length=found.length,
            created_ms=found.created_ms,
            fingerprint=self.kv_format.fingerprint,
            seg_log2=found.seg_log2,
        )
        return _Opening(part, self.place.keys.data_key(found.epoch), address, reading.view)

    async def _deliver_alone(self, part: _Part, window: Window, turn: asyncio.Event, *, last: bool) -> None:
        """Deliver a chunk from the first tier whose blob opens; from none it is a miss."""
        name = self._name(part.found)
        for tier in self._sources(name, part.found):
            try:
                async with self._filled(tier, name, part.found) as reading:
                    opening = self._opening(part, reading)
                    origin = STAGING if reading.was_resident else tier
                    rest = await self._open([opening], window, turn, last=last)
                    if opening.fault is None and not reading.was_resident:
                        self._promote(tier, name, part.found)
                if opening.fault is None:
                    await self._finish([opening], rest, origin, turn)
                    return
                await self._refuse(tier, name, part.found, opening.fault)
            except (BlobMissing, BlobDamaged) as error:
                await self._refuse(tier, name, part.found, error)
            except (TierUnavailable, TierMisconfigured, TimeoutError) as error:
                self.degraded = f"the {tier} tier did not answer: {error}" if str(error) else f"{tier} timed out"
                self.rooms.metrics.tier_failures.labels(tier, "get").inc()
            except (KeyUnavailable, StagingBusy) as error:
                self.degraded = str(error)
                return

    def _sources(self, name: str, found: FoundChunk) -> Iterator[str]:
        tiers = self.rooms.tiers
        placed = [tier for tier, there in (("nvme", found.on_nvme), ("s3", found.on_s3)) if there and tier in tiers]
        if self.rooms.staging.holds(name):
            yield STAGING
        yield from placed

    @asynccontextmanager
    async def _filled(self, tier: str, name: str, found: FoundChunk) -> AsyncIterator[Reading]:
        """The resident, filled from `tier` if it is not there, before the deadline."""

        async def fill(view: memoryview) -> None:
            if tier == STAGING:
                raise BlobMissing("the resident left staging")
            await self.rooms.tiers[tier].get_into(name, view)

        limit = self._remaining()
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(limit):
                reading = await stack.enter_async_context(
                    self.rooms.staging.read(self.reader, name, found.sealed_length, limit, fill)
                )
            yield reading

    async def _open(
        self, openings: Sequence[_Opening], window: Window, turn: asyncio.Event, *, last: bool
    ) -> Delivery | None:
        """Open chunks, and push those that are what they should be if it is their turn; what has not left yet.

        It never waits for its turn: whoever holds residents would wait for one who may be waiting for residents.
        """
        if not openings:
            return None
        push = self.sink.pushes and turn.is_set()
        return await self.rooms.workers.run(lambda: _open_all(openings, window, self.sink, push=push, last=last))

    async def _finish(
        self, openings: Sequence[_Opening], rest: Delivery | None, tier: str, turn: asyncio.Event
    ) -> None:
        """Deliver what has not left when it was opened, and count what was delivered."""
        if rest is not None:
            await turn.wait()
            await rest.finish()
        delivered = [opening.part for opening in openings if opening.fault is None]
        self.served.update((part.index, tier) for part in delivered)
        self.rooms.metrics.get_bytes.labels(tier).inc(sum(part.found.length for part in delivered))

    async def _refuse(
        self, tier: str, name: str, found: FoundChunk, error: BlobMissing | BlobDamaged | SealBroken
    ) -> None:
        """What a tier gave is not the blob: nobody reads it from there again."""
        rooms = self.rooms
        rooms.staging.drop(name)
        reason = error.reason if isinstance(error, SealBroken) else type(error).__name__
        rooms.metrics.refused_blobs.labels(tier, reason).inc()
        if tier == STAGING:
            return
        scope = self.place.scope
        node = rooms.placement_node(tier)
        try:
            dead = await rooms.catalog.quarantine(scope, found.blob_id, tier, node, rooms.time.now_ms())
        except CatalogUnavailable as error:
            self.degraded = str(error)  # refused again by whoever reads it next; another tier may still have it
            return
        if dead:
            rooms.backlog.note_dead(scope)

    def _promote(self, tier: str, name: str, found: FoundChunk) -> None:
        """A blob read from below is due on NVMe; until it is there the resident stays."""
        if tier == "s3" and "nvme" in self.rooms.tiers and not found.on_nvme and self.rooms.staging.soil(name):
            self.rooms.backlog.note_promotion(self.place.scope, found.blob_id)

    def _name(self, found: FoundChunk) -> str:
        return blob_name(self.place.scope.namespace, found.blob_id)

    def _remaining(self) -> float:
        return max(0.0, self.deadline - self.rooms.clock.monotonic())


def _parts(group: Sequence[Wanted]) -> list[_Part]:
    parts, at = [], 0
    for index, found in group:
        parts.append(_Part(index, found, slice(at, at + found.length)))
        at += found.length
    return parts


def _open_all(
    openings: Sequence[_Opening], window: Window, sink: PayloadSink, *, push: bool, last: bool
) -> Delivery | None:
    """In a worker thread: what has not left yet. When all of a window has left, it is zeroed here."""
    opened: list[Chunk] = []
    for opening in openings:
        target = window.view[opening.part.span]
        if opening.open_into(target):
            opened.append((opening.part.index, target))
    delivery = sink.delivery(opened)
    if not push or not delivery.push():
        return delivery
    if last and len(opened) == len(openings):
        for _, payload in opened:
            payload.release()
        window.wipe()
    return None
