"""The gateway: every verb of a client, as a caller's act on a namespace. The transports differ only in payload."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeAlias, TypeGuard, TypeVar

from kvgw.errors import Code, FormatError, Outage, RequestRefused
from kvgw.gateway.admin import AdminVerbs, usage_of
from kvgw.gateway.directory import Directory, Place
from kvgw.gateway.explain import explain
from kvgw.gateway.get import GetVerb
from kvgw.gateway.limiter import ASKING_PART, READING_PART, WRITING_PART
from kvgw.gateway.match import MatchVerb
from kvgw.gateway.nodes import forget_node
from kvgw.gateway.payloads import PayloadSink, PayloadSource
from kvgw.gateway.put import PutVerb
from kvgw.gateway.rooms import Rooms
from kvgw.gateway.translate import translated
from kvgw.gateway.wait import WaitVerb
from kvgw.kvformat import KVFormat
from kvgw.metrics import OK
from kvgw.model import (
    DeleteReply,
    DeleteRequest,
    ExplainRequest,
    GetReply,
    GetRequest,
    HoldReply,
    HoldRequest,
    MatchRequest,
    NamespaceCreateRequest,
    NamespacesRequest,
    NodeForgetRequest,
    PutOutcome,
    PutReply,
    PutRequest,
    Question,
    RegisterReply,
    RegisterRequest,
    Reply,
    Request,
    StatReply,
    StatRequest,
    StatusRequest,
    TouchReply,
    TouchRequest,
    WaitRequest,
)
from storage.lending import Loan
from storage.tier import blob_name
from tenancy.access import Caller, Permission
from tenancy.audit.chain import Act
from tenancy.errors import CatalogUnavailable
from tenancy.formats import FormatDescription
from tenancy.naming import entry_keys, format_fingerprint

Asked = TypeVar(
    "Asked", MatchRequest, WaitRequest, RegisterRequest, TouchRequest, HoldRequest, DeleteRequest, StatRequest
)
_Limited: TypeAlias = (
    MatchRequest
    | WaitRequest
    | RegisterRequest
    | TouchRequest
    | HoldRequest
    | DeleteRequest
    | StatRequest
    | GetRequest
    | PutRequest
)
Answered = TypeVar("Answered")

_PARTS: Final[Mapping[type[Request], float]] = {
    MatchRequest: ASKING_PART,
    WaitRequest: ASKING_PART,
    RegisterRequest: ASKING_PART,
    TouchRequest: ASKING_PART,
    HoldRequest: ASKING_PART,
    StatRequest: ASKING_PART,
    PutRequest: WRITING_PART,
    GetRequest: READING_PART,
    DeleteRequest: READING_PART,  # nobody's data stays for a crowd
}
"""How large a crowd may be before a request is turned away."""

_UNLIMITED: Final = frozenset(
    (StatusRequest, NamespaceCreateRequest, NamespacesRequest, ExplainRequest, NodeForgetRequest)
)
"""An operator's, which are never turned away."""


