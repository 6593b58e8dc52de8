"""Host memory for chunks on their way: a bounded number of equal windows, allocated when first needed and reused."""

from __future__ import annotations

import threading


class Windows:
    """Windows of `size` bytes, as many as fit into `limit` bytes but at least one. Any thread may call it."""

    def __init__(self, size: int, limit: int) -> None:
        self.size = size
        self.count = max(1, limit // size)
        self._lock = threading.Lock()
        self._free: list[memoryview] = []
        self._made = 0

    def take(self, count: int) -> list[memoryview]:
        """Up to `count` windows, fewer or none when so many are not free. Their content is old."""
        with self._lock:
            taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
            new = min(count - len(taken), self.count - self._made)
            self._made += new
        return taken + [memoryview(bytearray(self.size)) for _ in range(new)]

    def give(self, windows: list[memoryview]) -> None:
        """Take windows back, which nobody reads or writes any more."""
        with self._lock:
            self._free.extend(windows)

    @property
    def idle(self) -> bool:
        """Whether every window that was taken is back."""
        with self._lock:
            return len(self._free) == self._made
