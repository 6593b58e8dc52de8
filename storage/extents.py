"""Free extents of a linear room, in pages: best fit, coalescing, no memory touched.

Both searches are O(log d), where d is the number of *different* free lengths; d is at most the square root of twice
the number of pages. Among holes of one length the one freed last is taken: its memory is the likeliest to be still in
the processor's cache.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict


class FreeExtents:
    """The free pages of a room of `pages` pages, kept as the fewest possible extents."""

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"a room needs at least one page, not {pages}")
        self.free_pages = 0
        self._length_at: dict[int, int] = {}  # first page → length
        self._start_before: dict[int, int] = {}  # page after the extent → first page
        self._starts: dict[int, OrderedDict[int, None]] = {}  # length → first pages, the last freed at the end
        self._lengths: list[int] = []  # the keys of `_starts`, sorted
        self._insert(0, pages)

    @property
    def largest(self) -> int:
        """Length of the largest free extent, in pages."""
        return self._lengths[-1] if self._lengths else 0

    def take(self, pages: int) -> int | None:
        """First page of a run of `pages` pages that is free no longer, cut from the smallest extent that can hold it.

        None when no extent is long enough.
        """
        assert pages > 0, f"cannot take {pages} pages"
        at = bisect_left(self._lengths, pages)
        if at == len(self._lengths):
            return None
        length = self._lengths[at]
        start = next(reversed(self._starts[length]))
        self._remove(start)
        if length > pages:
            self._insert(start + pages, length - pages)
        return start

    def give(self, start: int, pages: int) -> None:
        """Make a run free again and join it with its free neighbours."""
        before = self._start_before.get(start)
        if before is not None:
            pages += self._remove(before)
            start = before
        if start + pages in self._length_at:
            pages += self._remove(start + pages)
        self._insert(start, pages)

    def _insert(self, start: int, pages: int) -> None:
        self._length_at[start] = pages
        self._start_before[start + pages] = start
        self.free_pages += pages
        if pages not in self._starts:
            insort(self._lengths, pages)
            self._starts[pages] = OrderedDict()
        self._starts[pages][start] = None

    def _remove(self, start: int) -> int:
        pages = self._length_at.pop(start)
        del self._start_before[start + pages]
        self.free_pages -= pages
        peers = self._starts[pages]
        del peers[start]
        if not peers:
            del self._starts[pages]
            del self._lengths[bisect_left(self._lengths, pages)]
        return pages
