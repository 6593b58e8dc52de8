"""Directories below a tier's folder, reached one by one from its descriptor and never through a symbolic link."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_REMEMBERED_MAX: Final = 1 << 16


class SyncFailed(Exception):
    """The kernel could not make something durable. Final: it may have dropped the data, so asking again may lie."""


class Tree:
    """The folder's directory descriptors. Blocking; safe for use by several threads."""

    def __init__(self, root_fd: int) -> None:
        self._root_fd = root_fd
        self._durable: set[tuple[str, ...]] = set()

    @contextmanager
    def open(self, *parts: str) -> Iterator[int]:
        """Descriptor of the directory ``root/*parts``. Raises `OSError`, also if a part is a symbolic link."""
        fd = self._descend(parts, create=False)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def open_or_create(self, *parts: str) -> Iterator[int]:
        """The same, with missing directories made, and durable before this yields."""
        fd = self._descend(parts, create=True)
        try:
            yield fd
        finally:
            os.close(fd)

    def _descend(self, parts: tuple[str, ...], *, create: bool) -> int:
        here = os.dup(self._root_fd)
        try:
            for depth, part in enumerate(parts, start=1):
                if create:
                    below = self._open_durable(here, part, parts[:depth])
                else:
                    below = os.open(part, DIRECTORY, dir_fd=here)
                os.close(here)
                here = below
        except BaseException:
            os.close(here)
            raise
        return here

    def _open_durable(self, parent_fd: int, part: str, path: tuple[str, ...]) -> int:
        """Open `part`, made if missing, its name durable in the parent.

        That it exists says nothing about durability, since another thread may have made it just now: until a thread
        has seen the parent synced, each syncs it itself.
        """
        try:
            fd = os.open(part, DIRECTORY, dir_fd=parent_fd)
        except FileNotFoundError:
            self._durable.discard(path)  # before the name appears again, for those who look meanwhile
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=parent_fd)
            fd = os.open(part, DIRECTORY, dir_fd=parent_fd)
        if path in self._durable:
            return fd
        try:
            sync_directory(parent_fd)
        except BaseException:
            os.close(fd)
            raise
        if len(self._durable) >= _REMEMBERED_MAX:
            self._durable.clear()
        self._durable.add(path)
        return fd


def sync_directory(fd: int) -> None:
    """Make the names in a directory durable. Raises `SyncFailed`."""
    try:
        os.fsync(fd)
    except OSError as error:
        raise SyncFailed(f"a directory could not be synced: {error.strerror}") from error


def sync_data(fd: int) -> None:
    """Make a file's bytes and length durable. Raises `SyncFailed`."""
    try:
        os.fdatasync(fd)
    except OSError as error:
        raise SyncFailed(f"a blob could not be synced: {error.strerror}") from error
