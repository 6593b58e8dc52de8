"""How fast a job may go: bytes per second, so many at once, with pauses, no dearer than a small share of the time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from kvgw.gateway.turns import Turns as RequestTurns
from kvgw.runtime import Clock

COST_SHARE: Final = 0.05
SPELL_SECONDS: Final = 0.002
PAUSE_SPELLS: Final = 3
PAUSE_SECONDS_MAX: Final = 0.05
"""What took longer waited rather than worked."""


class Bucket:
    """Tokens for bytes, which come at a steady rate and are spent before they are there: what is owed is waited for.

    So over any time no more than the rate allows is spent, and what was spent at once.
    """

    def __init__(self, bytes_per_second: int, clock: Clock) -> None:
        """0: no limit."""
        self.rate = bytes_per_second
        self._clock = clock
        self._even_at = clock.monotonic()

    async def ready(self) -> None:
        """Return when nothing is owed."""
        while self.rate and (owed_s := self._even_at - self._clock.monotonic()) > 0:
            await self._clock.sleep(owed_s)

    def spend(self, nbytes: int) -> None:
        """Take tokens, whether they are there or not."""
        if self.rate:
            self._even_at = max(self._even_at, self._clock.monotonic()) + nbytes / self.rate


class Turns:
    """So many at once as `width` says at the moment, the others in order of arrival."""

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._inside = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        self._queue.append(ticket := asyncio.get_running_loop().create_future())
        self._admit()
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.cancelled():
                self._queue.remove(ticket)
            else:  # admitted in the same turn of the loop in which it was cancelled
                self._leave()
            raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._inside -= 1
        self._admit()

    def _admit(self) -> None:
        waiting = (ticket for ticket in tuple(self._queue) if not ticket.cancelled())  # those leave by themselves
        for ticket in waiting:
            if self._inside >= self._width():
                return
            self._queue.remove(ticket)
            self._inside += 1
            ticket.set_result(None)


class Pauses:
    """Lets requests go first: a job that looks through a lot works for a short spell, and rests for three such.

    Where nobody has asked for anything meanwhile, and nothing is at work, it goes on.
    """

    def __init__(self, clock: Clock, turns: RequestTurns) -> None:
        self._clock = clock
        self._turns = turns
        self._began, self._asked = clock.monotonic(), turns.asked

    async def between(self) -> None:
        """Between two pieces of work: rest, when the spell is over."""
        spell = self._clock.monotonic() - self._began
        if spell < SPELL_SECONDS:
            return
        if self._turns.working or self._turns.asked != self._asked:
            await self._clock.sleep(min(PAUSE_SPELLS * spell, PAUSE_SECONDS_MAX))
        self._began, self._asked = self._clock.monotonic(), self._turns.asked


class Sparing:
    """Lets a costly look be taken again once its last cost is a small share of the time that has passed since."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next_at = clock.monotonic()

    @property
    def due(self) -> bool:
        return self._clock.monotonic() >= self._next_at

    @contextmanager
    def looking(self) -> Iterator[None]:
        started = self._clock.monotonic()
        try:
            yield
        finally:
            ended = self._clock.monotonic()
            self._next_at = ended + (ended - started) / COST_SHARE
