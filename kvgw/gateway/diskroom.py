"""Room on this node's disk: a PUT that finds none asks for some, and eviction answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from kvgw.runtime import Clock

PAUSE_SECONDS: Final = 0.05
"""Between two times that room is made."""
REST_SECONDS: Final = 0.5
"""Nobody asks again for so long after there was nothing to give up: a full disk must not cost the catalog its time."""


class DiskRoom:
    """Those who wait for room, and who makes it. Belongs to one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wanted = asyncio.Event()
        self._answered = asyncio.Event()
        self.made = 0
        """How often room was made."""
        self._served = False
        self._rests_until = 0.0

    async def ask(self, since: int, limit_s: float) -> bool:
        """Whether room was made since `made` was `since`, or is within `limit_s` seconds.

        False at once where nobody evicts, or nothing was found to be given up a moment ago.
        """
        if self.made > since:
            return True
        if not self._served or self._clock.monotonic() < self._rests_until:
            return False
        answered = self._answered
        self._wanted.set()
        try:
            async with asyncio.timeout(limit_s):
                await answered.wait()
        except TimeoutError:
            return False
        return self.made > since

    async def serve(self, make_room: Callable[[], Awaitable[bool]]) -> None:
        """Answer until cancelled; `make_room` says whether it is worth another try."""
        self._served = True
        try:
            while True:
                await self._wanted.wait()
                self._answer(await make_room())
                await asyncio.sleep(PAUSE_SECONDS)
        finally:
            self._served = False
            self._answer(made=False)

    def _answer(self, made: bool) -> None:
        if not made:
            self._rests_until = self._clock.monotonic() + REST_SECONDS
        self.made += made
        self._wanted.clear()  # whoever asked meanwhile is answered too
        answered, self._answered = self._answered, asyncio.Event()
        answered.set()
