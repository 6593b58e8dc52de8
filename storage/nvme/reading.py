"""Reading blobs from their files, past the page cache: what staging is for need not fill the machine's memory again."""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

from storage.errors import BlobDamaged, BlobMissing
from storage.nvme.blocks import Pages, read_whole
from storage.nvme.listing import split_name
from storage.nvme.recycled import Readers
from storage.nvme.tree import Tree

# O_NONBLOCK: opening a FIFO that someone planted under a blob's name must not wait for its writer.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class BlobReader:
    """Reads blobs below one folder. Blocking; safe for use by several threads."""

    def __init__(self, tree: Tree, readers: Readers, *, direct: bool) -> None:
        self._tree = tree
        self._readers = readers
        self._direct = direct
        self._pages = Pages()

    def read_into(self, name: str, target: memoryview) -> None:
        """Fill `target` with one blob. Raises `BlobMissing`, `BlobDamaged` or `OSError`."""
        directory, leaf = split_name(name)
        with self._readers.reading(directory, leaf):
            try:
                with self._tree.open(*directory) as directory_fd:
                    fd = self._open(leaf, directory_fd)
            except FileNotFoundError as error:
                raise BlobMissing(f"there is no blob {name} on NVMe") from error
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                raise BlobDamaged(f"blob {name} on NVMe lies behind a symbolic link or no folder; remove it") from error
            try:
                self._read_whole(fd, name, target)
            finally:
                os.close(fd)

    def _open(self, leaf: str, directory_fd: int) -> int:
        if self._direct:
            try:
                return os.open(leaf, _READ | os.O_DIRECT, dir_fd=directory_fd)
            except OSError as error:
                if error.errno != errno.EINVAL:  # what is no regular file
                    raise
        return os.open(leaf, _READ, dir_fd=directory_fd)

    def _read_whole(self, fd: int, name: str, target: memoryview) -> None:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise BlobDamaged(f"blob {name} on NVMe is no regular file; remove it")
        if found.st_size != len(target):
            raise BlobDamaged(f"blob {name} on NVMe has {found.st_size} bytes, not {len(target)}")
        count = read_whole(fd, target, self._pages)
        if count < len(target):
            raise BlobDamaged(f"blob {name} on NVMe ended after {count} of {len(target)} bytes")
