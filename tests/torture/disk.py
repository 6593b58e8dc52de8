"""A simulated disk: what it has for certain, and what it only heard of when the power went.

A `Recorder` notes the file system calls of a scenario; `Disk` replays them up to any moment and then loses power: what
was not synced is there or not, in any combination, and files that were not synced are whole, torn or empty.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from storage.nvme import recycled

Event = tuple[Any, ...]
"""What was done, and its arguments; paths are relative to the recorded folder."""


class Recorder:
    """Notes what happens below `root`, in the order in which the calls returned."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.events: list[Event] = []
        self._lock = threading.Lock()

    def note(self, *event: Any) -> None:
        with self._lock:
            self.events.append(event)

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as patches:
            for name in ("open", "write", "fsync", "fdatasync", "rename", "unlink", "mkdir", "rmdir"):
                wrapped = getattr(self, f"_{name}")(getattr(os, name))
                patches.enter_context(mock.patch.object(os, name, wrapped))
            patches.enter_context(mock.patch.object(recycled, "zero_whole", self._zero_whole))
            yield

    def _zero_whole(self, descriptor: int, length: int) -> None:
        """As a file system that can do it, wherever the folder lies."""
        os.pwrite(descriptor, bytes(length), 0)
        self.note("zero", self._where(descriptor))

    def _where(self, descriptor: int | None) -> str:
        path = os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")
        return os.path.relpath(path, self.root)

    def _inside(self, descriptor: int | None) -> bool:
        return descriptor is not None and not self._where(descriptor).startswith("..")

    def _open(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            descriptor = real(path, flags, mode, dir_fd=dir_fd)
            if flags & os.O_CREAT and self._inside(dir_fd):
                self.note("create", self._where(dir_fd), path)
            return descriptor

        return call

    def _write(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(descriptor: int, data: Any) -> int:
            count = real(descriptor, data)
            if self._inside(descriptor):
                self.note("write", self._where(descriptor), bytes(data[:count]))
            return count

        return call

    def _fsync(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(descriptor: int) -> None:
            real(descriptor)
            if self._inside(descriptor):
                self.note("sync", self._where(descriptor))

        return call

    _fdatasync = _fsync

    def _rename(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            real(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            self.note("rename", self._where(src_dir_fd), source, self._where(dst_dir_fd), target)

        return call

    def _named(self, what: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, *more: Any, dir_fd: int | None = None) -> None:
            real(path, *more, dir_fd=dir_fd)
            if self._inside(dir_fd):
                self.note(what, self._where(dir_fd), path)

        return call

    def _unlink(self, real: Callable[..., None]) -> Callable[..., None]:
        return self._named("unlink", real)

    def _mkdir(self, real: Callable[..., None]) -> Callable[..., None]:
        return self._named("mkdir", real)

    def _rmdir(self, real: Callable[..., None]) -> Callable[..., None]:
        return self._named("unlink", real)


@dataclass
class _File:
    data: bytes = b""
    synced: bytes = b""


@dataclass
class _Folder:
    now: dict[str, _File | _Folder] = field(default_factory=dict)
    """What a process sees."""
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[tuple[str, _File | _Folder | None]] = field(default_factory=list)
    """Names that were given or taken (None) since the last sync."""

    def give(self, name: str, what: _File | _Folder | None) -> None:
        self.pending.append((name, what))
        if what is None:
            del self.now[name]
        else:
            self.now[name] = what

    def sync(self) -> None:
        self.durable, self.pending = dict(self.now), []


class Disk:
    """The state of a recorded folder after some of its events."""

    def __init__(self, before: Path) -> None:
        """`before`: a copy of the folder as it was when the recording began; all of it counts as durable."""
        self._root = _read(before)

    def do(self, event: Event) -> None:
        """Let one event happen."""
        what, *rest = event
        if what == "create":
            self._folder(rest[0]).give(rest[1], _File())
        elif what == "mkdir":
            self._folder(rest[0]).give(rest[1], _Folder())
        elif what == "unlink":
            self._folder(rest[0]).give(rest[1], None)
        elif what == "write":
            self._file(rest[0]).data += rest[1]
        elif what == "zero":
            self._file(rest[0]).data = b""  # until it is written again, which begins at its beginning
        elif what == "rename":
            source, target = self._folder(rest[0]), self._folder(rest[2])
            moved = source.now[rest[1]]
            source.give(rest[1], None)
            target.give(rest[3], moved)
        elif what == "sync":
            found = self._find(rest[0])
            if isinstance(found, _Folder):
                found.sync()
            else:
                found.synced = found.data

    def lose_power(self, folder: Path, rng: random.Random) -> None:
        """Write to `folder` what is there when the power comes back."""
        _write(self._root, folder, rng)

    def _find(self, path: str) -> _File | _Folder:
        found: _File | _Folder = self._root
        for part in Path(path).parts:
            assert isinstance(found, _Folder)
            found = found.now[part]
        return found

    def _folder(self, path: str) -> _Folder:
        found = self._find(path)
        assert isinstance(found, _Folder), path
        return found

    def _file(self, path: str) -> _File:
        found = self._find(path)
        assert isinstance(found, _File), path
        return found


def _read(folder: Path) -> _Folder:
    made = _Folder()
    for one in folder.iterdir():
        made.now[one.name] = _read(one) if one.is_dir() else _File(one.read_bytes(), one.read_bytes())
    made.durable = dict(made.now)
    return made


def _write(what: _Folder, folder: Path, rng: random.Random) -> None:
    folder.mkdir(mode=0o700)
    entries = dict(what.durable)
    for name, one in what.pending:
        if rng.random() < 0.5:
            continue
        if one is None:
            entries.pop(name, None)
        else:
            entries[name] = one
    for name, one in entries.items():
        if isinstance(one, _Folder):
            _write(one, folder / name, rng)
        else:
            torn = one.data[: len(one.data) // 2]
            (folder / name).write_bytes(
                one.data if one.data == one.synced else rng.choice((one.data, torn, one.synced))
            )
