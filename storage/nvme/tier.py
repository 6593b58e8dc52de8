"""The NVMe tier: checks names, sends each call to a worker thread in one hop, and names what went wrong."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TypeVar

from storage.errors import TierFull, TierMisconfigured, TierUnavailable
from storage.nvme.files import BlobFiles
from storage.nvme.opening import NO_SPACE, Opened, open_folder
from storage.nvme.options import NvmeOptions
from storage.nvme.owner import FolderTaken, name_owner, read_owner
from storage.nvme.space import NvmeStatistics, Space
from storage.nvme.tree import SyncFailed
from storage.ports import Clock, Workers
from storage.tier import BlobInfo, check_name

Result = TypeVar("Result")


class NvmeTier:
    """Blobs as files in one folder of this node, durable on return. Made by `open` alone."""

    label = "nvme"

    def __init__(self, opened: Opened, options: NvmeOptions, workers: Workers, clock: Clock) -> None:
        self._opened = opened
        self._workers = workers
        self._space = Space(sum(opened.census.used.values()), opened.limit, clock, options.full_retry_s)
        self._files = BlobFiles(opened, self._space)
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
        await self._run(f"write blob {name} to", partial(self._files.write, check_name(name), sealed))

    async def get_into(self, name: str, target: memoryview) -> None:
        await self._run(f"read blob {name} from", partial(self._files.read_into, check_name(name), target))

    async def stat(self, names: Sequence[str]) -> dict[str, int]:
        wanted = [check_name(name) for name in names]
        return await self._run("look up blobs on", partial(self._files.lengths, wanted))

    async def delete(self, names: Sequence[str]) -> None:
        doomed = [check_name(name) for name in names]
        await self._run(f"delete all {len(doomed)} blobs from", partial(self._files.remove, doomed))

    async def scan(self) -> AsyncIterator[BlobInfo]:
        for directory in await self._run("list", self._files.directories):
            for blob in await self._run("list", partial(self._files.blobs_in, directory)):
                yield blob

    async def aclose(self) -> None:
        """Wait for what runs, then give the folder back."""
        if self._closed:
            return
        self._closed = True
        await self._idle.wait()
        for fd in (self._opened.temporary_fd, self._opened.root_fd, self._opened.owner_fd):
            os.close(fd)

    async def _run(self, act: str, work: Callable[[], Result]) -> Result:
        if self._closed:
            raise TierUnavailable(f"could not {act} NVMe: the tier is closed")
        self._running += 1
        self._idle.clear()
        try:
            return await self._workers.run(partial(self._mapped, act, work))
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()

    def _mapped(self, act: str, work: Callable[[], Result]) -> Result:
        """Run `work` in this thread; foreign errors become the data plane's, and the tier's state learns from them."""
        try:
            return work()
        except SyncFailed as error:
            self._space.mark_suspect(str(error))
            raise TierUnavailable(f"could not {act} NVMe: {error}; the tier is suspect, check the disk") from error
        except TierUnavailable as error:
            raise type(error)(f"could not {act} NVMe: {error}") from error
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno in NO_SPACE:
                self._space.mark_full(reason)
                raise TierFull(f"could not {act} NVMe: {reason}; free space on its disk") from error
            raise TierUnavailable(f"could not {act} NVMe: {reason}") from error
