"""MATCH: how many leading chunks can be had, in every format that was asked about, and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby, takewhile
from typing import TypeAlias
from uuid import UUID

from kvgw.gateway.directory import Directory, Place
from kvgw.gateway.index import BLOB_ID_BYTES, Run
from kvgw.gateway.reading import STAGING
from kvgw.gateway.rooms import Rooms
from kvgw.gateway.sources import Source, shared_sources, source_of
from kvgw.model import MatchReply, MatchRequest
from storage.tier import blob_names
from tenancy.access import Caller, Permission
from tenancy.errors import FormatUnknown
from tenancy.model import FormatRow, FoundChunk, Namespace, Scope

Seen: TypeAlias = tuple[Source, dict[bytes, FoundChunk]]
Where: TypeAlias = list[tuple[str, str]]
"""Of each chunk the tier that has it, and the public namespace or nothing."""


class MatchVerb:
    """Answers matches."""

    def __init__(self, rooms: Rooms, directory: Directory) -> None:
        self._rooms = rooms
        self._directory = directory

    async def __call__(self, caller: Caller, place: Place, request: MatchRequest) -> MatchReply:
        """Raises the rooms' errors."""
        reply = await self.answer(caller, place, request)
        await self.count(place, request, reply.matched)
        return reply

    def at_once(self, caller: Caller, namespace: Namespace, request: MatchRequest) -> MatchReply | None:
        """As a call, if all of it is known here and now; None: there is more to be asked, and nothing was done."""
        if request.public or Permission.GET not in caller.permissions:
            return None
        scope, formats = namespace.scope, list[FormatRow]()
        for fingerprint in request.fingerprints:
            known = self._directory.known_format(scope, fingerprint)
            if known is None:
                return None
            formats.append(known)
        tiers = self._remembered(scope, formats, request)
        if tiers is None:
            return None
        self._count(scope, request, len(tiers), formats[0])
        return MatchReply(len(tiers), tiers)

    async def count(self, place: Place, request: MatchRequest, matched: int) -> None:
        """Meter one look-up that found so many."""
        try:
            known = await self._directory.format(place.scope, request.fingerprints[0])
        except FormatUnknown:
            known = None
        self._count(place.scope, request, matched, known)

    def _count(self, scope: Scope, request: MatchRequest, matched: int, first: FormatRow | None) -> None:
        metrics, missed = self._rooms.metrics, len(request.keys) - matched
        metrics.match_hits.inc(matched)
        if missed:
            metrics.match_misses.inc(missed)
        if first is not None:
            self._rooms.meter.matched(scope, len(request.keys), matched, first.tokens_per_chunk)

    async def answer(self, caller: Caller, place: Place, request: MatchRequest) -> MatchReply:
        """The answer, not yet metered. Raises the rooms' errors."""
        caller.require(Permission.GET)
        try:
            formats = [await self._directory.format(place.scope, one) for one in request.fingerprints]
        except FormatUnknown:
            # Ranks of an engine start in any order: one that is early matches nothing, and is told why.
            return MatchReply(0, [], "a KV format of this match is not registered in the namespace")
        tiers = None if request.public else self._remembered(place.scope, formats, request)
        if tiers is not None:
            return MatchReply(len(tiers), tiers)
        run = await self._looked_up(caller, place, formats, request)
        return MatchReply(
            len(run), [tier for tier, _ in run], namespaces=[name for _, name in run] if request.public else []
        )

    def _remembered(self, scope: Scope, formats: Sequence[FormatRow], request: MatchRequest) -> list[str] | None:
        """The tier of each chunk, if all of them were found before and nothing may have changed since."""
        rooms = self._rooms
        version = rooms.catalog.version(scope.tenant)
        format_ids = [one.format_id for one in formats]
        known = rooms.index.find(scope, version, format_ids, request.keys, rooms.time.now_ms())
        if known is None:
            return None
        if request.lease_ms:
            blob_ids = [one for spans in known for run, count in spans for one in run.blobs(count)]
            rooms.leases.take(scope.tenant, blob_ids, request.lease_ms)
        tiers = [self._tiers(scope.namespace, run, count) for run, count in known[0]]
        return tiers[0] if len(tiers) == 1 else list(chain.from_iterable(tiers))

    def _tiers(self, namespace: UUID, run: Run, count: int) -> list[str]:
        """Where the leading chunks of a run are: as before, while nothing entered or left staging."""
        staging = self._rooms.staging
        if run.tiers_as_of != staging.changes or len(run.tiers) < count:
            names = blob_names(namespace, run.blob_ids[: count * BLOB_ID_BYTES])
            run.tiers = [self._fastest(name, bool(on_nvme)) for name, on_nvme in zip(names, run.on_nvme, strict=False)]
            run.tiers_as_of = staging.changes
        return run.tiers[:count]

    async def _looked_up(
        self, caller: Caller, place: Place, formats: Sequence[FormatRow], request: MatchRequest
    ) -> Where:
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
                rooms.index.remember(place.scope, version, kv_format.format_id, _settled(request.keys, run))
        return self._where(runs[0][:count])

    def _where(self, run: Sequence[tuple[Source, FoundChunk]]) -> Where:
        where: Where = []
        for _, pairs in groupby(run, key=lambda pair: id(pair[0])):
            (source, *_), chunks = zip(*pairs, strict=True)
            names = blob_names(source.place.scope.namespace, b"".join([one.blob_id for one in chunks]))
            tiers = [self._fastest(name, one.on_nvme) for name, one in zip(names, chunks, strict=True)]
            where += [(tier, source.name) for tier in tiers]
        return where

    def _fastest(self, name: str, on_nvme: bool) -> str:
        return STAGING if self._rooms.staging.holds(name) else "nvme" if on_nvme else "s3"


def _settled(engine_keys: Sequence[bytes], run: Sequence[tuple[Source, FoundChunk]]) -> list[tuple[bytes, FoundChunk]]:
    """The leading chunks that a tier has: what only staging holds may leave it without the catalog's knowledge."""
    pairs = ((key, found) for key, (_, found) in zip(engine_keys, run, strict=False))
    return list(takewhile(lambda pair: pair[1].on_nvme or pair[1].on_s3, pairs))


def _leading_run(seen: Sequence[Seen], rank: int, keys: int) -> list[tuple[Source, FoundChunk]]:
    """The leading chunks of one format, each from the first namespace that has it."""
    run = []
    for index in range(keys):
        chunk = next(((one, there[key]) for one, there in seen if (key := one.keys[rank][index]) in there), None)
        if chunk is None:
            break
        run.append(chunk)
    return run
