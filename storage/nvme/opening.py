"""Opening a folder: checks that it can work, removes what a crash left, counts what is there. Blocking."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from storage.errors import TierMisconfigured
from storage.nvme.blocks import BLOCK
from storage.nvme.listing import Census, take_census
from storage.nvme.options import NvmeOptions
from storage.nvme.owner import lock
from storage.nvme.tree import DIRECTORY, SyncFailed, Tree, sync_directory

NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_NO_PREALLOCATION: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_TEMPORARY: Final = "tmp"


@dataclass(frozen=True, slots=True)
class FileSystem:
    """What was found out about the file system; sizes in bytes."""

    free_bytes_min: int
    preallocates: bool
    direct: bool
    """Files can be read and written past the page cache."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A folder ready for use: three descriptors that the holder closes; sizes in bytes."""

    root_fd: int
    temporary_fd: int
    owner_fd: int
    file_system: FileSystem
    limit: int
    census: Census


def open_folder(options: NvmeOptions) -> Opened:
    """Open the folder of an NVMe tier. Raises `TierMisconfigured` with the remedy, or `FolderTaken`."""
    try:
        return _open(options)
    except SyncFailed as error:
        raise TierMisconfigured(f"the NVMe folder {options.root} is on a failing disk: {error}; replace it") from error
    except OSError as error:
        raise TierMisconfigured(
            f"the NVMe folder {options.root} cannot be used by uid {os.geteuid()}: {error.strerror}; "
            "give a folder on a writable disk that belongs to this user"
        ) from error


def _open(options: NvmeOptions) -> Opened:
    _make(options.root)
    # The operator may put the folder itself behind a link; below it no link is followed.
    root = options.root.resolve(strict=True)
    with ExitStack() as undo:
        root_fd = _kept(undo, os.open(root, DIRECTORY))
        _check_root(root, root_fd)
        owner_fd = _kept(undo, lock(root_fd))
        with suppress(FileExistsError):
            os.mkdir(_TEMPORARY, 0o700, dir_fd=root_fd)
        sync_directory(root_fd)
        temporary_fd = _kept(undo, os.open(_TEMPORARY, DIRECTORY, dir_fd=root_fd))
        _remove_leftovers(temporary_fd)
        census = take_census(Tree(root_fd))
        total = _total_bytes(root_fd)
        file_system = FileSystem(options.free_bytes(total), _preallocates(temporary_fd), _is_direct(temporary_fd))
        opened = Opened(root_fd, temporary_fd, owner_fd, file_system, _limit(options, total), census)
        undo.pop_all()
    return opened


def _make(folder: Path) -> None:
    """Make `folder` and its parents, durably: a blob is no safer than the names on the way to it."""
    if folder.is_dir():
        return
    _make(folder.parent)
    folder.mkdir(mode=0o700)
    fd = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_directory(fd)
    finally:
        os.close(fd)


def _kept(undo: ExitStack, fd: int) -> int:
    undo.callback(os.close, fd)
    return fd


def _check_root(root: Path, root_fd: int) -> None:
    found = os.fstat(root_fd)
    me = os.geteuid()
    if found.st_uid != me:
        raise TierMisconfigured(
            f"the NVMe folder {root} belongs to uid {found.st_uid}, not to uid {me} that runs the gateway; "
            f"run `chown {me} {root}` or give another folder"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise TierMisconfigured(
            f"the NVMe folder {root} can be written by others than uid {me} (mode {stat.S_IMODE(found.st_mode):o}); "
            f"run `chmod 700 {root}`"
        )
    if os.fstatvfs(root_fd).f_flag & os.ST_RDONLY:
        raise TierMisconfigured(
            f"the NVMe folder {root} of uid {me} is on a file system mounted read-only; mount it for writing"
        )


def _total_bytes(root_fd: int) -> int:
    found = os.fstatvfs(root_fd)
    return found.f_blocks * found.f_frsize


def _limit(options: NvmeOptions, total: int) -> int:
    limit = min(options.capacity_bytes, total - options.free_bytes(total))
    if limit < 1:
        raise TierMisconfigured(
            f"the NVMe folder {options.root} is on a disk of {total} bytes, of which {options.free_bytes(total)} "
            "are to stay free; lower that or give a larger disk"
        )
    return limit


def _remove_leftovers(temporary_fd: int) -> None:
    """Remove files that a killed process was writing; the folder's lock says that nobody is writing now."""
    for leaf in os.listdir(temporary_fd):
        os.unlink(leaf, dir_fd=temporary_fd)


def _preallocates(temporary_fd: int) -> bool:
    """Whether the file system can reserve space for a file."""
    return _probed(temporary_fd, 0, lambda fd: os.posix_fallocate(fd, 0, BLOCK), _NO_PREALLOCATION)


def _is_direct(temporary_fd: int) -> bool:
    """Whether the file system takes our blocks past the page cache."""
    with mmap.mmap(-1, BLOCK) as page:
        return _probed(temporary_fd, os.O_DIRECT, lambda fd: os.write(fd, page), frozenset({errno.EINVAL}))


def _probed(temporary_fd: int, flags: int, attempt: Callable[[int], object], unable: frozenset[int]) -> bool:
    """Whether an attempt on a new file does not end as `unable`. Full is not unable. Raises `OSError`."""
    leaf = "probe"
    with ExitStack() as stack:
        stack.callback(_unlink_if_there, leaf, temporary_fd)
        try:
            flags |= os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = _kept(stack, os.open(leaf, flags, 0o600, dir_fd=temporary_fd))
            attempt(fd)
        except OSError as error:
            if error.errno in unable or error.errno in NO_SPACE:
                return error.errno in NO_SPACE
            raise
    return True


def _unlink_if_there(leaf: str, directory_fd: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(leaf, dir_fd=directory_fd)
