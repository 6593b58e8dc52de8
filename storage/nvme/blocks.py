"""A blob's bytes between memory and its file, past the page cache as far as the kernel takes that.

Direct transfers want whole blocks, in memory and in the file; a sealed blob has some bytes more. When it is written,
those go through one page of the cache and the data sync brings them out: a padded block that is cut off afterwards
costs more, because cutting reads the block back. When it is read, they come into a page of ours in the same call.

Memory that the kernel does not take (`EINVAL`) goes through the page cache, call by call.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Final

BLOCK: Final = 4096
"""Bytes: what direct transfers are made of on every device that the opening's probe has passed."""


class Pages:
    """Aligned pages to read the last bytes of blobs into; as many as threads ever read at once."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """A page of `BLOCK` bytes, to be given back; what is in it is nobody's."""
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(mmap.mmap(-1, BLOCK))

    def give(self, page: memoryview) -> None:
        self._free.append(page)


def write_whole(fd: int, sealed: memoryview, *, direct: bool) -> None:
    """Write a blob to an empty file, opened with `O_DIRECT` if `direct`. Raises `OSError`."""
    at = 0
    if direct:
        at = _write_blocks(fd, sealed)
        _use_cache(fd)
    while at < len(sealed):
        at += os.write(fd, sealed[at:])


def read_whole(fd: int, target: memoryview, pages: Pages) -> int:
    """Fill `target` from a file of that length, opened with `O_DIRECT` or without; bytes found. Raises `OSError`."""
    at = _read_blocks(fd, target, pages)
    if at < len(target):
        _use_cache(fd)
    while at < len(target):
        count = os.preadv(fd, [target[at:]], at)
        if count == 0:
            break
        at += count
    return at


def _write_blocks(fd: int, sealed: memoryview) -> int:
    """Write whole blocks as long as the kernel takes them; bytes written."""
    at, end = 0, len(sealed) // BLOCK * BLOCK
    try:
        while at < end:
            at += os.write(fd, sealed[at:end])
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return at


def _read_blocks(fd: int, target: memoryview, pages: Pages) -> int:
    """Read in one call what the kernel takes; bytes read. What follows a short answer is not asked for here."""
    whole = len(target) // BLOCK * BLOCK
    page = pages.take()
    try:
        pieces = [target[:whole], page] if whole else [page]
        count = min(os.preadv(fd, pieces, 0), len(target))  # no more than is asked for, should the file have grown
        if count > whole:
            target[whole:count] = page[: count - whole]
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0
    finally:
        pages.give(page)
    return count


def _use_cache(fd: int) -> None:
    """From now on the descriptor reads and writes through the page cache, which takes any memory."""
    fcntl.fcntl(fd, fcntl.F_SETFL, 0)
