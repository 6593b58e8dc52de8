"""WAIT: answer when all of the chunks can be had, or with what there is when the time is over.

What this gateway stores wakes its waiters. What another one stores becomes visible here when it is in S3: nobody says
so, and the catalog is asked again now and then.
"""

from __future__ import annotations

from typing import Final

from kvgw.gateway.arrivals import arrival
from kvgw.gateway.directory import Directory, Place
from kvgw.gateway.match import MatchVerb
from kvgw.gateway.rooms import Rooms
from kvgw.gateway.turns import step_aside
from kvgw.model import MatchReply, MatchRequest, WaitRequest
from tenancy.access import Caller

LOOK_SECONDS: Final = 0.25
"""Between two looks for what other gateways stored."""


class WaitVerb:
    """Answers waits."""

    def __init__(self, rooms: Rooms, directory: Directory, match: MatchVerb) -> None:
        self._rooms = rooms
        self._directory = directory
        self._match = match

    async def __call__(self, caller: Caller, place: Place, request: WaitRequest) -> MatchReply:
        """Raises the rooms' errors."""
        rooms = self._rooms
        deadline = rooms.clock.monotonic() + request.deadline_ms / 1000
        question = MatchRequest(request.fingerprints, request.keys, request.namespace, request.lease_ms)
        event = rooms.arrivals.join(place.scope)
        try:
            while True:
                reply = await self._match.answer(caller, place, question)
                remaining = deadline - rooms.clock.monotonic()
                if reply.matched == len(request.keys) or remaining <= 0:
                    await self._match.count(place, question, reply.matched)  # one look-up, however often it looked
                    return reply
                step_aside()
                await arrival(event, min(remaining, LOOK_SECONDS))
                place = await self._directory.place(caller, request.namespace)
        finally:
            rooms.arrivals.leave(place.scope, event)
