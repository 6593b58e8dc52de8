"""The middle of a PUT: client → window → sealed resident → tiers. Bytes before pointer (law 1).

Chunks that travel are received by the threads that hash and seal them (`kvgw.gateway.intake`); where no thread can
receive, a group is received in the event loop while the group before it is sealed. Chunks that lie in memory of the
client's are not received: each segment is copied into a window of ours, and hashed and sealed from there, so that a
client that writes meanwhile spoils its own chunk and no chunk id ever lies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

from kvgw.errors import Code, Outage
from kvgw.gateway.directory import Place
from kvgw.gateway.intake import Birth, Intake, Sealing, pieces
from kvgw.gateway.outbox import dirty_room
from kvgw.gateway.payloads import (
    INLINE_BYTES,
    Incoming,
    PayloadSource,
    group_size,
    shared_group_size,
)
from kvgw.gateway.rooms import Rooms
from kvgw.model import Durability
from kvgw.runtime import release_frames
from storage.access import Draft, Window
from storage.errors import StorageError, TierFull
from storage.tier import blob_names
from storage.together import Together
from tenancy.births import Batch, NewChunk
from tenancy.model import FormatRow
from tenancy.sealing import SEG_LOG2_DEFAULT, BlobAddress, Sealed

PIPELINE_DEPTH: Final = 2
"""Groups of one PUT in windows at once: one being received, one being sealed."""

ROOM_SHARE: Final = 0.5
"""Part of a PUT's time in which room may be made for it: within quotas, and on the disk."""

BLOB_ID_BYTES: Final = 16
SALT_BYTES: Final = 32


@dataclass(slots=True)
class _Room:
    """A window, and what ends it."""

    window: Window
    ending: AsyncExitStack


@dataclass(slots=True)
class _Group:
    """Chunks that are sealed together: received into the window, or shared and copied through it."""

    indices: Sequence[int]
    room: _Room
    shared: Sequence[memoryview]
    again: bool
    """Another group comes into the window: it is zeroed after that."""

    def seal(self, sealing: Sealing, one: Birth, draft: Draft) -> Sealed:
        """In a worker thread: hash and seal one chunk into its draft."""
        if self.shared:
            return sealing.seal_shared(one, self.shared[one.at], self.room.window.view, draft.view)
        length = sealing.address.length
        return sealing.seal(one, self.room.window.view[one.at * length : (one.at + 1) * length], draft.view)


