"""GET: look up, fill from the fastest tier that has it, open, deliver. Any doubt is a miss (law 2).

Only bytes that were opened under their own address leave (law 3). Chunks are delivered in the order of the keys while
the next one is read and opened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvgw.gateway.directory import Directory, Place
from kvgw.gateway.payloads import PayloadSink
from kvgw.gateway.put import first_cause
from kvgw.gateway.rooms import Rooms
from kvgw.model import GetReply, GetRequest, Hit
from storage.errors import BlobDamaged, BlobMissing, StagingBusy, TierMisconfigured, TierUnavailable
from storage.tier import blob_name
from tenancy.access import Caller, Permission
from tenancy.errors import CatalogUnavailable, KeyUnavailable, SealBroken
from tenancy.model import FormatRow, FoundChunk
from tenancy.naming import entry_keys
from tenancy.sealing import BlobAddress, Sealed, open_sealed

PIPELINE_DEPTH: Final = 2
"""Chunks of one GET in windows at once: one being opened, one being delivered."""

STAGING: Final = "staging"


class GetVerb:
    """Reads batches of chunks."""

    def __init__(self, rooms: Rooms, directory: Directory) -> None:
        self._rooms = rooms
        self._directory = directory

    async def __call__(self, caller: Caller, request: GetRequest, sink: PayloadSink) -> GetReply:
        """Raises the rooms' errors, and whatever `sink` raises."""
        rooms = self._rooms
        caller.require(Permission.GET)
        place = await self._directory.place(caller, request.namespace)
        kv_format = await self._directory.format(place.scope, request.fingerprint)
        keys = entry_keys(place.keys.names.entry, kv_format.fingerprint, request.keys)
        deadline = rooms.clock.monotonic() + request.deadline_ms / 1000
        found = await rooms.catalog.lookup(place.scope, [kv_format.format_id], keys, rooms.time.now_ms())
        wanted = [(index, found[key]) for index, key in enumerate(keys) if key in found]
        reading = _Reading(rooms, place, kv_format, deadline, {})
        await reading.deliver_all(wanted, sink)
        extended = await self._extend(place, kv_format, [one for index, one in wanted if index in reading.served])
        hits = [
            Hit(index, reading.served[index], max(one.expires_ms, extended.get(one.entry_key, 0)))
            for index, one in wanted
            if index in reading.served
        ]
        rooms.metrics.get_chunks.labels("hit").inc(len(hits))
        rooms.metrics.get_chunks.labels("miss").inc(len(keys) - len(hits))
        return GetReply(hits, reading.degraded)

    async def _extend(self, place: Place, kv_format: FormatRow, hits: list[FoundChunk]) -> dict[bytes, int]:
        """Note the hits; extend sliding TTLs of which less than three quarters are left. New expiry by entry key."""
        now_ms = self._rooms.time.now_ms()
        for one in hits:
            self._rooms.backlog.note_hit(place.scope, one.format_id, one.entry_key, now_ms)
            self._rooms.leases.end(place.scope.tenant, one.blob_id)
        if not place.namespace.sliding_ttl:
            return {}
        worn = [one for one in hits if 4 * (one.expires_ms - now_ms) < 3 * one.ttl_ms]
        if not worn:
            return {}
        try:
            await self._rooms.catalog.extend(
                place.scope, kv_format.format_id, [one.entry_key for one in worn], None, now_ms
            )
        except CatalogUnavailable:
            return {}  # the chunks were read and delivered: they are hits, whose life is merely not extended
        return {one.entry_key: now_ms + one.ttl_ms for one in worn}


@dataclass(slots=True)
class _Reading:
    """The middle of a GET: tier → sealed resident → window → sink."""

    rooms: Rooms
    place: Place
    kv_format: FormatRow
    deadline: float
    served: dict[int, str]
    """Batch index → tier that had the chunk, of those delivered."""
    degraded: str = ""

    async def deliver_all(self, wanted: list[tuple[int, FoundChunk]], sink: PayloadSink) -> None:
        room = asyncio.Semaphore(PIPELINE_DEPTH)
        turns = [asyncio.Event() for _ in range(len(wanted) + 1)]
        turns[0].set()
        try:
            async with asyncio.TaskGroup() as group:
                for place, (index, found) in enumerate(wanted):
                    await room.acquire()
                    task = group.create_task(self._deliver(index, found, sink, turns[place], turns[place + 1]))
                    task.add_done_callback(lambda _: room.release())
        except BaseExceptionGroup as group_error:
            raise first_cause(group_error) from group_error

    async def _deliver(
        self, index: int, found: FoundChunk, sink: PayloadSink, turn: asyncio.Event, next_turn: asyncio.Event
    ) -> None:
        staging = self.rooms.staging
        try:
            async with staging.window(self.place.scope.tenant, found.length, self._remaining()) as window:
                tier = await self._open_into(found, window.view)
                await turn.wait()
                if tier is not None:
                    await sink.deliver(index, window.view)
                    self.served[index] = tier
                    self.rooms.metrics.get_bytes.labels(tier).inc(found.length)
        except StagingBusy as error:
            self.degraded = str(error)
            await turn.wait()
        next_turn.set()

    async def _open_into(self, found: FoundChunk, target: memoryview) -> str | None:
        """Fill `target` from the first tier whose blob opens; the tier's label, or None for a miss."""
        name = blob_name(self.place.scope.namespace, found.blob_id)
        for tier in self._sources(found):
            try:
                resident = await self._open_from(tier, name, found, target)
            except (BlobMissing, BlobDamaged, SealBroken) as error:
                await self._refuse(tier, name, found, error)
            except (TierUnavailable, TierMisconfigured, TimeoutError) as error:
                self.degraded = f"the {tier} tier did not answer: {error}" if str(error) else f"{tier} timed out"
                self.rooms.metrics.tier_failures.labels(tier, "get").inc()
            except KeyUnavailable as error:
                self.degraded = str(error)
                return None
            else:
                return STAGING if resident else tier
        return None

    def _sources(self, found: FoundChunk) -> Iterator[str]:
        tiers = self.rooms.tiers
        placed = [tier for tier, there in (("nvme", found.on_nvme), ("s3", found.on_s3)) if there and tier in tiers]
        if self.rooms.staging.holds(blob_name(self.place.scope.namespace, found.blob_id)):
            yield STAGING
        yield from placed

    async def _open_from(self, tier: str, name: str, found: FoundChunk, target: memoryview) -> bool:
        """Open the resident, filled from `tier` if it is not there; whether it was there."""

        async def fill(view: memoryview) -> None:
            if tier == STAGING:
                raise BlobMissing("the resident left staging")
            await self.rooms.tiers[tier].get_into(name, view)

        address = BlobAddress(
            tenant=self.place.scope.tenant,
            namespace=self.place.scope.namespace,
            epoch=found.epoch,
            length=found.length,
            created_ms=found.created_ms,
            fingerprint=self.kv_format.fingerprint,
            seg_log2=found.seg_log2,
        )
        data_key = self.place.keys.data_key(found.epoch)
        expected = Sealed(found.chunk_id, found.tag_root)
        limit = self._remaining()
        async with (
            asyncio.timeout(limit),
            self.rooms.staging.read(self.place.scope.tenant, name, found.sealed_length, limit, fill) as reading,
        ):
            sealed = reading.view
            await self.rooms.workers.run(lambda: open_sealed(data_key, address, found.salt, expected, sealed, target))
            if not reading.was_resident:
                self._promote(tier, name, found)
            return reading.was_resident

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

    def _remaining(self) -> float:
        return max(0.0, self.deadline - self.rooms.clock.monotonic())