class Gateway:
    """Match, put, get, touch, delete, stat and register. Raises `KvgwError` only."""

    def __init__(self, rooms: Rooms, directory: Directory, admin: AdminVerbs) -> None:
        self._rooms = rooms
        self._directory = directory
        self._admin = admin
        self._match = MatchVerb(rooms, directory)
        self._wait = WaitVerb(rooms, directory, self._match)
        self._put = PutVerb(rooms, directory)
        self._get = GetVerb(rooms, directory)
        self.meter = rooms.meter
        """What is counted for the audit log; those who are not known are counted by who turns them away."""

    @property
    def lends(self) -> bool:
        """Whether clients of this host may have shared windows."""
        return self._rooms.lending.enabled

    async def lend(self, caller: Caller, least: int, most: int) -> Loan | None:
        """A window of so many bytes for one connection of the caller's; None: it sends its bytes another way."""
        loan = await self._rooms.lending.lend(caller.tenant, least, most)
        self._rooms.metrics.shared_windows.labels("refused" if loan is None else "lent").inc()
        return loan

    async def take_back(self, loan: Loan) -> None:
        """The connection has ended, or wants another window."""
        await self._rooms.lending.give_back(loan)

    async def ready(self) -> bool:
        """Whether this gateway can serve: its catalog answers."""
        try:
            await self._rooms.catalog.high_water_ms()
        except CatalogUnavailable:
            return False
        return True

    def turned_away(self, caller: Caller, request: Request) -> Outage | None:
        """Why a request is not served in this crowd, if that is known without any work; None: ask for it in earnest."""
        if not _is_limited(request):
            return None
        namespace = self._directory.remembered(caller, request.namespace)
        refusal = None if namespace is None else self._rooms.limiter.turned_away(namespace, _PARTS[type(request)])
        if refusal is not None:
            self._rooms.metrics.turned_away(type(request), refusal.code.value)
        return refusal

    def at_once(self, caller: Caller, request: Request) -> Reply | None:
        """The answer to a question, if nothing has to be asked or waited for; None: `answer` it, nothing was done.

        It looks at all that `answer` looks at, and as nothing can happen in between, it needs no deadline and no place.
        """
        if not isinstance(request, MatchRequest) or not self._rooms.turns.has_room:
            return None
        rooms, began = self._rooms, time.perf_counter()
        namespace = self._directory.at_hand(caller, request.namespace)
        reply = None if namespace is None else self._match.at_once(caller, namespace, request)
        if namespace is None or reply is None:
            return None
        with rooms.limiter.admitted(namespace, ASKING_PART):
            rooms.turns.done_at_once(caller.tenant)
        rooms.metrics.answered(MatchRequest, OK, time.perf_counter() - began)
        return reply

    async def answer(self, caller: Caller, request: Question) -> Reply:
        """Answer a request that has no payload."""
        with self._rooms.metrics.measured(request), translated():
            match request:
                case MatchRequest():
                    return await self._limited(caller, request, self._match)
                case WaitRequest():
                    return await self._limited(caller, request, self._wait)
                case RegisterRequest():
                    return await self._limited(caller, request, self._register)
                case TouchRequest():
                    return await self._limited(caller, request, self._touch)
                case HoldRequest():
                    return await self._limited(caller, request, self._hold)
                case DeleteRequest():
                    return await self._limited(caller, request, self._delete)
                case StatRequest():
                    return await self._limited(caller, request, self._stat)
                case StatusRequest():
                    return await self._admin.status(caller)
                case NamespaceCreateRequest():
                    return await self._admin.create_namespace(caller, request)
                case NamespacesRequest():
                    return await self._admin.namespaces(caller)
                case ExplainRequest():
                    return await explain(self._rooms, caller, request)
                case NodeForgetRequest():
                    return await forget_node(self._rooms, caller, request)

    async def put(self, caller: Caller, request: PutRequest, source: PayloadSource) -> PutReply:
        """Store chunks whose payload comes from `source`."""
        _check_distinct(request.keys)
        with self._rooms.metrics.measured(request), translated(), self._rooms.outbox.putting():
            place = await self._directory.place(caller, request.namespace)
            with self._rooms.limiter.admitted(place.namespace, WRITING_PART) as admission:
                async with self._rooms.turns.of(caller.tenant):
                    reply = await self._put(caller, request, source)
                stored = reply.outcomes.count(PutOutcome.STORED)
                admission.moved_bytes = stored * await self._chunk_bytes(place, request.fingerprint)
                return reply

    async def get(self, caller: Caller, request: GetRequest, sink: PayloadSink) -> GetReply:
        """Read chunks into `sink`."""
        _check_distinct(request.keys)
        with self._rooms.metrics.measured(request), translated():
            place = await self._directory.place(caller, request.namespace)
            with self._rooms.limiter.admitted(place.namespace, READING_PART) as admission:
                async with self._rooms.turns.of(caller.tenant):
                    reply = await self._get(caller, request, sink)
                admission.moved_bytes = len(reply.hits) * await self._chunk_bytes(place, request.fingerprint)
                return reply

    async def _limited(
        self, caller: Caller, request: Asked, verb: Callable[[Caller, Place, Asked], Awaitable[Answered]]
    ) -> Answered:
        """Answer a small request within the limits of its namespace."""
        place = await self._directory.place(caller, request.namespace)
        with self._rooms.limiter.admitted(place.namespace, _PARTS[type(request)]):
            async with self._rooms.turns.of(caller.tenant):
                return await verb(caller, place, request)

    async def _chunk_bytes(self, place: Place, fingerprint: bytes) -> int:
        return (await self._directory.format(place.scope, fingerprint)).chunk_bytes

    async def _register(self, caller: Caller, place: Place, request: RegisterRequest) -> RegisterReply:
        caller.require(Permission.PUT)
        kv_format = KVFormat.from_canonical(request.canonical)
        fingerprint = format_fingerprint(place.keys.names.fingerprint, request.canonical)
        known = self._directory.known_format(place.scope, fingerprint)
        if known is None:
            description = describe(kv_format, fingerprint, request.canonical)
            known = await self._rooms.catalog.register_format(place.scope, description, self._rooms.time.now_ms())
        if known is None:
            raise RequestRefused("the namespace has too many KV formats; delete some that are not used any more")
        self._directory.remember(place.scope, known)
        return RegisterReply(fingerprint, known.chunk_bytes, place.namespace.default_ttl_ms)

    async def _touch(self, caller: Caller, place: Place, request: TouchRequest) -> TouchReply:
        caller.require(Permission.GET)
        kv_format = await self._directory.format(place.scope, request.fingerprint)
        keys = entry_keys(place.keys.names.entry, kv_format.fingerprint, request.keys)
        ttl_ms = None if request.ttl_ms is None else min(request.ttl_ms, place.namespace.max_ttl_ms)
        now_ms = self._rooms.time.now_ms()
        count = await self._rooms.catalog.extend(place.scope, kv_format.format_id, keys, ttl_ms, now_ms)
        self._rooms.recent.forget(place.scope, keys)
        return TouchReply(count)

    async def _hold(self, caller: Caller, place: Place, request: HoldRequest) -> HoldReply:
        caller.require(Permission.PUT)
        kv_format = await self._directory.format(place.scope, request.fingerprint)
        keys = entry_keys(place.keys.names.entry, kv_format.fingerprint, request.keys)
        now_ms = self._rooms.time.now_ms()
        until_ms = now_ms + request.hold_ms
        held = await self._rooms.catalog.hold(place.scope, kv_format.format_id, keys, until_ms, now_ms)
        return HoldReply(held)

    async def _delete(self, caller: Caller, place: Place, request: DeleteRequest) -> DeleteReply:
        caller.require(Permission.DELETE)
        kv_format = await self._directory.format(place.scope, request.fingerprint)
        keys = entry_keys(place.keys.names.entry, kv_format.fingerprint, request.keys)
        act = Act(
            actor=caller.name,
            action="chunk.delete",
            tenant=place.scope.tenant,
            namespace=place.scope.namespace,
            detail={"asked": len(keys), "format": kv_format.format_id},  # how many, never which
        )
        count, dead, generation = await self._rooms.catalog.delete_for_good(
            place.scope, kv_format.format_id, keys, act, self._rooms.time.now_ms()
        )
        self._rooms.meter.deleted(place.scope, count)
        self._rooms.recent.drop(place.scope)
        for blob_id in dead:
            self._rooms.staging.drop(blob_name(place.scope.namespace, blob_id))
        if dead:
            self._rooms.backlog.note_dead(place.scope)
        # Before it is acknowledged: from now on an older copy of the catalog, which still lists the chunks, is refused.
        await self._rooms.keyring.advance(generation)
        return DeleteReply(count)

    async def _stat(self, caller: Caller, place: Place, request: StatRequest) -> StatReply:
        caller.require(Permission.READ)
        return await usage_of(self._rooms, place.namespace)


