"""PUT: reserve, receive, seal, store, commit. Bytes before pointer (law 1); every other exit gives all of it back.

Chunks are received one after the other while those before them are hashed and sealed in worker threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

from kvgw.errors import Code, Outage, RequestRefused
from kvgw.gateway.directory import Directory, Place
from kvgw.gateway.payloads import PayloadSource
from kvgw.gateway.rooms import Rooms
from kvgw.model import Durability, PutOutcome, PutReply, PutRequest
from kvgw.runtime import finish
from storage.access import Window
from storage.errors import StorageError
from storage.tier import blob_name
from tenancy.access import Caller, Permission
from tenancy.births import Batch, NewChunk
from tenancy.errors import CatalogUnavailable
from tenancy.model import FormatRow
from tenancy.naming import entry_keys, label_mac
from tenancy.putting import Committed
from tenancy.sealing import SEG_LOG2_DEFAULT, BlobAddress, Sealed, seal, sealed_length

PIPELINE_DEPTH: Final = 2
"""Chunks of one PUT in windows at once: one being received, one being sealed."""

LEASE_MARGIN_MS: Final = 5_000
"""A reservation outlives its request's deadline by this, so that only a dead gateway's are reclaimed."""


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
        reservation_id = rooms.rng.token(16)
        now_ms = rooms.time.now_ms()
        lease_until_ms = now_ms + request.deadline_ms + LEASE_MARGIN_MS
        writing = _Writing(rooms, place, kv_format, batch, deadline)
        try:
            # Cancelled here, the reservation may have been made all the same.
            reserved = await rooms.catalog.reserve(batch, reservation_id, lease_until_ms, now_ms)
            self._forget(place, reserved.doomed)
            await source.wanted(reserved.wanted)
            if not reserved.wanted:
                return _reply(batch, now_ms, reserved.have, reserved.over_quota, None)
            await writing.receive_all(reserved.wanted, source)
            rooms.fence.check()
        except BaseException:
            await finish(asyncio.ensure_future(self._undo(writing, reservation_id)))
            raise
        # From here on the chunks may be announced even if the client is gone: both halves of it happen.
        committed = await finish(asyncio.ensure_future(self._commit(writing, reservation_id)))
        return _reply(batch, now_ms, reserved.have, reserved.over_quota, committed)

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
            parents=(first, *keys[:-1]),
            depth=request.depth,
            tokens=kv_format.tokens_per_chunk,
            sealed_length=sealed_length(kv_format.chunk_bytes),
            ttl_ms=min(request.ttl_ms or policy.default_ttl_ms, policy.max_ttl_ms),
            durability=durability.value,
            label_macs=tuple({label_mac(names.label, label.kind, label.value) for label in request.labels}),
            writer=caller.name,
            tiers=self._rooms.intended_tiers,
        )

    async def _undo(self, writing: _Writing, reservation_id: bytes) -> None:
        """Give back quota, memory and bytes. Whatever cannot be given back now ends with its lease or as an orphan."""
        rooms = self._rooms
        try:
            await rooms.catalog.abort(writing.place.scope, reservation_id)
        except CatalogUnavailable:
            rooms.metrics.aborts_failed.inc()
        await self._discard(writing, writing.attempted)

    async def _commit(self, writing: _Writing, reservation_id: bytes) -> Committed:
        rooms, place = self._rooms, writing.place
        try:
            committed = await rooms.catalog.commit(writing.batch, reservation_id, writing.chunks, rooms.time.now_ms())
        except BaseException:
            # Whether it was committed may be unknown: bytes in tiers stay, for the orphan sweep to judge.
            for name in writing.attempted:
                rooms.staging.drop(name)
            raise
        self._forget(place, committed.doomed)
        rooms.backlog.note_writes(place.scope)
        await self._discard(writing, [blob_name(place.scope.namespace, blob_id) for blob_id in committed.discarded])
        rooms.metrics.put_bytes.inc(len(committed.stored) * writing.kv_format.chunk_bytes)
        return committed

    def _forget(self, place: Place, blob_ids: Sequence[bytes]) -> None:
        for blob_id in blob_ids:
            self._rooms.staging.drop(blob_name(place.scope.namespace, blob_id))
        if blob_ids:
            self._rooms.backlog.note_dead(place.scope)

    async def _discard(self, writing: _Writing, names: Sequence[str]) -> None:
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


@dataclass(slots=True)
class _Writing:
    """The middle of a PUT: payload → window → sealed resident → tiers."""

    rooms: Rooms
    place: Place
    kv_format: FormatRow
    batch: Batch
    deadline: float
    chunks: list[NewChunk] = field(default_factory=list)
    attempted: list[str] = field(default_factory=list)
    """Names under which bytes may be somewhere, in staging or a tier."""

    async def receive_all(self, wanted: Sequence[int], source: PayloadSource) -> None:
        room = asyncio.Semaphore(PIPELINE_DEPTH)
        try:
            async with asyncio.TaskGroup() as group:
                for index in wanted:
                    await room.acquire()
                    async with AsyncExitStack() as stack:
                        stack.callback(room.release)
                        window = await stack.enter_async_context(
                            self.rooms.staging.window(
                                self.place.scope.tenant, self.kv_format.chunk_bytes, self._remaining()
                            )
                        )
                        await source.receive(index, window.view)
                        group.create_task(self._store(index, window, stack.pop_all()))
        except BaseExceptionGroup as group_error:
            raise first_cause(group_error) from group_error
        self.chunks.sort(key=lambda new: new.index)

    async def _store(self, index: int, window: Window, stack: AsyncExitStack) -> None:
        rooms, scope = self.rooms, self.place.scope
        blob_id = rooms.rng.token(16)
        name = blob_name(scope.namespace, blob_id)
        address = BlobAddress(
            tenant=scope.tenant,
            namespace=scope.namespace,
            epoch=self.place.namespace.epoch,
            length=self.kv_format.chunk_bytes,
            created_ms=rooms.time.now_ms(),
            fingerprint=self.kv_format.fingerprint,
        )
        salt = rooms.rng.token(32)
        async with rooms.staging.draft(scope.tenant, name, self.batch.sealed_length, self._remaining()) as draft:
            async with stack:
                sealed = await self._seal(address, salt, window.freeze(), draft.view)
            self.attempted.append(name)
            written = await self._write_through(name, draft.view)
            self.chunks.append(_new_chunk(index, blob_id, address, salt, sealed, written, name))
            draft.publish(dirty=len(written) < len(self.batch.tiers))

    async def _seal(self, address: BlobAddress, salt: bytes, plaintext: memoryview, target: memoryview) -> Sealed:
        keys = self.place.keys
        data_key = keys.data_key(address.epoch)
        return await self.rooms.workers.run(
            lambda: seal(data_key, keys.names.chunk_id, address, salt, plaintext, target)
        )

    async def _write_through(self, name: str, sealed: memoryview) -> frozenset[str]:
        """Write to the tier that the asked durability needs; the others are due."""
        needed = self.batch.durability
        if needed == Durability.STAGED:
            return frozenset()
        try:
            async with asyncio.timeout(self._remaining()):
                await self.rooms.tiers[needed].put(name, sealed.toreadonly())
        except TimeoutError:
            raise Outage(f"the {needed} tier did not take the chunk before the deadline", Code.DEADLINE) from None
        except StorageError:
            self.rooms.metrics.tier_failures.labels(needed, "put").inc()
            raise
        return frozenset({needed})

    def _remaining(self) -> float:
        return max(0.0, self.deadline - self.rooms.clock.monotonic())


def _new_chunk(
    index: int, blob_id: bytes, address: BlobAddress, salt: bytes, sealed: Sealed, written: frozenset[str], name: str
) -> NewChunk:
    return NewChunk(
        index=index,
        blob_id=blob_id,
        chunk_id=sealed.chunk_id,
        salt=salt,
        tag_root=sealed.tag_root,
        epoch=address.epoch,
        seg_log2=SEG_LOG2_DEFAULT,
        length=address.length,
        created_ms=address.created_ms,
        written=written,
        object_name=name,
    )


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


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first real error of a task group, whose other tasks were merely cancelled for it."""
    for error in group.exceptions:
        return first_cause(error) if isinstance(error, BaseExceptionGroup) else error
    return group
