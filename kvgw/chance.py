"""Randomness that is watched: a generator that repeats itself must not make a single key or salt more.

A machine restored from a snapshot, a broken driver or a test double left behind can hand out the same bytes again; two
chunks under one salt and data key would share their key and nonces.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from kvgw.errors import Code, Outage
from kvgw.runtime import Rng

WATCHED_BYTES: Final = 16
"""Draws of at least so many bytes never repeat by chance."""
REMEMBERED_MAX: Final = 65_536


class WatchedRng:
    """A generator that remembers its last draws. Raises `Outage` (internal) at the first repetition and ever after."""

    def __init__(self, rng: Rng) -> None:
        """Draws twice at once, so that a generator that always says the same refuses the start."""
        self._rng = rng
        self._seen: set[bytes] = set()
        self._order: deque[bytes] = deque()
        self._broken = False
        for _ in range(2):
            self.token(32)

    def token(self, size: int) -> bytes:
        """`size` random bytes."""
        drawn = self._rng.token(size)
        if size < WATCHED_BYTES:
            return drawn
        head = drawn[:WATCHED_BYTES]
        if self._broken or head in self._seen or len(drawn) != size:
            self._broken = True
            raise Outage(
                "the system's random generator repeated itself; no key and no salt is made any more. Restart the "
                "gateway, and if it says so again, this machine",
                Code.INTERNAL,
            )
        self._seen.add(head)
        self._order.append(head)
        if len(self._order) > REMEMBERED_MAX:
            self._seen.discard(self._order.popleft())
        return drawn

    def jitter(self) -> float:
        """A number in [0, 1), not for secrets."""
        return self._rng.jitter()
