"""Looks through an NVMe tier's folder from outside: by its path, knowing nothing of what the tier believes."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from storage.errors import TierUnavailable
from storage.ports import Workers
from storage.tier import check_name
from storage.tracing import Trace

TEMPORARY: Final = "tmp"
_HEAD_BYTES: Final = 64


class NvmeTracer:
    """Walks one folder. Follows no symbolic link."""

    label = "nvme"
    method = "walk of the folder: blobs, files being written, and whatever else lies there"

    def __init__(self, root: Path, workers: Workers) -> None:
        self._root = root
        self._workers = workers

    async def traces(self, prefix: str) -> AsyncIterator[Trace]:
        """Everything at or below `prefix`, and every file that is being written."""
        try:
            found = await self._workers.run(partial(self._look, prefix))
        except OSError as error:
            raise TierUnavailable(f"could not look through the NVMe folder {self._root}: {error.strerror}") from error
        for trace in found:
            yield trace

    async def clear(self, traces: Sequence[Trace]) -> None:
        """Remove strangers; files that are being written belong to whoever writes them."""
        strangers = [trace.name for trace in traces if trace.kind == "stranger"]
        try:
            await self._workers.run(partial(self._unlink, strangers))
        except OSError as error:
            raise TierUnavailable(f"could not remove {error.filename}: {error.strerror}") from error

    def _unlink(self, names: Sequence[str]) -> None:
        for name in names:
            (self._root / name).unlink(missing_ok=True)

    def _look(self, prefix: str) -> list[Trace]:
        found: list[Trace] = []
        start = self._root / prefix
        if not prefix.endswith("/"):
            if _there(start):
                found.append(Trace("blob", prefix))
        else:
            for folder, _, leaves in os.walk(start, onerror=_raise_unless_missing):
                found += [self._trace(Path(folder) / leaf) for leaf in leaves]
        found += [self._unfinished(leaf) for leaf in sorted(os.listdir(self._root / TEMPORARY))]
        return found

    def _trace(self, path: Path) -> Trace:
        name = path.relative_to(self._root).as_posix()
        try:
            check_name(name)
        except ValueError:
            return Trace("stranger", name)
        return Trace("blob" if stat.S_ISREG(path.lstat().st_mode) else "stranger", name)

    def _unfinished(self, leaf: str) -> Trace:
        name = f"{TEMPORARY}/{leaf}"
        try:
            fd = os.open(self._root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return Trace("unfinished", name)  # renamed or removed in this moment, or no file at all
        try:
            return Trace("unfinished", name, head=os.pread(fd, _HEAD_BYTES, 0))
        finally:
            os.close(fd)


def _there(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
