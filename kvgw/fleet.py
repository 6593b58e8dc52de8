"""Several gateways as one: each prefix goes to one of them, and to the next when that one does not answer.

Requests of one prefix land on one gateway, so that its NVMe and staging serve them all; which one is decided by
rendezvous hashing, so that the loss of a gateway moves only its own prefixes. A chunk that is in S3 can be read through
every gateway.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from blake3 import blake3
from msgspec.structs import replace

from kvgw.breaker import Breaker, BreakerOptions, BreakerState
from kvgw.calls import ClientOptions
from kvgw.deadlines import Deadlines
from kvgw.endpoint import TcpEndpoint, parse_endpoint
from kvgw.errors import Code, FormatError, KvgwError, Outage
from kvgw.held import HeldWindow, HeldWindows
from kvgw.model import (
    DeleteRequest,
    ExplainRequest,
    GetReply,
    GetRequest,
    HoldRequest,
    MatchReply,
    MatchRequest,
    PutReply,
    PutRequest,
    Question,
    TouchRequest,
    WaitRequest,
)
from kvgw.runtime import Clock, Rng, SystemClock, SystemRng
from kvgw.tls import client_context
from kvgw.transport import SocketTransport, Transport

Answer = TypeVar("Answer")
Result = TypeVar("Result")

REMEMBERED_KEYS_MAX: Final = 65_536
"""Keys whose prefix is remembered; a forgotten one is merely served by another gateway."""

SHARE: Final = 0.5
"""How much of the time that is left a gateway gets while there is another one to ask."""
LAST_SHARE: Final = 0.95
"""And when there is none; the rest is for its breaker to learn of it before the caller gives up."""

WAIT_PIECE_MS: Final = 2_000
WAIT_SHARE: Final = 0.4
"""Of the time that is left, what one gateway may wait; below `SHARE`, so that its answer comes in time."""

_KEYED: Final = (MatchRequest, WaitRequest, TouchRequest, HoldRequest, DeleteRequest, ExplainRequest)


async def _ask(transport: Transport, request: Question, answer: type[Answer]) -> Answer:
    return await transport.ask(request, answer)


class Member:
    """One gateway of a fleet and how it has been lately."""

    def __init__(self, name: str, transport: Transport, breaker: Breaker) -> None:
        self.name = name
        self.transport = transport
        self.breaker = breaker

    def weight(self, prefix: bytes) -> bytes:
        """Rendezvous weight: the member with the highest has the prefix."""
        return blake3(self.name.encode() + b"\0" + prefix).digest()


class FleetTransport:
    """A transport over several gateways. Only an outage of a gateway moves a request on; a refusal is an answer."""

    def __init__(
        self, members: Sequence[tuple[str, Transport]], options: BreakerOptions, clock: Clock, rng: Rng
    ) -> None:
        self._members = [Member(name, transport, Breaker(options, clock, rng)) for name, transport in members]
        self._clock = clock
        self._deadlines = Deadlines()
        self._prefix_of: OrderedDict[bytes, bytes] = OrderedDict()

    @property
    def states(self) -> dict[str, BreakerState]:
        """Each gateway's breaker."""
        return {member.name: member.breaker.state for member in self._members}

    async def ask(self, request: Question, answer: type[Answer]) -> Answer:
        keys = request.keys if isinstance(request, _KEYED) else []
        if isinstance(request, WaitRequest):
            return await self._wait(request, answer)
        return await self._first_that_answers(
            self._prefix(keys, None), request.deadline_ms, lambda transport: transport.ask(request, answer)
        )

    async def _wait(self, request: WaitRequest, answer: type[Answer]) -> Answer:
        """Wait in pieces: a gateway that dies meanwhile costs one of them, and the next gateway goes on."""
        ends = self._clock.monotonic() + request.deadline_ms / 1000
        prefix = self._prefix(request.keys, None)
        while True:
            left_ms = int((ends - self._clock.monotonic()) * 1000)
            piece = replace(request, deadline_ms=max(1, min(WAIT_PIECE_MS, int(WAIT_SHARE * left_ms))))
            send: Callable[[Transport], Awaitable[Answer]] = partial(_ask, request=piece, answer=answer)
            reply: Answer = await self._first_that_answers(prefix, max(left_ms, 1), send)
            found = isinstance(reply, MatchReply) and reply.matched == len(request.keys)
            if found or left_ms - piece.deadline_ms <= WAIT_PIECE_MS * (1 - WAIT_SHARE) / 2:
                return reply

    async def put(self, request: PutRequest, payloads: Sequence[memoryview]) -> PutReply:
        prefix = self._prefix(request.keys, request.parent)
        return await self._first_that_answers(
            prefix, request.deadline_ms, lambda transport: transport.put(request, payloads)
        )

    async def get(self, request: GetRequest, into: Sequence[memoryview]) -> GetReply:
        prefix = self._prefix(request.keys, None)
        return await self._first_that_answers(
            prefix, request.deadline_ms, lambda transport: transport.get(request, into)
        )

    async def lend(self, nbytes: int) -> HeldWindow | None:
        """From the first gateway of this host that lends it; what another one serves is copied."""
        for member in self._members:
            if member.breaker.state is BreakerState.OPEN:
                continue  # one that did not answer lately would take the others' time
            try:
                held = await member.transport.lend(nbytes)
            except Outage:
                continue
            if held is not None:
                return held
        return None

    async def aclose(self) -> None:
        for member in self._members:
            await member.transport.aclose()
        self._deadlines.close()

    async def _first_that_answers(
        self, prefix: bytes, deadline_ms: int, send: Callable[[Transport], Awaitable[Result]]
    ) -> Result:
        ends = self._clock.monotonic() + deadline_ms / 1000
        last: Outage | None = None
        order = sorted(self._members, key=lambda one: one.weight(prefix), reverse=True)
        for place, member in enumerate(order):
            left = ends - self._clock.monotonic()
            if left <= 0:
                raise last or Outage("the deadline was over before a gateway was asked", Code.DEADLINE)
            if not member.breaker.admit():
                continue
            # A frozen gateway must leave time for another one to answer; the last one only for this to be noticed.
            others = any(other.breaker.state is not BreakerState.OPEN for other in order[place + 1 :])
            share = left * (SHARE if others else LAST_SHARE)
            try:
                with self._deadlines.within(share):
                    result = await send(member.transport)
            except TimeoutError:
                member.breaker.failed()
                last = Outage(f"{member.name} did not answer within {share:.3g} s", Code.DEADLINE)
            except Outage as error:
                # One that says that it cannot is there all the same; another may be able to.
                member.breaker.succeeded() if error.answered else member.breaker.failed()
                last = error
            except KvgwError:
                member.breaker.succeeded()
                raise
            except BaseException:
                member.breaker.abandoned()
                raise
            else:
                member.breaker.succeeded()
                return result
        raise last or Outage("no gateway of the fleet answered lately; they are tried again shortly")

    def _prefix(self, keys: Sequence[bytes], parent: bytes | None) -> bytes:
        """What the first key's chain began with, as far as this client has seen it."""
        if not keys:
            return b""
        start = parent if parent is not None else keys[0]
        prefix = self._prefix_of.get(start, self._prefix_of.get(keys[0], start))
        for key in keys:
            self._prefix_of[key] = prefix
            self._prefix_of.move_to_end(key)
        while len(self._prefix_of) > REMEMBERED_KEYS_MAX:
            self._prefix_of.popitem(last=False)
        return prefix


def transport_to(endpoints: Sequence[str], token: str | None, ca_file: str | None, options: ClientOptions) -> Transport:
    """The transport to one gateway, or to several as one. Raises `FormatError` and `RequestRefused`."""
    if not endpoints:
        raise FormatError("connect needs at least one endpoint")
    parsed = [parse_endpoint(text) for text in endpoints]
    encrypted = any(isinstance(endpoint, TcpEndpoint) and endpoint.encrypted for endpoint in parsed)
    context = client_context(ca_file) if encrypted else None
    windows = HeldWindows() if options.shared_memory else None
    members = [
        (str(one), SocketTransport(one, token, tls=context, connections=options.connections, windows=windows))
        for one in parsed
    ]
    if len(members) == 1:
        return members[0][1]
    return FleetTransport(members, options.breaker, SystemClock(), SystemRng())