@dataclass(slots=True)
class GroupWriter:
    """Takes in the chunks of one PUT, group by group."""

    rooms: Rooms
    place: Place
    kv_format: FormatRow
    batch: Batch
    deadline: float
    chunks: list[NewChunk] = field(default_factory=list)
    """Sealed, and written as their durability asks; in the order of the batch once all are."""
    attempted: list[str] = field(default_factory=list)
    """Names under which bytes may be somewhere, in staging or a tier."""
    _brackets: AsyncExitStack = field(default_factory=AsyncExitStack)
    """Ends whatever windows and drafts are left."""
    _kept: list[_Room] = field(default_factory=list)
    """Those that wait for their next group."""

    async def receive_all(self, wanted: Sequence[int], source: PayloadSource) -> None:
        """Raises the rooms' errors, `Outage` at the deadline, and whatever the source raises."""
        places = asyncio.Semaphore(PIPELINE_DEPTH)
        rest = wanted
        async with self._brackets, Together() as tasks:
            while rest:
                await places.acquire()
                group = await self._shared(rest, source)
                if group is None and source.incoming and len(rest) * self.kv_format.chunk_bytes > INLINE_BYTES:
                    await self._pull_all(rest, source.incoming, tasks)
                    break
                group = group or await self._received(rest, source)
                rest = rest[len(group.indices) :]
                tasks.create_task(self._store(group, places))
        self.chunks.sort(key=lambda new: new.index)

    async def _shared(self, rest: Sequence[int], source: PayloadSource) -> _Group | None:
        """The next group, where the client shares it."""
        length = self.kv_format.chunk_bytes
        shared = await source.shared(min(len(rest), self._many()), length)
        if not shared:
            return None
        return _Group(rest[: len(shared)], await self._window(min(length, 1 << SEG_LOG2_DEFAULT)), shared, False)

    def _many(self) -> int:
        return shared_group_size(self.kv_format.chunk_bytes, with_tier=self.batch.durability != Durability.STAGED)

    async def _received(self, rest: Sequence[int], source: PayloadSource) -> _Group:
        """The next group, received into a window."""
        length = self.kv_format.chunk_bytes
        size = group_size(length, self.rooms.staging.window_share)
        indices = rest[:size]
        room = self._kept.pop() if self._kept else await self._window(length * len(indices))
        await self._receive(indices, room.window, source)
        # As many groups as are under way at once are the last in their windows.
        return _Group(indices, room, (), again=len(rest) > size * PIPELINE_DEPTH)

    async def _window(self, nbytes: int) -> _Room:
        ending = AsyncExitStack()
        self._brackets.push_async_exit(ending)
        window = self.rooms.staging.window(self.place.scope.tenant, nbytes, self._remaining())
        return _Room(await ending.enter_async_context(window), ending)

    async def _receive(self, indices: Sequence[int], window: Window, source: PayloadSource) -> None:
        length = self.kv_format.chunk_bytes
        pieces = [(index, window.view[at * length : (at + 1) * length]) for at, index in enumerate(indices)]
        await source.receive(pieces)
        for _, piece in pieces:
            piece.release()  # nothing writes to the window from now on
        window.freeze()

    async def _pull_all(self, rest: Sequence[int], incoming: Incoming, tasks: Together) -> None:
        """All that still comes, received and sealed by threads, while what was sealed before is written."""
        piece, threads = pieces(self.kv_format.chunk_bytes, self.rooms.staging.window_share)
        threads = min(threads, len(rest))
        room = await self._window(piece * threads)
        while rest:
            await incoming.begin()
            births = self._births(rest[: self._many()])
            rest = rest[len(births) :]
            while births:
                ending = AsyncExitStack()
                self._brackets.push_async_exit(ending)
                drafts = await ending.enter_async_context(self._drafts(births))
                run, births = births[: len(drafts)], births[len(drafts) :]
                last = not births and not rest
                intake = Intake(incoming, self._sealing(), run, drafts, room.window, piece, last)
                sealed = await intake.take_in(self.rooms.workers, threads)
                tasks.create_task(self._keep(intake, sealed, ending))
        await room.ending.aclose()

    async def _keep(self, intake: Intake, sealed: Sequence[Sealed], ending: AsyncExitStack) -> None:
        async with ending:
            await self._finish(intake.run, intake.sealing.address, sealed, intake.drafts)

    def _drafts(self, births: Sequence[Birth]) -> AbstractAsyncContextManager[list[Draft]]:
        names = [one.name for one in births]
        return self.rooms.staging.drafts(self.place.scope.tenant, names, self.batch.sealed_length, self._remaining())

    async def _store(self, group: _Group, places: asyncio.Semaphore) -> None:
        """Seal a group into as many drafts at once as there is room for; then its window is another group's."""
        births = self._births(group.indices)
        while births:
            async with self._drafts(births) as drafts:
                run, births = births[: len(drafts)], births[len(drafts) :]
                sealing = self._sealing()
                sealed = await self._seal(sealing, run, group, drafts, last=not births)
                if not births:
                    await self._pass_on(group)
                    places.release()
                await self._finish(run, sealing.address, sealed, drafts)

    async def _finish(
        self, run: Sequence[Birth], address: BlobAddress, sealed: Sequence[Sealed], drafts: Sequence[Draft]
    ) -> None:
        """What is sealed goes where its durability needs it, and stays here as a resident."""
        written = await self._write_through(run, drafts)
        self.chunks += [_new_chunk(one, address, result, written) for one, result in zip(run, sealed, strict=True)]
        self._publish(drafts, written)

    async def _pass_on(self, group: _Group) -> None:
        """Nothing reads the group's window any more."""
        if group.again:
            group.room.window.reopen()
            self._kept.append(group.room)
        else:
            await group.room.ending.aclose()

    def _publish(self, drafts: Sequence[Draft], written: frozenset[str]) -> None:
        """What is due in a tier stays until it is there; of what this disk has already, as much as is cheap to keep."""
        due = len(written) < len(self.batch.tiers)
        room = dirty_room(self.rooms.staging) if "nvme" in written else None
        for draft in drafts:
            stays = due and (room is None or room > 0)
            draft.publish(dirty=stays)
            if stays and room is not None:
                room -= self.batch.sealed_length

    def _births(self, indices: Sequence[int]) -> list[Birth]:
        chance = self.rooms.rng.token((BLOB_ID_BYTES + SALT_BYTES) * len(indices))  # each call asks the system
        ids, salts = chance[: BLOB_ID_BYTES * len(indices)], chance[BLOB_ID_BYTES * len(indices) :]
        names = blob_names(self.place.scope.namespace, ids)
        return [
            Birth(
                index=index,
                blob_id=ids[at * BLOB_ID_BYTES : (at + 1) * BLOB_ID_BYTES],
                name=names[at],
                salt=salts[at * SALT_BYTES : (at + 1) * SALT_BYTES],
                at=at,
            )
            for at, index in enumerate(indices)
        ]

    def _sealing(self) -> Sealing:
        address = BlobAddress(
            tenant=self.place.scope.tenant,
            namespace=self.place.scope.namespace,
            epoch=self.place.namespace.epoch,
            length=self.kv_format.chunk_bytes,
            created_ms=self.rooms.time.now_ms(),
            fingerprint=self.kv_format.fingerprint,
        )
        keys = self.place.keys
        return Sealing(keys.data_key(address.epoch), keys.names.chunk_id, address)

    async def _seal(
        self, sealing: Sealing, run: Sequence[Birth], group: _Group, drafts: Sequence[Draft], *, last: bool
    ) -> list[Sealed]:
        if len(run) * sealing.address.length <= INLINE_BYTES:
            return _seal_all(sealing, run, group, drafts, last=last)
        return await self.rooms.workers.run(lambda: _seal_all(sealing, run, group, drafts, last=last))

    async def _write_through(self, run: Sequence[Birth], drafts: Sequence[Draft]) -> frozenset[str]:
        """Write to the tier that the asked durability needs; the others are due."""
        self.attempted += [one.name for one in run]
        needed = self.batch.durability
        if needed == Durability.STAGED:
            return frozenset()
        try:
            async with asyncio.timeout(self._remaining()), Together() as tasks:
                for one, draft in zip(run, drafts, strict=True):
                    tasks.create_task(self._put(needed, one.name, draft.view.toreadonly()))
        except TimeoutError:
            raise Outage(f"the {needed} tier did not take the chunk before the deadline", Code.DEADLINE) from None
        return frozenset({needed})

    async def _put(self, tier: str, name: str, sealed: memoryview) -> None:
        patience = self.rooms.clock.monotonic() + ROOM_SHARE * self._remaining()
        while True:
            made = self.rooms.disk_room.made
            try:
                return await self.rooms.tiers[tier].put(name, sealed)
            except StorageError as error:
                self.rooms.metrics.tier_failures.labels(tier, "put").inc()
                left = patience - self.rooms.clock.monotonic()
                full = tier == "nvme" and isinstance(error, TierFull) and left > 0
                if not full or not await self.rooms.disk_room.ask(made, left):
                    raise
                release_frames(error)  # they may hold slices of what is published when this goes well

    def _remaining(self) -> float:
        return max(0.0, self.deadline - self.rooms.clock.monotonic())


def _seal_all(
    sealing: Sealing, run: Sequence[Birth], group: _Group, drafts: Sequence[Draft], *, last: bool
) -> list[Sealed]:
    """In a worker thread: seal each chunk of a run into its draft. After the last one the window is zeroed here, unless
    another group comes into it."""
    sealed = [group.seal(sealing, one, draft) for one, draft in zip(run, drafts, strict=True)]
    if last and not group.again:
        group.room.window.wipe()
    return sealed


def _new_chunk(one: Birth, address: BlobAddress, sealed: Sealed, written: frozenset[str]) -> NewChunk:
    return NewChunk(
        index=one.index,
        blob_id=one.blob_id,
        chunk_id=sealed.chunk_id,
        salt=one.salt,
        tag_root=sealed.tag_root,
        epoch=address.epoch,
        seg_log2=SEG_LOG2_DEFAULT,
        length=address.length,
        created_ms=address.created_ms,
        written=written,
        object_name=one.name,
    )
