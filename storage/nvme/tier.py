"""The NVMe tier: checks names, sends calls to worker threads in one hop, and names what went wrong."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

from storage.errors import TierFull, TierMisconfigured, TierUnavailable
from storage.nvme.changes import Change, Removal, Write
from storage.nvme.files import BlobFiles
from storage.nvme.lanes import Bounds, Lane
from storage.nvme.opening import NO_SPACE, Opened, open_folder
from storage.nvme.options import NvmeOptions
from storage.nvme.owner import FolderTaken, name_owner, read_owner
from storage.nvme.space import NvmeStatistics, Space
from storage.nvme.tree import SyncFailed
from storage.ports import Clock, Workers
from storage.tier import BlobInfo, check_name

Result = TypeVar("Result")
Wish = TypeVar("Wish", bound=Change)

_LARGE_BYTES: Final = 1 << 20
"""From here on a blob is worth a thread: disks like several transfers at once. Smaller ones share commits."""

_LARGE: Final = Bounds(hops=3, changes=2, nbytes=64 << 20)
_SMALL: Final = Bounds(hops=4, changes=16, nbytes=8 << 20)
_REMOVALS: Final = Bounds(hops=2, changes=32, nbytes=0)


class NvmeTier:
    """Blobs as files in one folder of this node, durable on return. Made by `open` alone."""

    label = "nvme"

    def __init__(self, opened: Opened, options: NvmeOptions, workers: Workers, clock: Clock) -> None:
        self._opened = opened
        self._workers = workers
        self._space = Space(sum(opened.census.used.values()), opened.limit, clock, options.full_retry_s)
        self._files = BlobFiles(opened, self._space)
        write = partial(self._together, self._files.write)
        self._small = Lane[Write](workers, write, _SMALL)
        self._large = Lane[Write](workers, write, _LARGE)
        self._removals = Lane[Removal](workers, partial(self._together, self._files.remove), _REMOVALS)
        self._preparing: asyncio.Task[None] | None = None
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    @classmethod
    async def open(cls, options: NvmeOptions, *, workers: Workers, clock: Clock) -> NvmeTier:
        """Open the folder, remove what a crash left half-written, count what is there.

        Raises `TierMisconfigured` if the folder is another user's, cannot be written, or is held by another process.
        """
        try:
            opened = await workers.run(partial(open_folder, options))
        except FolderTaken as error:
            raise TierMisconfigured(
                f"the NVMe folder {options.root} is in use by {await read_owner(options.root)}; "
                "give each gateway a folder of its own"
            ) from error
        tier = cls(opened, options, workers, clock)
        try:
            await name_owner(options.root, options.owner or f"process {os.getpid()}")
        except BaseException:
            await tier.aclose()
            raise
        return tier

    @property
    def statistics(self) -> NvmeStatistics:
        room = self._space.room()
        return NvmeStatistics(
            state=room.state,
            reason=room.reason,
            used_bytes=room.used,
            in_flight_bytes=room.in_flight,
            limit_bytes=room.limit,
            foreign=self._opened.census.foreign,
            preallocates=self._opened.file_system.preallocates,
        )

    async def put(self, name: str, sealed: memoryview) -> None:
        lane = self._large if len(sealed) >= _LARGE_BYTES else self._small
        await self._carry(lane, Write(check_name(name), sealed))
        if self._preparing is None and self._files.spares.is_low():
            self._preparing = asyncio.create_task(self._prepare())

    async def get_into(self, name: str, target: memoryview) -> None:
        await self._run(f"read blob {name} from", partial(self._files.read_into, check_name(name), target))

    async def stat(self, names: Sequence[str]) -> dict[str, int]:
        wanted = [check_name(name) for name in names]
        return await self._run("look up blobs on", partial(self._files.lengths, wanted))

    async def delete(self, names: Sequence[str]) -> None:
        doomed = [check_name(name) for name in names]
        await self._carry(self._removals, Removal(doomed))

    async def scan(self) -> AsyncIterator[BlobInfo]:
        directories = deque(await self._run("list", self._files.directories))
        while directories:
            for blob in await self._run("list", partial(self._files.next_blobs, directories)):
                yield blob

    async def aclose(self) -> None:
        """Wait for what runs, then give the folder back."""
        if self._closed:
            return
        self._closed = True
        await self._idle.wait()
        if self._preparing is not None:
            await asyncio.wait((self._preparing,))
        await self._workers.run(self._files.recycled.close)
        self._files.spares.close()
        for fd in (self._opened.temporary_fd, self._opened.root_fd, self._opened.owner_fd):
            os.close(fd)

    async def _run(self, act: str, work: Callable[[], Result]) -> Result:
        with self._counted(act):
            return await self._workers.run(partial(self._mapped, act, work))

    async def _carry(self, lane: Lane[Wish], change: Wish) -> None:
        with self._counted(change.act):
            await lane.carry(change)

    async def _prepare(self) -> None:
        """Make spares behind the back of those who put."""
        try:
            while not self._closed and self._files.spares.is_low():
                await self._workers.run(self._files.spares.prepare)
        finally:
            self._preparing = None

    @contextmanager
    def _counted(self, act: str) -> Iterator[None]:
        """What `aclose` waits for."""
        if self._closed:
            raise TierUnavailable(f"could not {act} NVMe: the tier is closed")
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()

    def _mapped(self, act: str, work: Callable[[], Result]) -> Result:
        """Run `work` in this thread."""
        try:
            return work()
        except (SyncFailed, TierUnavailable, OSError) as error:
            raise self._named(act, error) from error

    def _together(self, work: Callable[[Sequence[Wish]], None], changes: Sequence[Wish]) -> None:
        """Run `work` in this thread on changes that each take their own error along."""
        work(changes)
        for one in changes:
            self._name_error(one)

    def _name_error(self, one: Change) -> None:
        """Apart from `_together`, whose frame the cause knows: no cycle may keep the caller's memory (law 7)."""
        cause = one.error
        if isinstance(cause, SyncFailed | TierUnavailable | OSError):
            one.error = self._named(one.act, cause)
            one.error.__cause__ = cause

    def _named(self, act: str, error: SyncFailed | TierUnavailable | OSError) -> TierUnavailable:
        """The data plane's error for a foreign one; the tier's state learns from it."""
        if isinstance(error, SyncFailed):
            self._space.mark_suspect(str(error))
            return TierUnavailable(f"could not {act} NVMe: {error}; the tier is suspect, check the disk")
        if isinstance(error, TierUnavailable):
            return type(error)(f"could not {act} NVMe: {error}")
        reason = error.strerror or str(error)
        if error.errno in NO_SPACE:
            self._space.mark_full(reason)
            return TierFull(f"could not {act} NVMe: {reason}; free space on its disk")
        return TierUnavailable(f"could not {act} NVMe: {reason}")
