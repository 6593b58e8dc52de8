"""Where changes wait for a worker thread, which takes those that wait together in one hop.

Nobody waits for company: a change that finds a free hop goes with whoever came in the same turn of the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from storage.nvme.changes import Change
from storage.ports import Workers

Wish = TypeVar("Wish", bound=Change)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many hops a lane makes at once, and what each takes along at most; a change too large for it goes alone."""

    hops: int
    changes: int
    nbytes: int


@dataclass(slots=True, eq=False)
class _Ticket(Generic[Wish]):
    """A change that waits, then rides."""

    change: Wish
    ended: asyncio.Future[None]
    hop: asyncio.Task[None] | None = field(default=None)


class Lane(Generic[Wish]):
    """Changes of one kind. For the event loop's thread alone; `work` runs in worker threads, several at once."""

    def __init__(self, workers: Workers, work: Callable[[Sequence[Wish]], None], bounds: Bounds) -> None:
        """`work` does all of its changes and leaves with each how it ended."""
        self._workers = workers
        self._work = work
        self._bounds = bounds
        self._waiting: deque[_Ticket[Wish]] = deque()
        self._hops: set[asyncio.Task[None]] = set()
        self._called = False

    async def carry(self, change: Wish) -> None:
        """Return when `change` is done; raise as it failed.

        A caller that is cancelled has its memory back when this raises: at once while the change still waits, else when
        the thread is done (law 7).
        """
        ticket = _Ticket(change, asyncio.get_running_loop().create_future())
        self._waiting.append(ticket)
        self._call()
        try:
            await ticket.ended
        except asyncio.CancelledError:
            if ticket.hop is None:
                self._waiting.remove(ticket)
            else:
                await _over(ticket.hop)
                change.error = None  # gives way to the cancellation
            raise
        change.result()

    def _call(self) -> None:
        """Send hops off when this turn of the event loop is over."""
        if not self._called:
            self._called = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._called = False
        while self._waiting and len(self._hops) < self._bounds.hops:
            tickets = self._next()
            hop = asyncio.get_running_loop().create_task(self._hop(tickets))
            self._hops.add(hop)
            for ticket in tickets:
                ticket.hop = hop

    def _next(self) -> list[_Ticket[Wish]]:
        """Those at the head, as many as one hop may take and its fellows leave to it."""
        free = self._bounds.hops - len(self._hops)
        most = min(self._bounds.changes, -(-len(self._waiting) // free))
        tickets = [self._waiting.popleft()]
        nbytes = tickets[0].change.nbytes
        while self._waiting and len(tickets) < most:
            nbytes += self._waiting[0].change.nbytes
            if nbytes > self._bounds.nbytes:
                break
            tickets.append(self._waiting.popleft())
        return tickets

    async def _hop(self, tickets: Sequence[_Ticket[Wish]]) -> None:
        try:
            await self._workers.run(partial(self._work, [ticket.change for ticket in tickets]))
        except Exception as error:  # noqa: BLE001  # no thread was to be had, or a bug: goes to those who wait
            for ticket in tickets:
                if ticket.change.error is not None:
                    ticket.change.error = error
        finally:
            self._hops -= {asyncio.current_task()}
            for ticket in tickets:
                if not ticket.ended.done():
                    ticket.ended.set_result(None)
            self._send()


async def _over(hop: asyncio.Task[None]) -> None:
    """Wait for the end of a hop, however often the one who waits is cancelled."""
    while not hop.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait((hop,))
