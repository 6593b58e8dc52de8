"""The next chunks of a GET come from the disk, or from S3, while those before them are opened and sent.

What was read is a resident like any other, and nobody's until it is delivered: a client that is slow, or gone, keeps no
memory with it (law 7), and GETs that are short of memory cannot wait for each other. What the tier answered instead of
bytes is told to whoever wants the chunk, so that nothing is asked for twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final
from uuid import UUID

from kvgw.gateway.opening import Part, Wanted
from kvgw.gateway.rooms import Rooms
from storage.errors import StagingBusy, StorageError
from storage.tier import blob_names
from tenancy.model import FoundChunk

SHARE: Final = 3
"""No more than a third of what its tenant can have in use lies there undelivered, or is on its way."""
OPENING_BYTES: Final = 1024 * 1024
"""So much, when it has come, is worth opening."""
EXTRA: Final = 4
"""Reads of the disk beyond each GET's own, of all GETs together: one GET alone keeps it busy, and many make no longer
queues for it."""


@dataclass(frozen=True, slots=True)
class Depth:
    """How far one GET reads ahead in a tier."""

    own: int
    """Reads at once, or waiting for the tier."""
    nbytes: int
    """Sealed bytes on their way, or there and not delivered yet."""


DEPTHS: Final[dict[str, Depth]] = {
    "nvme": Depth(own=2, nbytes=48 * 1024 * 1024),
    "s3": Depth(own=8, nbytes=128 * 1024 * 1024),
}
"""A disk is busy with few reads; S3 takes its time for each, and as many as come."""


class Extra:
    """What is left of `EXTRA`, one for a gateway."""

    def __init__(self) -> None:
        self.left = EXTRA

    def take(self) -> bool:
        """Whether there was one left, which is the caller's until `give`."""
        taken = self.left > 0
        self.left -= taken
        return taken

    def give(self) -> None:
        self.left += 1


class _Blob:
    """One to be read ahead; `ended` when that is over, or will not be."""

    __slots__ = ("answer", "ended", "name", "nbytes", "started", "tier")

    def __init__(self, name: str, nbytes: int, tier: str) -> None:
        self.name = name
        self.nbytes = nbytes
        self.tier = tier
        self.started = False
        self.ended = asyncio.Event()
        self.answer: StorageError | TimeoutError | None = None


