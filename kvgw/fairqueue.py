"""A queue that serves those who ask in proportion: whoever was served least comes first, not whoever asked first.

Start-time fair queueing (Goyal, Vin, Cheng 1996): each item is tagged with the later of now, in units served, and the
end of its owner's last one; the smallest tag is next. So an owner that asks little is served at once, however many
items of others wait, and one with many items waits for its own. An idle owner saves up nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")

_REMEMBERED_MAX: Final = 1024
"""Owners of whom it is known what they had, beyond those of whom something waits."""


class FairQueue(Generic[Item]):
    """Items by owner. Not for several threads at once."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Hashable, Item]] = []
        self._ends: dict[Hashable, float] = {}
        """By owner, the tag that its next item has at least."""
        self._now = 0.0
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, owner: Hashable, item: Item, cost: float) -> None:
        """Queue an item that will cost so much, in whatever unit all do."""
        start = max(self._now, self._ends.get(owner, 0.0))
        self._ends[owner] = start + cost
        self._count += 1
        heappush(self._heap, (start, self._count, owner, item))

    def first(self) -> Item:
        """The next item, which stays. Raises `IndexError` when there is none."""
        return self._heap[0][3]

    def pop(self) -> Item:
        """The next item. Raises `IndexError` when there is none."""
        self._now, _, _, item = heappop(self._heap)
        self._forget()
        return item

    def charge(self, owner: Hashable, cost: float) -> None:
        """Items of the owner's cost so much more than was said."""
        self._ends[owner] = max(self._now, self._ends.get(owner, 0.0)) + cost
        self._forget()

    def serve(self, owner: Hashable, cost: float) -> None:
        """As `push` and `pop` of one item, while nothing waits."""
        self._now = max(self._now, self._ends.get(owner, 0.0))
        self._ends[owner] = self._now + cost
        self._forget()

    def _forget(self) -> None:
        if len(self._ends) > _REMEMBERED_MAX + len(self._heap):
            self._ends.clear()  # of so many none had much more than the others
