"""One process per folder: a lock that the kernel drops with its holder, and a line that says who holds it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

import aiofiles

OWNER: Final = "owner"

_LINE_BYTES: Final = 256


class FolderTaken(Exception):
    """Another process holds the folder."""


def lock(root_fd: int) -> int:
    """Take the folder's lock, which lives as long as the descriptor. Raises `FolderTaken` or `OSError`."""
    fd = os.open(OWNER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=root_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise FolderTaken from error
        raise
    return fd


async def name_owner(root: Path, owner: str) -> None:
    """Write the line for whoever finds the folder taken. Raises `OSError`.

    Always the same length and in place, so that it needs no new space on a disk that is full.
    """
    line = " ".join(owner.split()).encode()[: _LINE_BYTES - 1].ljust(_LINE_BYTES - 1) + b"\n"
    async with aiofiles.open(root / OWNER, "r+b", buffering=0, opener=_no_follow) as file:
        await file.write(line)


async def read_owner(root: Path) -> str:
    """The line of the process that holds the folder. Raises `OSError`."""
    async with aiofiles.open(root / OWNER, "rb", opener=_no_follow) as file:
        line = bytes(await file.read(_LINE_BYTES))
    return line.decode(errors="replace").strip() or "another process"


def _no_follow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
