"""Who waits for chunks to arrive: woken when this gateway announces some in their namespace."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from tenancy.model import Scope


class Arrivals:
    """Waiting readers, by namespace. Belongs to one event loop; holds nothing while nobody waits."""

    def __init__(self) -> None:
        self._waiting: defaultdict[Scope, set[asyncio.Event]] = defaultdict(set)

    def note(self, scope: Scope) -> None:
        """Chunks of the namespace can be had from now on."""
        for event in self._waiting.get(scope, ()):
            event.set()

    def join(self, scope: Scope) -> asyncio.Event:
        """An event that is set at each arrival, until `leave`."""
        event = asyncio.Event()
        self._waiting[scope].add(event)
        return event

    def leave(self, scope: Scope, event: asyncio.Event) -> None:
        """Nobody waits with this event any more."""
        self._waiting[scope].discard(event)
        if not self._waiting[scope]:
            del self._waiting[scope]


async def arrival(event: asyncio.Event, seconds: float) -> None:
    """Return at the next arrival, or after `seconds`; the event stands for the one after it then."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
    event.clear()
