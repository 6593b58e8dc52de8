"""MATCH: how many leading chunks can be had, in every format that was asked about, and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvgw.gateway.directory import Directory
from kvgw.gateway.reading import STAGING
from kvgw.gateway.rooms import Rooms
from kvgw.gateway.sources import Source, shared_sources, source_of
from kvgw.model import MatchReply, MatchRequest
from storage.tier import blob_name
from tenancy.access import Caller, Permission
from tenancy.errors import FormatUnknown
from tenancy.model import FoundChunk

Seen: TypeAlias = tuple[Source, dict[bytes, FoundChunk]]


class MatchVerb:
    """Answers matches."""

    def __init__(self, rooms: Rooms, directory: Directory) -> None:
        self._rooms = rooms
        self._directory = directory

    async def __call__(self, caller: Caller, request: MatchRequest) -> MatchReply:
        """Raises the rooms' errors."""
        rooms = self._rooms
        caller.require(Permission.GET)
        place = await self._directory.place(caller, request.namespace)
        try:
            formats = [await self._directory.format(place.scope, one) for one in request.fingerprints]
        except FormatUnknown:
            # Ranks of an engine start in any order: one that is early matches nothing, and is told why.
            return MatchReply(0, [], "a KV format of this match is not registered in the namespace")
        own = source_of("", place, formats, request.keys)
        sources = [own, *await shared_sources(self._directory, caller, request.public, own, request.keys)]
        now_ms = rooms.time.now_ms()
        seen = [(source, await source.find(rooms.catalog, now_ms)) for source in sources]
        runs = [_leading_run(seen, rank, len(request.keys)) for rank in range(len(formats))]
        count = min(map(len, runs))
        if request.lease_ms:
            # Only the tenant's own: nobody shields another's chunks from that other's eviction.
            mine = [found.blob_id for run in runs for source, found in run[:count] if source is own]
            rooms.leases.take(place.scope.tenant, mine, request.lease_ms)
        rooms.metrics.match_keys.labels("hit").inc(count)
        rooms.metrics.match_keys.labels("miss").inc(len(request.keys) - count)
        rooms.meter.matched(place.scope, len(request.keys), count, formats[0].tokens_per_chunk)
        shown = runs[0][:count]
        return MatchReply(
            count,
            [self._fastest(source, found) for source, found in shown],
            namespaces=[source.name for source, _ in shown] if request.public else [],
        )

    def _fastest(self, source: Source, found: FoundChunk) -> str:
        if self._rooms.staging.holds(blob_name(source.place.scope.namespace, found.blob_id)):
            return STAGING
        return "nvme" if found.on_nvme else "s3"


def _leading_run(seen: Sequence[Seen], rank: int, keys: int) -> list[tuple[Source, FoundChunk]]:
    """The leading chunks of one format, each from the first namespace that has it."""
    run = []
    for index in range(keys):
        chunk = next(((one, there[key]) for one, there in seen if (key := one.keys[rank][index]) in there), None)
        if chunk is None:
            break
        run.append(chunk)
    return run
