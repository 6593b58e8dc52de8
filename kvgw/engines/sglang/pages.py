"""Pages of a host pool, as (address, bytes) pairs, and their copies in windows.

A page may be in several buffers (keys, then values); a window holds them one behind the other. The addresses are the
engine's own: they are used while its call lasts, in its thread, and never afterwards.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Page:
    """Buffers of one page: addresses, and how many bytes each has."""

    addresses: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def read(self, window: memoryview) -> None:
        """Copy the page into `window`, which has as many bytes."""
        at = _address(window, self.nbytes)
        for address, size in zip(self.addresses, self.sizes, strict=True):
            ctypes.memmove(at, address, size)
            at += size

    def write(self, window: memoryview) -> None:
        """Overwrite the page from `window`, which has as many bytes."""
        at = _address(window, self.nbytes)
        for address, size in zip(self.addresses, self.sizes, strict=True):
            ctypes.memmove(address, at, size)
            at += size


def pages_of(pointers: Sequence[int], sizes: Sequence[int], count: int) -> list[Page]:
    """Cut what ``get_page_buffer_meta`` said of `count` pages into pages; each has as many buffers."""
    per_page, rest = divmod(len(pointers), count)
    if rest or not per_page or len(pointers) != len(sizes):
        raise ValueError(f"{len(pointers)} buffers and {len(sizes)} sizes are not those of {count} pages")
    return [
        Page(tuple(pointers[first : first + per_page]), tuple(sizes[first : first + per_page]))
        for first in range(0, len(pointers), per_page)
    ]


def _address(window: memoryview, nbytes: int) -> int:
    if window.nbytes != nbytes:
        raise ValueError(f"a window of {window.nbytes} bytes cannot hold a page of {nbytes}")
    return ctypes.addressof(ctypes.c_char.from_buffer(window))