class ReadAhead:
    """Brings blobs of one GET into staging, in the order in which they are delivered, in tasks of that GET."""

    def __init__(
        self,
        rooms: Rooms,
        namespace: UUID,
        reader: UUID,
        order: Sequence[Wanted],
        deadline: float,
        tasks: asyncio.TaskGroup,
        extra: Extra,
    ) -> None:
        """`deadline`: when all reads must have ended (monotonic seconds)."""
        self._rooms = rooms
        self._namespace = namespace
        self._reader = reader
        self._order = order
        self._deadline = deadline
        self._tasks = tasks
        self._extra = extra
        self._running: set[asyncio.Task[None]] = set()
        self._blobs: dict[str, _Blob] = {}
        self._waiting: deque[_Blob] = deque()
        self._bytes = 0
        self._depth = Depth(0, 0)
        self._at_once = self._most = 0
        self._has_begun = False
        self._passed: set[int] = set()
        """Batch indices of what was delivered, or cannot be, before reading ahead began."""
        self._brought: dict[str, str] = {}

    def begins(self, part: Part) -> bool:
        """Whether what has not been delivered is read ahead from now on, of which `part`, not in staging, is next here.

        It begins with the first of that: a group before this one may be on its way still.
        """
        if self._has_begun:
            return False
        self._has_begun = True
        left = [found for index, found in self._order if index not in self._passed]
        there = [(found, tier) for found in left if (tier := self._tier_of(found)) is not None]
        names = blob_names(self._namespace, b"".join([found.blob_id for found, _ in there]))
        blobs = {name: _Blob(name, found.sealed_length, tier) for name, (found, tier) in zip(names, there, strict=True)}
        cold = {name: blob for name, blob in blobs.items() if not self._rooms.staging.holds(name)}
        if part.name not in cold or len(cold) == 1:
            return False
        self._depth = DEPTHS[cold[part.name].tier]
        self._at_once = self._depth.own
        self._most = min(self._depth.nbytes, self._rooms.staging.resident_limit // SHARE)
        self._blobs, self._waiting = cold, deque(cold.values())
        self._advance()
        return True

    def _tier_of(self, found: FoundChunk) -> str | None:
        """The fastest tier that has the blob."""
        placed = (("nvme", found.on_nvme), ("s3", found.on_s3))
        return next((tier for tier, there in placed if there and tier in self._rooms.tiers), None)

    async def reached(self, parts: Sequence[Part]) -> None:
        """Return when the first of some chunks, with what is worth opening with it, is not on its way any more.

        Never for more at once than may lie here undelivered: the last of it would come when the first has left.
        """
        nbytes = 0
        for part in parts if self._blobs else ():
            nbytes += part.found.sealed_length
            if part is not parts[0] and nbytes > min(OPENING_BYTES, self._most):
                return
            blob = self._blobs.get(part.name)
            if blob is not None:
                await blob.ended.wait()

    def passed(self, parts: Sequence[Part]) -> None:
        """These were delivered, or cannot be: others may come."""
        if not self._has_begun:
            self._passed.update([part.index for part in parts])
        if not self._blobs:
            return
        for part in parts:
            blob = self._blobs.pop(part.name, None)
            if blob is not None:
                blob.ended.set()  # the same content may be waited for in another group
                self._bytes -= blob.nbytes if blob.started else 0
        self._advance()

    def answer(self, tier: str, name: str) -> StorageError | TimeoutError | None:
        """What the tier said instead of giving this blob."""
        blob = self._blobs.get(name)
        return None if blob is None or blob.tier != tier else blob.answer

    def missed(self, part: Part) -> None:
        """A chunk is not in staging now that it is wanted: if it was, memory is short, and reading ahead is in vain."""
        if part.name in self._brought:
            self._give_up()

    def brought(self, name: str) -> str | None:
        """The tier from which the resident of this name came for this GET."""
        return self._brought.get(name)

    def stop(self) -> None:
        """Nothing is wanted any more: what is on its way is given up."""
        self._give_up()
        for task in self._running:
            task.cancel()

    def _give_up(self) -> None:
        while self._waiting:
            self._waiting.popleft().ended.set()

    def _advance(self) -> None:
        while self._waiting:
            blob = self._waiting[0]
            if blob.name in self._blobs:  # else it has passed
                if (self._bytes and self._bytes + blob.nbytes > self._most) or not self._may_begin():
                    return
                blob.started = True
                self._bytes += blob.nbytes
                task = self._tasks.create_task(self._bring(blob))
                self._running.add(task)
                task.add_done_callback(partial(self._over, blob))  # also if it never ran
            self._waiting.popleft()

    def _may_begin(self) -> bool:
        """Two more at once with each that has come: the first is not held up by those that are wanted after it."""
        running = len(self._running)
        return running < self._depth.own or (running < self._at_once and self._extra.take())

    async def _bring(self, blob: _Blob) -> None:
        fill = partial(self._rooms.tiers[blob.tier].get_into, blob.name)
        try:
            async with asyncio.timeout(self._deadline - self._rooms.clock.monotonic()):
                if await self._rooms.staging.fetch(self._reader, blob.name, blob.nbytes, fill):
                    self._brought[blob.name] = blob.tier
        except StagingBusy:
            self._give_up()  # memory is short: who wants a chunk waits for some, and none is taken for later ones
        except (StorageError, TimeoutError) as error:
            blob.answer = type(error)(*error.args)  # anew: the traceback of this one knows the memory

    def _over(self, blob: _Blob, task: asyncio.Task[None]) -> None:
        self._running.remove(task)
        if len(self._running) >= self._depth.own:
            self._extra.give()
        if task.cancelled() or task.exception() is not None:
            self._give_up()  # the GET ends
        blob.ended.set()
        self._at_once += 2
        self._advance()
