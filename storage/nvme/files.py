"""The blocking file operations of an NVMe tier, run in worker threads.

Order of a write (law 1 and 8): temporary file, reserve space, bytes, data sync, rename, directory sync. Whatever
goes wrong before the rename leaves nothing; whatever goes wrong after it leaves at worst a whole blob nobody asked
for. A file is never changed in place.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import threading
from collections.abc import Sequence
from typing import Final

from storage.errors import BlobDamaged, BlobMissing, TierFull
from storage.nvme.listing import Directory, blob_directories, blobs_in, split_name
from storage.nvme.opening import Opened
from storage.nvme.space import Claim, Space
from storage.nvme.tree import SyncFailed, Tree, sync_data, sync_directory
from storage.tier import BlobInfo

_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO that someone planted under a blob's name must not wait for its writer.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class BlobFiles:
    """Reads and writes blobs below one folder. Every method blocks; all are safe for use by several threads."""

    def __init__(self, opened: Opened, space: Space) -> None:
        self._tree = Tree(opened.root_fd)
        self._temporary_fd = opened.temporary_fd
        self._file_system = opened.file_system
        self._space = space
        self._serial = itertools.count()
        # Looking at what a name holds, changing it and counting is one step, so that the count stays exact.
        self._changing = threading.Lock()
        self._used = dict(opened.census.used)

    def write(self, name: str, sealed: memoryview) -> None:
        """Store one blob durably. Raises `OSError`, `SyncFailed`, `TierFull` or `TierUnavailable`."""
        directory, leaf = split_name(name)
        temporary = f"{leaf}.{next(self._serial)}"
        with self._space.claim(len(sealed)) as claim:
            self._check_free(len(sealed))
            try:
                self._write_temporary(temporary, sealed)
                self._publish(temporary, directory, leaf, claim)
            except BaseException:
                with contextlib.suppress(OSError):  # gone after the rename; what stays is removed at the next opening
                    os.unlink(temporary, dir_fd=self._temporary_fd)
                raise

    def read_into(self, name: str, target: memoryview) -> None:
        """Fill `target` with one blob. Raises `BlobMissing`, `BlobDamaged` or `OSError`."""
        directory, leaf = split_name(name)
        try:
            with self._tree.open(*directory) as directory_fd:
                fd = os.open(leaf, _READ, dir_fd=directory_fd)
        except FileNotFoundError as error:
            raise BlobMissing(f"there is no blob {name} on NVMe") from error
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise BlobDamaged(f"blob {name} on NVMe lies behind a symbolic link or no folder; remove it") from error
            raise
        try:
            _read_whole(fd, name, target)
        except BlobDamaged:
            self._recount(directory)
            raise
        finally:
            os.close(fd)

    def lengths(self, names: Sequence[str]) -> dict[str, int]:
        """Lengths of those blobs that exist. Raises `OSError`."""
        found: dict[str, int] = {}
        for directory, leaves in _by_directory(names).items():
            try:
                with self._tree.open(*directory) as fd:
                    for leaf in leaves:
                        length = _length(fd, leaf)
                        if length is not None:
                            found["/".join((*directory, leaf))] = length
            except (FileNotFoundError, NotADirectoryError):
                continue
        return found

    def remove(self, names: Sequence[str]) -> None:
        """Remove blobs durably, as many as possible. Raises `OSError` or `SyncFailed` for the first that resisted.

        A directory is synced even if the blob is not there: an earlier removal may not have got that far.
        """
        first: OSError | SyncFailed | None = None
        for directory, leaves in _by_directory(names).items():
            try:
                self._remove_from(directory, leaves)
            except (OSError, SyncFailed) as error:
                first = first or error
        if first is not None:
            raise first

    def directories(self) -> list[Directory]:
        """All directories that may hold blobs. Raises `OSError`."""
        return blob_directories(self._tree)

    def blobs_in(self, directory: Directory) -> list[BlobInfo]:
        """The blobs in one directory. Raises `OSError`."""
        return blobs_in(self._tree, directory)

    def _check_free(self, length: int) -> None:
        free = _free_bytes(self._temporary_fd)
        free_min = self._file_system.free_bytes_min
        if free - length < free_min:
            reason = (
                f"{free} bytes are free on its disk, of which {free_min} are to stay free, {length} more do not fit"
            )
            self._space.mark_full(reason)
            raise TierFull(reason)

    def _write_temporary(self, temporary: str, sealed: memoryview) -> None:
        fd = os.open(temporary, _CREATE, 0o600, dir_fd=self._temporary_fd)
        try:
            if self._file_system.preallocates and len(sealed) > 0:
                os.posix_fallocate(fd, 0, len(sealed))
            at = 0
            while at < len(sealed):
                at += os.write(fd, sealed[at:])
            sync_data(fd)
        finally:
            os.close(fd)

    def _publish(self, temporary: str, directory: Directory, leaf: str, claim: Claim) -> None:
        with self._tree.open_or_create(*directory) as fd:
            with self._changing:
                replaced = _length(fd, leaf) or 0
                os.rename(temporary, leaf, src_dir_fd=self._temporary_fd, dst_dir_fd=fd)
                claim.publish(replaced)
                self._used[directory] = self._used.get(directory, 0) + claim.length - replaced
            try:
                sync_directory(fd)
            except SyncFailed:
                self._unlink(fd, directory, leaf)
                raise

    def _remove_from(self, directory: Directory, leaves: Sequence[str]) -> None:
        try:
            with self._tree.open(*directory) as fd:
                removed = [self._unlink(fd, directory, leaf) for leaf in leaves]
                sync_directory(fd)
        except FileNotFoundError:
            removed = [False]
        if not all(removed):
            self._recount(directory)

    def _unlink(self, directory_fd: int, directory: Directory, leaf: str) -> bool:
        """Remove one file; whether it was there."""
        with self._changing:
            length = _length(directory_fd, leaf) or 0
            try:
                os.unlink(leaf, dir_fd=directory_fd)
            except FileNotFoundError:
                return False
            self._used[directory] = self._used.get(directory, 0) - length
            self._space.freed(length)
        return True

    def _recount(self, directory: Directory) -> None:
        """Count one directory anew: a blob was gone or had another length, so others may be too."""
        with self._changing:
            used = sum(blob.length for blob in blobs_in(self._tree, directory))
            self._space.freed(self._used.get(directory, 0) - used)
            self._used[directory] = used


def _free_bytes(fd: int) -> int:
    """Bytes that this process may still write to the file system of `fd`."""
    found = os.fstatvfs(fd)
    return found.f_bavail * found.f_frsize


def _read_whole(fd: int, name: str, target: memoryview) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise BlobDamaged(f"blob {name} on NVMe is no regular file; remove it")
    if found.st_size != len(target):
        raise BlobDamaged(f"blob {name} on NVMe has {found.st_size} bytes, not {len(target)}")
    at = 0
    while at < len(target):
        count = os.preadv(fd, [target[at:]], at)
        if count == 0:
            raise BlobDamaged(f"blob {name} on NVMe ended after {at} of {len(target)} bytes")
        at += count


def _length(directory_fd: int, leaf: str) -> int | None:
    """Length of a regular file; none for anything else."""
    try:
        found = os.stat(leaf, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _by_directory(names: Sequence[str]) -> dict[Directory, list[str]]:
    grouped: dict[Directory, list[str]] = {}
    for name in names:
        directory, leaf = split_name(name)
        grouped.setdefault(directory, []).append(leaf)
    return grouped
