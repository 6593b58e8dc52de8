"""PUT: reserve, receive, seal, store, commit. Bytes before pointer (law 1); every other exit gives all of it back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from kvgw.errors import RequestRefused
from kvgw.gateway.directory import Directory, Place
from kvgw.gateway.payloads import PayloadSource
from kvgw.gateway.rooms import Rooms
from kvgw.gateway.turns import step_aside
from kvgw.gateway.writing import ROOM_SHARE, GroupWriter
from kvgw.model import Durability, PutOutcome, PutReply, PutRequest
from kvgw.runtime import finish
from storage.errors import StorageError
from storage.tier import blob_name
from tenancy.access import Caller, Permission
from tenancy.births import Batch, born
from tenancy.errors import CatalogUnavailable
from tenancy.model import FormatRow
from tenancy.naming import entry_keys, label_mac
from tenancy.putting import Committed, Reserved
from tenancy.sealing import sealed_length

LEASE_MARGIN_MS: Final = 5_000
"""A reservation outlives its request's deadline by this, so that only a dead gateway's are reclaimed."""

ROOM_PAUSE_SECONDS: Final = 0.1


class PutVerb:
    """Stores batches of chunks."""

    def __init__(self, rooms: Rooms, directory: Directory) -> None:
        self._rooms = rooms
        self._directory = directory

    async def __call__(self, caller: Caller, request: PutRequest, source: PayloadSource) -> PutReply:
        """Raises the rooms' errors, and whatever `source` raises."""
        rooms = self._rooms
        caller.require(Permission.PUT)
        place = await self._directory.place(caller, request.namespace)
        kv_format = await self._directory.format(place.scope, request.fingerprint)
        batch = self._batch(caller, place, kv_format, request)
        deadline = rooms.clock.monotonic() + request.deadline_ms / 1000
        await rooms.outbox.admit(batch.durability, request.deadline_ms / 1000)
        reservation_id = rooms.rng.token(16)
        now_ms = rooms.time.now_ms()
        lease_until_ms = now_ms + request.deadline_ms + LEASE_MARGIN_MS
        writing = GroupWriter(rooms, place, kv_format, batch, deadline)
        try:
            # Cancelled here, the reservation may have been made all the same.
            reserved = await self._reserve(place, batch, reservation_id, lease_until_ms, deadline)
            await source.wanted(reserved.wanted)
            if not reserved.wanted:
                return self._metered(batch, kv_format, _reply(batch, now_ms, reserved.have, reserved.over_quota, None))
            step_aside()  # what is left waits for the client, for threads, which serve tenants in turns, and for a tier
            await writing.receive_all(reserved.wanted, source)
            source.check()  # before anything points at bytes that may have become those of another chunk
            rooms.fence.check()
        except BaseException:
            await finish(asyncio.ensure_future(self._undo(writing, reservation_id)))
            raise
        # From here on the chunks may be announced even if the client is gone: both halves of it happen.
        version, announced_ms = rooms.catalog.version(place.scope.tenant), rooms.time.now_ms()
        committed = await finish(asyncio.ensure_future(self._commit(writing, reservation_id, announced_ms)))
        reply = _reply(batch, now_ms, reserved.have, reserved.over_quota, committed)
        self._metered(batch, kv_format, reply)
        if rooms.catalog.version(place.scope.tenant) == version:
            fresh = [born(batch, new, announced_ms) for new in writing.chunks if new.index in committed.fresh]
            rooms.recent.remember(place.scope, version, {one.entry_key: one for one in fresh}, announced_ms)
        return reply

    async def _reserve(
        self, place: Place, batch: Batch, reservation_id: bytes, lease_until_ms: int, deadline: float
    ) -> Reserved:
        """Claim quota. A namespace whose policy is to make room gives up its own least valuable entries for it."""
        rooms = self._rooms
        patience = rooms.clock.monotonic() + ROOM_SHARE * (deadline - rooms.clock.monotonic())
        while True:
            now_ms = rooms.time.now_ms()
            reserved = await rooms.catalog.reserve(batch, reservation_id, lease_until_ms, now_ms)
            self._forget(place, reserved.doomed)
            if not reserved.over_quota or place.namespace.over_quota != "make_room":
                return reserved
            if rooms.clock.monotonic() + ROOM_PAUSE_SECONDS > patience:
                return reserved
            # What is made room for must not count meanwhile, or the room would be made once more.
            await rooms.catalog.abort(place.scope, reservation_id)
            dead = await rooms.catalog.make_room(place.scope, now_ms)
            self._forget(place, dead)
            if not dead and not await rooms.catalog.leaving(place.scope):
                return await rooms.catalog.reserve(batch, reservation_id, lease_until_ms, now_ms)
            rooms.backlog.note_dead(place.scope)
            step_aside()
            await rooms.clock.sleep(ROOM_PAUSE_SECONDS)

    def _metered(self, batch: Batch, kv_format: FormatRow, reply: PutReply) -> PutReply:
        self._rooms.meter.wrote(batch, reply.outcomes, kv_format)
        self._rooms.recent.forget(batch.scope, batch.entry_keys)  # what was there may live longer now
        return reply

    def _batch(self, caller: Caller, place: Place, kv_format: FormatRow, request: PutRequest) -> Batch:
        names = place.keys.names
        keys = tuple(entry_keys(names.entry, kv_format.fingerprint, request.keys))
        first = None
        if request.parent is not None:
            first = entry_keys(names.entry, kv_format.fingerprint, [request.parent])[0]
        policy = place.namespace
        asked = request.durability or Durability(policy.durability)
        durability = max(asked, Durability(policy.durability), key=lambda level: level.rank)
        if durability is not Durability.STAGED and durability.value not in self._rooms.tiers:
            raise RequestRefused(
                f"durability {durability.value} was asked for, but this gateway has no {durability.value} tier"
            )
        return Batch(
            scope=place.scope,
            format_id=kv_format.format_id,
            entry_keys=keys,
            parents=(first, *keys[:-1]) if request.chained else (None,) * len(keys),
            # An entry without a parent is the head of a chain at depth 0, and of unknown descent behind that.
            depth=request.depth if request.chained else max(request.depth, 1),
            tokens=kv_format.tokens_per_chunk,
            sealed_length=sealed_length(kv_format.chunk_bytes),
            ttl_ms=min(request.ttl_ms or policy.default_ttl_ms, policy.max_ttl_ms),
            durability=durability.value,
            label_macs=tuple({label_mac(names.label, label.kind, label.value) for label in request.labels}),
            writer=caller.name,
            tiers=self._rooms.intended_tiers,
        )

    async def _undo(self, writing: GroupWriter, reservation_id: bytes) -> None:
        """Give back quota, memory and bytes. Whatever cannot be given back now ends with its lease or as an orphan."""
        rooms = self._rooms
        try:
            await rooms.catalog.abort(writing.place.scope, reservation_id)
        except CatalogUnavailable:
            rooms.metrics.aborts_failed.inc()
        await self._discard(writing, writing.attempted)

    async def _commit(self, writing: GroupWriter, reservation_id: bytes, now_ms: int) -> Committed:
        rooms, place = self._rooms, writing.place
        try:
            committed = await rooms.catalog.commit(writing.batch, reservation_id, writing.chunks, now_ms)
        except BaseException:
            # Whether it was committed may be unknown: bytes in tiers stay, for the orphan sweep to judge.
            for name in writing.attempted:
                rooms.staging.drop(name)
            raise
        self._forget(place, committed.doomed)
        rooms.backlog.note_writes(place.scope)
        rooms.arrivals.note(place.scope)
        await self._discard(writing, [blob_name(place.scope.namespace, blob_id) for blob_id in committed.discarded])
        rooms.metrics.put_bytes.inc(len(committed.stored) * writing.kv_format.chunk_bytes)
        return committed

    def _forget(self, place: Place, blob_ids: Sequence[bytes]) -> None:
        for blob_id in blob_ids:
            self._rooms.staging.drop(blob_name(place.scope.namespace, blob_id))
        if blob_ids:
            self._rooms.backlog.note_dead(place.scope)

    async def _discard(self, writing: GroupWriter, names: Sequence[str]) -> None:
        """Delete blobs that nothing points at, and nothing ever did."""
        for name in names:
            self._rooms.staging.drop(name)
        tier = self._rooms.tiers.get(writing.batch.durability)
        if tier is None or not names:
            return
        try:
            await tier.delete(names)
        except StorageError:
            self._rooms.metrics.orphans.labels(tier.label).inc(len(names))


def _reply(
    batch: Batch, now_ms: int, have: frozenset[int], over_quota: frozenset[int], committed: Committed | None
) -> PutReply:
    outcomes = []
    for index in range(len(batch.entry_keys)):
        if index in have or (committed is not None and index in committed.have):
            outcomes.append(PutOutcome.HAVE)
        elif index in over_quota:
            outcomes.append(PutOutcome.OVER_QUOTA)
        elif committed is not None and index in committed.conflict:
            outcomes.append(PutOutcome.CONFLICT)
        else:
            outcomes.append(PutOutcome.STORED)
    reason = "the quota of the tenant or namespace is used up; delete chunks or raise it" if over_quota else ""
    return PutReply(outcomes, now_ms + batch.ttl_ms, reason)
