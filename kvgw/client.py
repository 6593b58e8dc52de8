"""The client: what an engine calls. Async, bounded in time, and never in the way.

Reads fail open: when the gateway cannot answer before the deadline, `match` matches nothing and `get` hits nothing,
with `Outcome.OUTAGE` and a reason in the answer; ``on_error="raise"`` raises `Outage` instead. `put` and `touch` fail
open likewise. `delete`, `stat` and `register` never do: success means done, anything else raises. What can never
succeed (a buffer of the wrong length, a format that is not registered, no permission) always raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Literal, TypeVar

from kvgw.breaker import Breaker, BreakerOptions, BreakerState
from kvgw.checks import (
    as_bytes,
    check_buffers,
    check_counts,
    check_keys,
    deadline,
    milliseconds,
    one_namespace,
    writable,
)
from kvgw.endpoint import TcpEndpoint, parse_endpoint
from kvgw.errors import Code, FormatError, KvgwError, Outage, RequestRefused
from kvgw.fleet import FleetTransport
from kvgw.kvformat import KVFormat
from kvgw.model import (
    DeleteReply,
    DeleteRequest,
    Durability,
    GetRequest,
    Label,
    MatchReply,
    MatchRequest,
    Outcome,
    PutOutcome,
    PutRequest,
    RegisterReply,
    RegisterRequest,
    StatReply,
    StatRequest,
    TouchReply,
    TouchRequest,
)
from kvgw.reports import GetReport, Match, PutReport, Registered, Touched
from kvgw.runtime import Clock, Rng, SystemClock, SystemRng
from kvgw.tls import client_context
from kvgw.transport import SocketTransport, Transport

GATEWAY_SHARE: Final = 0.95
"""Part of a call's time that the gateway may use."""

Result = TypeVar("Result")
OnError = Literal["miss", "raise"]
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How a client behaves. Deadlines are in seconds and hold for a call as a whole."""

    namespace: str = ""
    """Empty: the credential's default namespace."""
    read_deadline_s: float = 10.0
    write_deadline_s: float = 30.0
    on_error: OnError = "miss"
    breaker: BreakerOptions = field(default_factory=BreakerOptions)


