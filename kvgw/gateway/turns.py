"""Turns: how many requests work at once, and whose is next. What else was let in waits here.

More requests at work than processors can serve only get in each other's way: each step of one waits for a step of all
others, and a tenant with many of them has nearly all of the processors. So a few are at work, and of those who wait the
one is next whose tenant was served least. A tenant of which nothing is at work has a place beyond the others.

A request that waits for something else than a processor (its peer, a tier, another write) steps aside: it needs no
place for that, and does not come back for one.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Final
from uuid import UUID

from kvgw.fairqueue import FairQueue
from kvgw.runtime import payer

PATIENCE_SECONDS: Final = 0.05
"""Who has had a place for so long while others wait is taken to wait for something itself, and steps aside."""

_current: ContextVar[Turn | None] = ContextVar("turn", default=None)


class Turns:
    """Places for requests at work. One event loop."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._working: dict[Turn, float] = {}
        """Those who have a place, and since when; the longest first."""
        self._of_tenant: dict[UUID, int] = {}
        self._queue: FairQueue[Turn] = FairQueue()
        self._timer: asyncio.TimerHandle | None = None
        self.asked = 0
        """Requests so far, those that were done at once too."""

    @property
    def working(self) -> int:
        """Requests that have a place."""
        return len(self._working)

    @property
    def waiting(self) -> int:
        """Requests that wait for one, or gave up waiting a moment ago."""
        return len(self._queue)

    def of(self, tenant: UUID) -> Turn:
        """A block that one request of the tenant's works in: ``async with turns.of(tenant): ...``."""
        return Turn(self, tenant)

    @property
    def has_room(self) -> bool:
        """Whether a request may be done here and now: nobody waits, and there is a place."""
        return not self._queue and len(self._working) < self._places

    def done_at_once(self, tenant: UUID) -> None:
        """A request of the tenant's was done while there was room, and waited for nothing: it counts like any other."""
        self.asked += 1
        self._queue.serve(tenant, 1.0)

    def ask(self, turn: Turn) -> None:
        """Only for `Turn`: it wants a place, and may have it when this returns."""
        self.asked += 1
        if not self._queue and len(self._working) < self._places:
            self._queue.serve(turn.tenant, 1.0)
            self._admit(turn)  # nobody waits
            return
        self._queue.push(turn.tenant, turn, 1.0)
        self._advance()

    def end(self, turn: Turn) -> None:
        """Only for `Turn`: it needs no place any more; one that has none is no error."""
        if self._working.pop(turn, None) is None:
            return
        left = self._of_tenant[turn.tenant] - 1
        if left:
            self._of_tenant[turn.tenant] = left
        else:
            del self._of_tenant[turn.tenant]
        self._advance()

    def _advance(self) -> None:
        """Give places to those who are next."""
        while self._queue:
            turn = self._queue.first()
            if turn.is_over:
                self._queue.pop()
            elif len(self._working) < self._places + (turn.tenant not in self._of_tenant):
                self._admit(self._queue.pop())
            else:
                self._watch()
                return

    def _admit(self, turn: Turn) -> None:
        self._working[turn] = asyncio.get_running_loop().time()
        self._of_tenant[turn.tenant] = self._of_tenant.get(turn.tenant, 0) + 1
        turn.begin()

    def _watch(self) -> None:
        """Somebody waits: see to it that no place is kept for long."""
        if self._timer is None:
            due = next(iter(self._working.values())) + PATIENCE_SECONDS
            self._timer = asyncio.get_running_loop().call_at(due, self._tire)

    def _tire(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        # The sum by which the timer was set: rounded otherwise, it could be due and nobody late, again and again.
        for turn in [turn for turn, since in self._working.items() if since + PATIENCE_SECONDS <= now]:
            self.end(turn)
        self._advance()


class Turn:
    """One request; see `Turns.of`."""

    __slots__ = ("_began", "_tokens", "_turns", "_wake", "is_over", "tenant")

    def __init__(self, turns: Turns, tenant: UUID) -> None:
        self.tenant = tenant
        self.is_over = False
        """It wants no place any more."""
        self._turns = turns
        self._began = False
        self._wake: asyncio.Future[None] | None = None
        self._tokens: tuple[Token[object], Token[Turn | None]] | None = None

    async def __aenter__(self) -> None:
        self._turns.ask(self)
        if not self._began:
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            except BaseException:
                self.end()  # it may have had its place in the moment of its cancellation
                raise
        self._tokens = payer.set(self.tenant), _current.set(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tokens is not None, "what ends has begun"
        of_payer, of_turn = self._tokens
        payer.reset(of_payer)
        _current.reset(of_turn)
        self.end()

    def begin(self) -> None:
        """Only for `Turns`: it has a place."""
        self._began = True
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def end(self) -> None:
        """Leave the place to others, now and for good; a second time is no error."""
        self.is_over = True
        self._turns.end(self)


def step_aside() -> None:
    """What this request does next takes no processor, or not for long: others may work meanwhile."""
    turn = _current.get()
    if turn is not None:
        turn.end()
