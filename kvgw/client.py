"""The client: what an engine calls. Async, bounded in time, and never in the way.

Reads fail open: when the gateway cannot answer before the deadline, `match` matches nothing and `get` hits nothing,
with `Outcome.OUTAGE` and a reason in the answer; ``on_error="raise"`` raises `Outage` instead. `put` and `touch` fail
open likewise. `delete`, `stat` and `register` never do: success means done, anything else raises. What can never
succeed (a buffer of the wrong length, a format that is not registered, no permission) always raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from kvgw.calls import Calls, ClientOptions, OnError, gateway_ms
from kvgw.checks import (
    as_bytes,
    check_buffers,
    check_counts,
    check_keys,
    check_references,
    life_ms,
    one_namespace,
    writable,
)
from kvgw.errors import Outage, RequestRefused
from kvgw.fleet import transport_to
from kvgw.kvformat import KVFormat
from kvgw.model import (
    DeleteReply,
    DeleteRequest,
    Durability,
    ExplainReply,
    ExplainRequest,
    GetRequest,
    HoldReply,
    HoldRequest,
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
    WaitRequest,
)
from kvgw.reports import GetReport, Match, PutReport, Registered, Touched

Buffer = bytes | bytearray | memoryview

__all__ = ["Client", "ClientOptions", "OnError", "connect"]


class Client(Calls):
    """A connection to a gateway, over any transport. Safe for concurrent use by the tasks of one event loop."""

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def register(self, kv_format: KVFormat, *, deadline_s: float | None = None) -> Registered:
        """Make a KV format known. Raises `RequestRefused` or `Outage`."""
        limit = self._limit(deadline_s, self._options.write_deadline_s)
        request = RegisterRequest(kv_format.canonical(), self._options.namespace, gateway_ms(limit))
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
        public: Sequence[str] = (),
        deadline_s: float | None = None,
        on_error: OnError | None = None,
    ) -> Match:
        """Length of the leading run of `keys` that can be had in every one of `formats`.

        `public`: namespaces of others, as ``tenant/namespace``, that are asked for what this one lacks.
        """
        chosen = [formats] if isinstance(formats, Registered) else list(formats)
        namespace = one_namespace(chosen)
        limit = self._limit(deadline_s, self._options.read_deadline_s)
        request = MatchRequest(
            [one.fingerprint for one in chosen],
            check_keys(keys),
            namespace,
            lease_ms,
            gateway_ms(limit),
            check_references(public),
        )
        try:
            reply = await self._call(limit, lambda: self._transport.ask(request, MatchReply))
        except Outage as error:
            self._maybe_raise(error, on_error)
            return Match(0, (), Outcome.OUTAGE, str(error))
        return _as_match(reply, chosen[0])

    async def wait(
        self,
        formats: Registered | Sequence[Registered],
        keys: Sequence[bytes],
        *,
        deadline_s: float,
        lease_ms: int = 0,
        on_error: OnError | None = None,
    ) -> Match:
        """`match`, answered when all of `keys` can be had or the deadline is over, whichever comes first.

        For whoever needs what another process is about to store. The gateway says so; nothing is polled from here.
        """
        chosen = [formats] if isinstance(formats, Registered) else list(formats)
        namespace = one_namespace(chosen)
        limit = self._limit(deadline_s, deadline_s)
        fingerprints = [one.fingerprint for one in chosen]
        request = WaitRequest(fingerprints, check_keys(keys), namespace, lease_ms, gateway_ms(limit))
        try:
            reply = await self._call(limit, lambda: self._transport.ask(request, MatchReply))
        except Outage as error:
            self._maybe_raise(error, on_error)
            return Match(0, (), Outcome.OUTAGE, str(error))
        return _as_match(reply, chosen[0])

    async def get(
        self,
        registered: Registered,
        keys: Sequence[bytes],
        into: Sequence[bytearray | memoryview],
        *,
        public: Sequence[str] = (),
        deadline_s: float | None = None,
        on_error: OnError | None = None,
    ) -> GetReport:
        """Read chunks into buffers of exactly ``registered.chunk_bytes`` bytes, one for each key.

        `public`: namespaces of others, as ``tenant/namespace``, that are asked for what this one lacks; each hit names
        the one that had it. Raises `FormatError` before a byte moves when a buffer has another length.
        """
        buffers = [writable(buffer, index) for index, buffer in enumerate(into)]
        check_counts(keys, buffers, "buffers")
        check_buffers(buffers, registered.chunk_bytes, "buffer")
        limit = self._limit(deadline_s, self._options.read_deadline_s)
        request = GetRequest(
            registered.fingerprint, check_keys(keys), registered.namespace, gateway_ms(limit), check_references(public)
        )
        try:
            reply = await self._call(limit, lambda: self._transport.get(request, buffers))
        except Outage as error:
            self._maybe_raise(error, on_error)
            return GetReport((), Outcome.OUTAGE, str(error))
        cached = len(reply.hits) * registered.kv_format.tokens_per_chunk
        if reply.degraded and len(reply.hits) < len(buffers):
            self._maybe_raise(Outage(reply.degraded), on_error)
            return GetReport(tuple(reply.hits), Outcome.OUTAGE, reply.degraded, cached)
        return GetReport(tuple(reply.hits), cached_tokens=cached)

    async def put(
        self,
        registered: Registered,
        keys: Sequence[bytes],
        chunks: Sequence[Buffer],
        *,
        parent: bytes | None = None,
        depth: int = 0,
        ttl: float | str | None = None,
        durability: Durability | None = None,
        labels: Sequence[Label] = (),
        chained: bool = True,
        deadline_s: float | None = None,
        on_error: OnError | None = None,
    ) -> PutReport:
        """Store chunks as a chain: each key's parent is the one before it, the first's is `parent` at `depth` - 1.

        `chained` false: what the keys follow is not known; a deletion by prefix that might miss them is refused.
        `ttl`: seconds, or a duration such as ``5m``, ``1h``, ``24h``; None: the namespace's. Only chunks that the
        gateway lacks travel. Raises `FormatError` when a chunk has not exactly ``registered.chunk_bytes`` bytes.
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
            None if ttl is None else life_ms(ttl),
            durability,
            list(labels),
            gateway_ms(limit),
            chained,
        )
        try:
            reply = await self._call(limit, lambda: self._transport.put(request, payloads))
        except Outage as error:
            self._maybe_raise(error, on_error)
            return PutReport((PutOutcome.FAILED,) * len(payloads), 0, Outcome.OUTAGE, str(error))
        created = reply.outcomes.count(PutOutcome.STORED) * registered.kv_format.tokens_per_chunk
        return PutReport(tuple(reply.outcomes), reply.expires_ms, reason=reply.reason, created_tokens=created)

    async def touch(
        self,
        registered: Registered,
        keys: Sequence[bytes],
        *,
        ttl: float | str | None = None,
        deadline_s: float | None = None,
        on_error: OnError | None = None,
    ) -> Touched:
        """Extend the life of entries to now plus `ttl` (None: each entry's own TTL), never shortening it."""
        limit = self._limit(deadline_s, self._options.read_deadline_s)
        ttl_ms = None if ttl is None else life_ms(ttl)
        request = TouchRequest(
            registered.fingerprint, check_keys(keys), registered.namespace, ttl_ms, gateway_ms(limit)
        )
        try:
            reply = await self._call(limit, lambda: self._transport.ask(request, TouchReply))
        except Outage as error:
            self._maybe_raise(error, on_error)
            return Touched(0, Outcome.OUTAGE, str(error))
        return Touched(reply.touched)

    async def hold(
        self,
        registered: Registered,
        keys: Sequence[bytes],
        duration: float | str | None,
        *,
        deadline_s: float | None = None,
    ) -> int:
        """Keep entries from eviction (for seconds, or ``30m``); None ends their hold. How many leading ones are held.

        It defers neither expiry nor deletion. Fewer than asked for: the namespace's hold quota is used, or a key is
        not there. Raises `RequestRefused` or `Outage`: success means held.
        """
        limit = self._limit(deadline_s, self._options.write_deadline_s)
        hold_ms = 0 if duration is None else life_ms(duration)
        request = HoldRequest(
            registered.fingerprint, check_keys(keys), hold_ms, registered.namespace, gateway_ms(limit)
        )
        return (await self._call(limit, lambda: self._transport.ask(request, HoldReply))).held

    async def delete(self, registered: Registered, keys: Sequence[bytes], *, deadline_s: float | None = None) -> int:
        """Make entries invisible at once, all or none of them; how many there were. Raises `Outage` when unsure."""
        limit = self._limit(deadline_s, self._options.write_deadline_s)
        request = DeleteRequest(registered.fingerprint, check_keys(keys), registered.namespace, gateway_ms(limit))
        reply = await self._call(limit, lambda: self._transport.ask(request, DeleteReply))
        return reply.deleted

    async def explain(
        self, registered: Registered, keys: Sequence[bytes], *, deadline_s: float | None = None
    ) -> ExplainReply:
        """Why keys cannot be had, one answer for each. Raises `RequestRefused` or `Outage`."""
        limit = self._limit(deadline_s, self._options.read_deadline_s)
        form = registered.kv_format.canonical()
        request = ExplainRequest(check_keys(keys), form, None, registered.namespace, gateway_ms(limit))
        return await self._call(limit, lambda: self._transport.ask(request, ExplainReply))

    async def stat(self, *, deadline_s: float | None = None) -> StatReply:
        """Usage of the namespace. Raises `RequestRefused` or `Outage`."""
        limit = self._limit(deadline_s, self._options.read_deadline_s)
        request = StatRequest(self._options.namespace, gateway_ms(limit))
        return await self._call(limit, lambda: self._transport.ask(request, StatReply))


def _as_match(reply: MatchReply, registered: Registered) -> Match:
    return Match(
        reply.matched,
        tuple(reply.tiers),
        reason=reply.reason,
        namespaces=tuple(reply.namespaces),
        cached_tokens=reply.matched * registered.kv_format.tokens_per_chunk,
    )


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
    options = options or ClientOptions()
    return Client(transport_to(chosen, token, ca_file, options), options)
