"""Files made before they are needed, with their space reserved: a blob written into one waits for less.

A spare has no name (`O_TMPFILE`): no listing shows it, and it is gone with its descriptor, however the process ends.
It gets a name when a blob takes it, before its first byte is written.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from storage.nvme.space import Space

_LENGTH_MIN: Final = 64 << 10
_LENGTHS: Final = 4
"""Lengths, those used last, of which there are spares."""
_EACH: Final = 16
_BYTES: Final = 64 << 20
_UNABLE: Final = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})
"""How file systems without unnamed files refuse them."""


@dataclass(slots=True)
class _Kind:
    """Spares of one length; as many are worth having as blobs of that length came, but for the first."""

    uses: int = 0
    fds: list[int] = field(default_factory=list)

    @property
    def target(self) -> int:
        return min(self.uses - 1, _EACH)


class Spares:
    """Safe for use by several threads. Nothing that goes wrong here is an error: there is no spare then."""

    def __init__(self, temporary_fd: int, space: Space, has_room: Callable[[int], bool], *, able: bool) -> None:
        """`has_room`: whether the disk has plenty for a file of so many bytes. `able`: whether spares are of use."""
        self._temporary_fd = temporary_fd
        self._space = space
        self._has_room = has_room
        self._able = able
        self._lock = threading.Lock()
        self._kinds: OrderedDict[int, _Kind] = OrderedDict()

    def take(self, length: int, temporary: str) -> int | None:
        """Descriptor of a spare of `length` bytes, now named `temporary`; None if there is none."""
        if length < _LENGTH_MIN:
            return None
        with self._lock:
            if not self._able:
                return None
            fd = self._used(length)
        if fd is None:
            return None
        self._space.give_spare(length)
        try:
            os.link(f"/proc/self/fd/{fd}", temporary, dst_dir_fd=self._temporary_fd, follow_symlinks=True)
        except OSError:
            os.close(fd)
            self.close()
            return None
        return fd

    def is_low(self) -> bool:
        """Whether `prepare` is worth a visit to a thread: half of the spares of some length are used up."""
        with self._lock:
            return self._able and self._wanted(2) is not None

    def prepare(self) -> None:
        """Make spares that are worth having, a bounded number. Blocks."""
        for _ in range(_EACH):
            with self._lock:
                length = self._wanted(1)
            if length is None:
                return
            fd = self._made(length)
            with self._lock:
                kind = self._kinds.get(length)
                if fd is not None and kind is not None:
                    kind.fds.append(fd)
                elif kind is not None:
                    kind.uses = 0  # worth another try when blobs of this length have come again
            if fd is not None and kind is None:  # closed, or out of use, meanwhile
                self._let_go(length, [fd])

    def drop(self) -> bool:
        """Give the space of all spares back to blobs; whether there were any."""
        with self._lock:
            kinds, self._kinds = self._kinds, OrderedDict()
        for length, kind in kinds.items():
            self._let_go(length, kind.fds)
        return any(kind.fds for kind in kinds.values())

    def close(self) -> None:
        """Have no spares from now on."""
        with self._lock:
            self._able = False
        self.drop()

    def _used(self, length: int) -> int | None:
        """Note that a blob of this length came; a spare for it."""
        kind = self._kinds.setdefault(length, _Kind())
        self._kinds.move_to_end(length)
        kind.uses += 1
        if len(self._kinds) > _LENGTHS:
            self._let_go(*_oldest(self._kinds))
        return kind.fds.pop() if kind.fds else None

    def _wanted(self, times: int) -> int | None:
        """The length used last of which so many times the spares would be too few."""
        held = sum(length * len(kind.fds) for length, kind in self._kinds.items())
        for length, kind in reversed(self._kinds.items()):
            if times * len(kind.fds) < kind.target and held + length <= _BYTES:
                return length
        return None

    def _made(self, length: int) -> int | None:
        if not self._has_room(length) or not self._space.take_spare(length):
            return None
        try:
            flags = os.O_TMPFILE | os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC
            fd = os.open(".", flags, 0o600, dir_fd=self._temporary_fd)
        except OSError as error:
            self._space.give_spare(length)
            if error.errno in _UNABLE:
                self.close()
            return None
        try:
            os.posix_fallocate(fd, 0, length)
        except OSError:
            self._let_go(length, [fd])
            return None
        return fd

    def _let_go(self, length: int, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
            self._space.give_spare(length)


def _oldest(kinds: OrderedDict[int, _Kind]) -> tuple[int, list[int]]:
    length, kind = kinds.popitem(last=False)
    return length, kind.fds