class Client:
    """A connection to a gateway, over any transport. Safe for concurrent use by the tasks of one event loop."""

    def __init__(
        self,
        transport: Transport,
        options: ClientOptions | None = None,
        *,
        clock: Clock | None = None,
        rng: Rng | None = None,
    ) -> None:
        self._transport = transport
        self._options = options or ClientOptions()
        self._breaker = Breaker(self._options.breaker, clock or SystemClock(), rng or SystemRng())

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections; a second call does nothing."""
        await self._transport.aclose()

    @property
    def breaker(self) -> BreakerState:
        """Whether calls go to the gateway (closed) or are answered as outages here."""
        return self._breaker.state

    async def register(self, kv_format: KVFormat, *, deadline_s: float | None = None) -> Registered:
        """Make a KV format known. Raises `RequestRefused` or `Outage`."""
        limit = self._limit(deadline_s, self._options.write_deadline_s)
        request = RegisterRequest(kv_format.canonical(), self._options.namespace, _gateway_ms(limit))
        reply = await self._call(limit, lambda: self._transport.ask(request, RegisterReply))
        if reply.chunk_bytes != kv_format.chunk_bytes:
            raise RequestRefused(
                f"the gateway computes {reply.chunk_bytes} bytes per chunk for this format, this client "
                f"{kv_format.chunk_bytes}; bring both to releases that agree"
            )
        return Registered(kv_format, self._options.namespace, reply.fingerprint)

    async def match(
        self,
        formats: Registered | Sequence[Registered],
        keys: Sequence[bytes],
        *,
        lease_ms: int = 0,
        deadline_s: float | None = None,
        on_error: OnError | None = None,
    ) -> Match:
        """Length of the leading run of `keys` that can be had in every one of `formats`."""
        chosen = [formats] if isinstance(formats, Registered) else list(formats)
        namespace = one_namespace(chosen)
        limit = self._limit(deadline_s, self._options.read_deadline_s)
        request = MatchRequest(
            [one.fingerprint for one in chosen], check_keys(keys), namespace, lease_ms, _gateway_ms(limit)
        )
        try:
            reply = await self._call(limit, lambda: self._transport.ask(request, MatchReply))
        except Outage as error:
            self._maybe_raise(error, on_error)
            return Match(0, (), Outcome.OUTAGE, str(error))
        return Match(reply.matched, tuple(reply.tiers), reason=reply.reason)

    async def get(
        self,
        registered: Registered,
        keys: Sequence[bytes],
        into: Sequence[bytearray | memoryview],
        *,
        deadline_s: float | None = None,
        on_error: OnError | None = None,
    ) -> GetReport:
        """Read chunks into buffers of exactly ``registered.chunk_bytes`` bytes, one for each key.

        Raises `FormatError` before a byte moves when a buffer has another length.
        """
        buffers = [writable(buffer, index) for index, buffer in enumerate(into)]
        check_counts(keys, buffers, "buffers")
        check_buffers(buffers, registered.chunk_bytes, "buffer")
        limit = self._limit(deadline_s, self._options.read_deadline_s)
        request = GetRequest(registered.fingerprint, check_keys(keys), registered.namespace, _gateway_ms(limit))
        try:
            reply = await self._call(limit, lambda: self._transport.get(request, buffers))
        except Outage as error:
            self._maybe_raise(error, on_error)
            return GetReport((), Outcome.OUTAGE, str(error))
        if reply.degraded and len(reply.hits) < len(buffers):
            self._maybe_raise(Outage(reply.degraded), on_error)
            return GetReport(tuple(reply.hits), Outcome.OUTAGE, reply.degraded)
        return GetReport(tuple(reply.hits))

    async def put(
        self,
        registered: Registered,
        keys: Sequence[bytes],
        chunks: Sequence[Buffer],
        *,
        parent: bytes | None = None,
        depth: int = 0,
        ttl_s: float | None = None,
        durability: Durability | None = None,
        labels: Sequence[Label] = (),
        deadline_s: float | None = None,
        on_error: OnError | None = None,
    ) -> PutReport:
        """Store chunks as a chain: each key's parent is the one before it, the first's is `parent` at `depth` - 1.

        Only chunks that the gateway lacks travel. Raises `FormatError` when a chunk has not exactly
        ``registered.chunk_bytes`` bytes.
        """
        payloads = [as_bytes(chunk, f"chunk {index}") for index, chunk in enumerate(chunks)]
        check_counts(keys, payloads, "chunks")
        check_buffers(payloads, registered.chunk_bytes, "chunk")
        limit = self._limit(deadline_s, self._options.write_deadline_s)
        request = PutRequest(
            registered.fingerprint,
            check_keys(keys),
            parent,
            depth,
            registered.namespace,
            None if ttl_s is None else milliseconds(ttl_s),
            durability,
            list(labels),
            _gateway_ms(limit),
        )
        try:
            reply = await self._call(limit, lambda: self._transport.put(request, payloads))
        except Outage as error:
            self._maybe_raise(error, on_error)
            return PutReport((PutOutcome.FAILED,) * len(payloads), 0, Outcome.OUTAGE, str(error))
        return PutReport(tuple(reply.outcomes), reply.expires_ms, reason=reply.reason)

    async def touch(
        self,
        registered: Registered,
        keys: Sequence[bytes],
        *,
        ttl_s: float | None = None,
        deadline_s: float | None = None,
        on_error: OnError | None = None,
    ) -> Touched:
        """Extend the life of entries to now plus `ttl_s` (None: each entry's own TTL), never shortening it."""
        limit = self._limit(deadline_s, self._options.read_deadline_s)
        ttl_ms = None if ttl_s is None else milliseconds(ttl_s)
        request = TouchRequest(
            registered.fingerprint, check_keys(keys), registered.namespace, ttl_ms, _gateway_ms(limit)
        )
        try:
            reply = await self._call(limit, lambda: self._transport.ask(request, TouchReply))
        except Outage as error:
            self._maybe_raise(error, on_error)
            return Touched(0, Outcome.OUTAGE, str(error))
        return Touched(reply.touched)

    async def delete(self, registered: Registered, keys: Sequence[bytes], *, deadline_s: float | None = None) -> int:
        """Make entries invisible at once, all or none of them; how many there were. Raises `Outage` when unsure."""
        limit = self._limit(deadline_s, self._options.write_deadline_s)
        request = DeleteRequest(registered.fingerprint, check_keys(keys), registered.namespace, _gateway_ms(limit))
        reply = await self._call(limit, lambda: self._transport.ask(request, DeleteReply))
        return reply.deleted

    async def stat(self, *, deadline_s: float | None = None) -> StatReply:
        """Usage of the namespace. Raises `RequestRefused` or `Outage`."""
        limit = self._limit(deadline_s, self._options.read_deadline_s)
        request = StatRequest(self._options.namespace, _gateway_ms(limit))
        return await self._call(limit, lambda: self._transport.ask(request, StatReply))

    async def _call(self, limit_s: float, send: Callable[[], Awaitable[Result]]) -> Result:
        """Make one call under its deadline and the breaker."""
        if not self._breaker.admit():
            raise Outage("the gateway did not answer before; it is tried again shortly", Code.UNAVAILABLE)
        try:
            async with asyncio.timeout(limit_s):
                result = await send()
        except TimeoutError as error:
            self._breaker.failed()
            raise Outage(f"no answer within the deadline of {limit_s:g} s", Code.DEADLINE) from error
        except Outage as error:
            if error.answered:
                self._breaker.succeeded()
            else:
                self._breaker.failed()
            raise
        except KvgwError:
            self._breaker.succeeded()
            raise
        except BaseException:
            self._breaker.abandoned()
            raise
        self._breaker.succeeded()
        return result

    def _maybe_raise(self, error: Outage, on_error: OnError | None) -> None:
        if (on_error or self._options.on_error) == "raise":
            raise error

    @staticmethod
    def _limit(given: float | None, default: float) -> float:
        return deadline(default if given is None else given)


def _gateway_ms(limit_s: float) -> int:
    """The deadline that the gateway is told: a little before the client's, so that its reason still arrives in time."""
    return max(1, int(limit_s * 1000 * GATEWAY_SHARE))


def connect(
    endpoints: str | Sequence[str],
    *,
    token: str | None = None,
    ca_file: str | None = None,
    options: ClientOptions | None = None,
) -> Client:
    """A client of the gateway at ``unix:/path``, ``tls:host:port`` or ``tcp:host:port``; it connects on its first call.

    Of several gateways of one catalog, each prefix is served by one, and by the next when that one does not answer.
    Over a Unix socket the gateway's own user needs no token. `ca_file`: authorities for ``tls:``; None: the system's.
    """
    chosen = [endpoints] if isinstance(endpoints, str) else list(endpoints)
    if not chosen:
        raise FormatError("connect needs at least one endpoint")
    options = options or ClientOptions()
    parsed = [parse_endpoint(text) for text in chosen]
    encrypted = any(isinstance(endpoint, TcpEndpoint) and endpoint.encrypted for endpoint in parsed)
    context = client_context(ca_file) if encrypted else None
    members = [(str(endpoint), SocketTransport(endpoint, token, tls=context)) for endpoint in parsed]
    if len(members) == 1:
        return Client(members[0][1], options)
    return Client(FleetTransport(members, options.breaker, SystemClock(), SystemRng()), options)
