"""GET: look up what is visible, read and deliver it, and note what was read. Any doubt is a miss (law 2)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from kvgw.gateway.ahead import Extra
from kvgw.gateway.directory import Directory, Place
from kvgw.gateway.payloads import PayloadSink
from kvgw.gateway.reading import GroupReader
from kvgw.gateway.rooms import Rooms
from kvgw.gateway.sources import Source, shared_sources, source_of
from kvgw.model import GetReply, GetRequest, Hit
from storage.tier import blob_names
from tenancy.access import Caller, Permission
from tenancy.errors import CatalogUnavailable, KeyGone
from tenancy.model import FormatRow, FoundChunk


@dataclass(frozen=True, slots=True)
class _Asker:
    """Who reads, until when, and where to."""

    caller: Caller
    deadline: float
    sink: PayloadSink
    shared: Sequence[memoryview]
    """Memory of the client's for the first chunks of the batch."""


class GetVerb:
    """Reads batches of chunks."""

    def __init__(self, rooms: Rooms, directory: Directory) -> None:
        self._rooms = rooms
        self._directory = directory
        self._extra = Extra()

    async def __call__(self, caller: Caller, request: GetRequest, sink: PayloadSink) -> GetReply:
        """Raises the rooms' errors, and whatever `sink` raises."""
        rooms = self._rooms
        caller.require(Permission.GET)
        place = await self._directory.place(caller, request.namespace)
        kv_format = await self._directory.format(place.scope, request.fingerprint)
        deadline = rooms.clock.monotonic() + request.deadline_ms / 1000
        own = source_of("", place, [kv_format], request.keys)
        sources = [own, *await shared_sources(self._directory, caller, request.public, own, request.keys)]
        asker = _Asker(caller, deadline, sink, sink.places(len(request.keys), kv_format.chunk_bytes))
        missing = set(range(len(request.keys)))
        hits: list[Hit] = []
        tiers: list[str] = []
        degraded = ""
        for source in sources:
            if missing:
                for reading in await self._read(asker, source, missing):
                    hits += await self._noted(source, reading)
                    if source is own:  # who reads a public namespace does not end its owner's leases
                        delivered = [one.blob_id for index, one in reading.wanted if index in reading.served]
                        rooms.leases.end_all(place.scope.tenant, delivered)
                    missing -= reading.served.keys()
                    degraded = degraded or reading.degraded
                    tiers += reading.served.values()
        # To the namespace that asked, as in a match: nobody runs up another's usage by reading what that publishes.
        rooms.meter.read(place.scope, len(request.keys), tiers, kv_format.chunk_bytes)
        rooms.metrics.get_chunks.labels("hit").inc(len(hits))
        rooms.metrics.get_chunks.labels("miss").inc(len(missing))
        return GetReply(hits, degraded)

    async def _read(self, asker: _Asker, source: Source, missing: Collection[int]) -> list[GroupReader]:
        """Deliver what one namespace has of the missing chunks: in a second go what rows from memory led nowhere to."""
        found, from_memory = await self._find(source)
        reading = await self._deliver(asker, source, found, missing)
        gone = {index for index, _ in reading.wanted} - reading.served.keys()
        if not (from_memory and gone):
            return [reading]
        self._rooms.recent.drop(source.place.scope)
        try:
            found, _ = await self._find(source)
        except CatalogUnavailable as error:
            reading.degraded = str(error)  # what was delivered is a hit all the same
            return [reading]
        reading.degraded = ""  # it asked tiers that the row from memory named
        return [reading, await self._deliver(asker, source, found, gone)]

    async def _deliver(
        self, asker: _Asker, source: Source, found: Mapping[bytes, FoundChunk], missing: Collection[int]
    ) -> GroupReader:
        """Deliver what was found of the missing chunks."""
        try:
            place = await self._directory.reaching(source.place, {one.epoch for one in found.values()})
        except KeyGone:
            if not source.name:
                raise
            place, found = source.place, {}  # shredded in this moment: a public namespace simply has nothing then
        wanted = [(index, found[key]) for index, key in enumerate(source.keys[0]) if index in missing and key in found]
        reading = GroupReader(
            self._rooms,
            place,
            source.formats[0],
            asker.caller.tenant,
            asker.deadline,
            asker.sink,
            asker.shared,
            wanted,
            self._extra,
        )
        await reading.deliver_all()
        return reading

    async def _find(self, source: Source) -> tuple[Mapping[bytes, FoundChunk], bool]:
        """What is visible of the source's keys, and whether it is from memory: nothing ended since and all is here."""
        rooms, scope, keys = self._rooms, source.place.scope, source.keys[0]
        version, now_ms = rooms.catalog.version(scope.tenant), rooms.time.now_ms()
        known = rooms.recent.find(scope, version, keys, now_ms)
        if known is not None and self._all_here(scope.namespace, known):
            worn = source.place.namespace.sliding_ttl and any(_is_worn(one, now_ms) for one in known.values())
            if not worn:  # how long a life is made is the row's to say, as it is now
                return known, True
        found = await source.find(rooms.catalog, now_ms)
        if rooms.catalog.version(scope.tenant) == version:
            rooms.recent.remember(scope, version, found, now_ms)
        return found, False

    def _all_here(self, namespace: UUID, found: Mapping[bytes, FoundChunk]) -> bool:
        holds = self._rooms.staging.holds
        return all(map(holds, blob_names(namespace, b"".join([one.blob_id for one in found.values()]))))

    async def _noted(self, source: Source, reading: GroupReader) -> list[Hit]:
        """What was delivered, with the expiry that it has now."""
        served = [(index, one) for index, one in reading.wanted if index in reading.served]
        extended = await self._extend(source.place, source.formats[0], [one for _, one in served])
        return [
            Hit(index, reading.served[index], max(one.expires_ms, extended.get(one.entry_key, 0)), source.name)
            for index, one in served
        ]

    async def _extend(self, place: Place, kv_format: FormatRow, hits: list[FoundChunk]) -> dict[bytes, int]:
        """Note the hits; extend sliding TTLs of which less than three quarters are left. New expiry by entry key."""
        now_ms = self._rooms.time.now_ms()
        self._rooms.backlog.note_hits(place.scope, kv_format.format_id, [one.entry_key for one in hits], now_ms)
        if not place.namespace.sliding_ttl:
            return {}
        worn = [one for one in hits if _is_worn(one, now_ms)]
        if not worn:
            return {}
        try:
            await self._rooms.catalog.extend(
                place.scope, kv_format.format_id, [one.entry_key for one in worn], None, now_ms
            )
        except CatalogUnavailable:
            return {}  # the chunks were read and delivered: they are hits, whose life is merely not extended
        self._rooms.recent.forget(place.scope, [one.entry_key for one in worn])
        return {one.entry_key: now_ms + one.ttl_ms for one in worn}


def _is_worn(one: FoundChunk, now_ms: int) -> bool:
    """Less than three quarters of its life are left."""
    return 4 * (one.expires_ms - now_ms) < 3 * one.ttl_ms