def describe(kv_format: KVFormat, fingerprint: bytes, canonical: bytes) -> FormatDescription:
    """The format as the catalog's typed columns have it; digests in hexadecimal."""
    return FormatDescription(
        fingerprint=fingerprint,
        canonical=canonical,
        model=kv_format.model,
        weights=_as_text(kv_format.weights),
        tokenizer=_as_text(kv_format.tokenizer),
        kv_dtype=kv_format.kv_dtype,
        kv_quantisation=kv_format.kv_quantisation,
        adapter=kv_format.adapter,
        adapter_digest=None if kv_format.adapter_digest is None else kv_format.adapter_digest.hex(),
        engine=kv_format.engine,
        engine_abi=kv_format.engine_abi,
        layout=kv_format.layout,
        tokens_per_chunk=kv_format.tokens_per_chunk,
        chunk_bytes=kv_format.chunk_bytes,
    )


def _as_text(identity: str | bytes) -> str:
    return identity if isinstance(identity, str) else identity.hex()


def _is_limited(request: Request) -> TypeGuard[_Limited]:
    return type(request) not in _UNLIMITED  # `isinstance` asks the class of each


def _check_distinct(keys: Sequence[bytes]) -> None:
    seen: dict[bytes, int] = {}
    for index, key in enumerate(keys):
        if key in seen:
            raise FormatError(f"key {index} repeats key {seen[key]}; name each chunk once", Code.BAD_REQUEST)
        seen[key] = index
