"""MATCH: how many leading chunks can be had, in every format that was asked about, and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvgw.gateway.directory import Directory, Place
from kvgw.gateway.reading import STAGING
from kvgw.gateway.rooms import Rooms
from kvgw.gateway.sources import Source, shared_sources, source_of
from kvgw.model import MatchReply, MatchRequest
from storage.tier import blob_name
from tenancy.access import Caller, Permission
from tenancy.errors import FormatUnknown
from tenancy.model import FormatRow, FoundChunk

Seen: TypeAlias = tuple[Source, dict[bytes, FoundChunk]]
Run: TypeAlias = list[tuple[str, str]]
"""Of each chunk the tier that has it, and the public namespace or nothing."""


class MatchVerb:
    """Answers matches."""

    def __init__(self, rooms: Rooms, directory: Directory) -> None:
        self._rooms = rooms
        self._directory = directory

    async def __call__(self, caller: Caller, request: MatchRequest) -> MatchReply:
        """Raises the rooms' errors."""
        reply = await self.answer(caller, request)
        await self.count(caller, request, reply.matched)
        return reply

    async def count(self, caller: Caller, request: MatchRequest, matched: int) -> None:
        """Meter one look-up that found so many."""
        rooms = self._rooms
        rooms.metrics.match_keys.labels("hit").inc(matched)
        rooms.metrics.match_keys.labels("miss").inc(len(request.keys) - matched)
        place = await self._directory.place(caller, request.namespace)
        try:
            known = await self._directory.format(place.scope, request.fingerprints[0])
        except FormatUnknown:
            return
        rooms.meter.matched(place.scope, len(request.keys), matched, known.tokens_per_chunk)

    async def answer(self, caller: Caller, request: MatchRequest) -> MatchReply:
        """The answer, not yet metered. Raises the rooms' errors."""
        caller.require(Permission.GET)
        place = await self._directory.place(caller, request.namespace)
        try:
            formats = [await self._directory.format(place.scope, one) for one in request.fingerprints]
        except FormatUnknown:
            # Ranks of an engine start in any order: one that is early matches nothing, and is told why.
            return MatchReply(0, [], "a KV format of this match is not registered in the namespace")
        run = None if request.public else self._remembered(place, formats, request)
        if run is None:
            run = await self._looked_up(caller, place, formats, request)
        return MatchReply(
            len(run), [tier for tier, _ in run], namespaces=[name for _, name in run] if request.public else []
        )

    def _remembered(self, place: Place, formats: Sequence[FormatRow], request: MatchRequest) -> Run | None:
        """The whole run, if all of it was found before and nothing may have changed since."""
        rooms = self._rooms
        version = rooms.catalog.version(place.scope.tenant)
        format_ids = [one.format_id for one in formats]
        known = rooms.index.find(place.scope, version, format_ids, request.keys, rooms.time.now_ms())
        if known is None:
            return None
        if request.lease_ms:
            rooms.leases.take(place.scope.tenant, [one.blob_id for run in known for one in run], request.lease_ms)
        holds = rooms.staging.holds
        return [(STAGING if holds(one.object_name) else "nvme" if one.on_nvme else "s3", "") for one in known[0]]

    async def _looked_up(
        self, caller: Caller, place: Place, formats: Sequence[FormatRow], request: MatchRequest
    ) -> Run:
        """The leading run that the catalog and the public namespaces have now."""
        rooms = self._rooms
        own = source_of("", place, formats, request.keys)
        sources = [own, *await shared_sources(self._directory, caller, request.public, own, request.keys)]
        now_ms = rooms.time.now_ms()
        version = rooms.catalog.version(place.scope.tenant)
        seen = [(source, await source.find(rooms.catalog, now_ms)) for source in sources]
        runs = [_leading_run(seen, rank, len(request.keys)) for rank in range(len(formats))]
        count = min(map(len, runs))
        if request.lease_ms:
            # Only the tenant's own: nobody shields another's chunks from that other's eviction.
            mine = [found.blob_id for run in runs for source, found in run[:count] if source is own]
            rooms.leases.take(place.scope.tenant, mine, request.lease_ms)
        if not request.public:
            for kv_format, run in zip(formats, runs, strict=True):
                rooms.index.remember(place.scope, version, kv_format.format_id, _named(place, request.keys, run))
        return [(self._fastest(source, found), source.name) for source, found in runs[0][:count]]

    def _fastest(self, source: Source, found: FoundChunk) -> str:
        if self._rooms.staging.holds(blob_name(source.place.scope.namespace, found.blob_id)):
            return STAGING
        return "nvme" if found.on_nvme else "s3"


def _named(
    place: Place, engine_keys: Sequence[bytes], run: Sequence[tuple[Source, FoundChunk]]
) -> list[tuple[bytes, str, FoundChunk]]:
    """What a tier has on its own account; what only staging holds may leave it without the catalog's knowledge."""
    return [
        (key, blob_name(place.scope.namespace, found.blob_id), found)
        for key, (_, found) in zip(engine_keys, run, strict=False)
        if found.on_nvme or found.on_s3
    ]


def _leading_run(seen: Sequence[Seen], rank: int, keys: int) -> list[tuple[Source, FoundChunk]]:
    """The leading chunks of one format, each from the first namespace that has it."""
    run = []
    for index in range(keys):
        chunk = next(((one, there[key]) for one, there in seen if (key := one.keys[rank][index]) in there), None)
        if chunk is None:
            break
        run.append(chunk)
    return run
