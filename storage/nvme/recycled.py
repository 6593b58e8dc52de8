"""Files of deleted blobs, kept to be written again: a disk takes bytes sooner into blocks that a file has already.

Such a file gets a name among unfinished ones, which the next opening removes; when the blob's is durably gone, all of
the file is made zero (`FALLOC_FL_ZERO_RANGE`), and when that is on the disk, too, the blob counts as deleted.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

from storage.nvme.listing import Directory
from storage.nvme.space import Space

LENGTH_MIN: Final = 1 << 20
"""Smaller files are made as quickly as they are found again."""
_LENGTHS: Final = 4
"""Lengths, those written last, of which files are kept."""
_BYTES: Final = 1 << 30
_FILES: Final = 512
_ZERO_RANGE: Final = 0x10
_WRITE: Final = os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC

_Blob: TypeAlias = tuple[Directory, str]

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


@dataclass(frozen=True, slots=True)
class OldFile:
    """A file that is no blob any more."""

    length: int
    name: str


class Readers:
    """Who reads which blob: a file that is being read is not written again, or its reader would see other bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blobs: Counter[_Blob] = Counter()

    @contextmanager
    def reading(self, directory: Directory, leaf: str) -> Iterator[None]:
        """From before its file is opened until it is closed."""
        blob = directory, leaf
        with self._lock:
            self._blobs[blob] += 1
        try:
            yield
        finally:
            with self._lock:
                self._blobs[blob] -= 1
                if not self._blobs[blob]:
                    del self._blobs[blob]

    @contextmanager
    def held_off(self, directory: Directory, leaf: str) -> Iterator[bool]:
        """Whether nobody reads; until the block ends nobody begins to. Only for as long as its name takes to go."""
        with self._lock:
            yield (directory, leaf) not in self._blobs


class Recycled:
    """Safe for use by several threads; its methods block. Where the file system cannot do it, nothing is kept."""

    def __init__(self, temporary_fd: int, space: Space, *, able: bool) -> None:
        """`able`: whether files are written past the page cache, without which this is of no use."""
        self._temporary_fd = temporary_fd
        self._space = space
        self._able = able
        self._serial = itertools.count()
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, list[str]] = OrderedDict()
        """Names by length."""
        self._count = self._nbytes = 0
        """Of all files: kept, and on their way there."""

    def take(self, length: int) -> tuple[int, str] | None:
        """Descriptor and name of a file of `length` bytes, all of them zero; None if there is none."""
        if length < LENGTH_MIN:
            return None
        with self._lock:
            if not self._able:
                return None
            names = self._kept.setdefault(length, [])
            self._kept.move_to_end(length)
            surplus = self._kept.popitem(last=False) if len(self._kept) > _LENGTHS else (0, [])
            name = names.pop() if names else ""
        self._remove(*surplus)
        if not name:
            return None
        self._give(length)
        try:
            return os.open(name, _WRITE, dir_fd=self._temporary_fd), name
        except OSError:
            return None  # removed by somebody else: a new file does as well

    def set_aside(self, directory_fd: int, leaf: str, length: int) -> OldFile | None:
        """Take a blob's name from its file, if that is worth keeping; None if not. Raises `OSError`.

        The file is to be passed to `keep`.
        """
        if not self._wants(length):
            return None
        old = OldFile(length, f"old.{next(self._serial)}")
        try:
            os.rename(leaf, old.name, src_dir_fd=directory_fd, dst_dir_fd=self._temporary_fd)
        except OSError:
            self._give(length)
            raise
        return old

    def keep(self, files: Sequence[OldFile], *, nameless: bool) -> None:
        """Make files all zero, durably, and have them for the next blobs; those with which that fails are removed.

        And all are that are not `nameless`: durably without their blobs' names. Such a name could come back after a
        power cut, and would show zeros, or the bytes of another blob.
        """
        for old in files:
            zero = nameless and self._is_zero_now(old)
            with self._lock:
                names = self._kept.get(old.length) if zero and self._able else None
                if names is not None:
                    names.append(old.name)
            if names is None:
                self._remove(old.length, [old.name])

    def drop(self) -> bool:
        """Give the space of all files back to blobs; whether there were any."""
        with self._lock:
            kept = {length: list(names) for length, names in self._kept.items()}
            for names in self._kept.values():
                names.clear()
        for length, names in kept.items():
            self._remove(length, names)
        return any(kept.values())

    def close(self) -> None:
        """Keep no files from now on."""
        with self._lock:
            self._able = False
        self.drop()

    def _wants(self, length: int) -> bool:
        """Whether another file of that length is worth keeping; its room is counted then."""
        with self._lock:
            if not self._able or length not in self._kept:
                return False
            if self._count >= _FILES or self._nbytes + length > _BYTES or not self._space.take_spare(length):
                return False
            self._count += 1
            self._nbytes += length
        return True

    def _give(self, length: int) -> None:
        """One file less."""
        with self._lock:
            self._count -= 1
            self._nbytes -= length
        self._space.give_spare(length)

    def _is_zero_now(self, old: OldFile) -> bool:
        try:
            fd = os.open(old.name, _WRITE, dir_fd=self._temporary_fd)
            try:
                zero_whole(fd, old.length)
                os.fdatasync(fd)
            finally:
                os.close(fd)
        except OSError:
            self.close()  # what the disk or its file system refused once is not asked for again
            return False
        return True

    def _remove(self, length: int, names: Sequence[str]) -> None:
        for name in names:
            self._give(length)
            with suppress(OSError):  # what stays is removed at the next opening
                os.unlink(name, dir_fd=self._temporary_fd)


def zero_whole(fd: int, length: int) -> None:
    """Make all `length` bytes of a file zero without writing them; its blocks stay its own. Raises `OSError`."""
    if _libc.fallocate(fd, _ZERO_RANGE, 0, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
