"""The gateway: every verb of a client, as a caller's act on a namespace. The transports differ only in payload."""

from __future__ import annotations

from collections.abc import Sequence

from kvgw.errors import Code, FormatError, RequestRefused
from kvgw.gateway.admin import AdminVerbs, usage_of
from kvgw.gateway.directory import Directory, Place
from kvgw.gateway.get import STAGING, GetVerb
from kvgw.gateway.payloads import PayloadSink, PayloadSource
from kvgw.gateway.put import PutVerb
from kvgw.gateway.rooms import Rooms
from kvgw.gateway.translate import translated
from kvgw.kvformat import KVFormat
from kvgw.model import (
    DeleteReply,
    DeleteRequest,
    GetReply,
    GetRequest,
    MatchReply,
    MatchRequest,
    NamespaceCreateRequest,
    NamespacesRequest,
    PutReply,
    PutRequest,
    Question,
    RegisterReply,
    RegisterRequest,
    Reply,
    StatReply,
    StatRequest,
    StatusRequest,
    TouchReply,
    TouchRequest,
)
from storage.tier import blob_name
from tenancy.access import Caller, Permission
from tenancy.errors import CatalogUnavailable, FormatUnknown
from tenancy.formats import FormatDescription
from tenancy.model import FoundChunk
from tenancy.naming import entry_keys, format_fingerprint


class Gateway:
    """Match, put, get, touch, delete, stat and register. Raises `KvgwError` only."""

    def __init__(self, rooms: Rooms, directory: Directory, admin: AdminVerbs) -> None:
        self._rooms = rooms
        self._directory = directory
        self._admin = admin
        self._put = PutVerb(rooms, directory)
        self._get = GetVerb(rooms, directory)

    async def ready(self) -> bool:
        """Whether this gateway can serve: its catalog answers."""
        try:
            await self._rooms.catalog.high_water_ms()
        except CatalogUnavailable:
            return False
        return True

    async def answer(self, caller: Caller, request: Question) -> Reply:
        """Answer a request that has no payload."""
        with self._rooms.metrics.measured(request), translated():
            match request:
                case MatchRequest():
                    return await self._match(caller, request)
                case RegisterRequest():
                    return await self._register(caller, request)
                case TouchRequest():
                    return await self._touch(caller, request)
                case DeleteRequest():
                    return await self._delete(caller, request)
                case StatRequest():
                    return await self._stat(caller, request)
                case StatusRequest():
                    return await self._admin.status(caller)
                case NamespaceCreateRequest():
                    return await self._admin.create_namespace(caller, request)
                case NamespacesRequest():
                    return await self._admin.namespaces(caller)

    async def put(self, caller: Caller, request: PutRequest, source: PayloadSource) -> PutReply:
        """Store chunks whose payload comes from `source`."""
        _check_distinct(request.keys)
        with self._rooms.metrics.measured(request), translated():
            return await self._put(caller, request, source)

    async def get(self, caller: Caller, request: GetRequest, sink: PayloadSink) -> GetReply:
        """Read chunks into `sink`."""
        _check_distinct(request.keys)
        with self._rooms.metrics.measured(request), translated():
            return await self._get(caller, request, sink)

    async def _register(self, caller: Caller, request: RegisterRequest) -> RegisterReply:
        caller.require(Permission.PUT)
        place = await self._directory.place(caller, request.namespace)
        kv_format = KVFormat.from_canonical(request.canonical)
        fingerprint = format_fingerprint(place.keys.names.fingerprint, request.canonical)
        description = describe(kv_format, fingerprint, request.canonical)
        known = await self._rooms.catalog.register_format(place.scope, description, self._rooms.time.now_ms())
        if known is None:
            raise RequestRefused("the namespace has too many KV formats; delete some that are not used any more")
        self._directory.remember(place.scope, known)
        return RegisterReply(fingerprint, known.chunk_bytes, place.namespace.default_ttl_ms)

    async def _match(self, caller: Caller, request: MatchRequest) -> MatchReply:
        caller.require(Permission.GET)
        place = await self._directory.place(caller, request.namespace)
        try:
            formats = [await self._directory.format(place.scope, one) for one in request.fingerprints]
        except FormatUnknown:
            # Ranks of an engine start in any order: one that is early matches nothing, and is told why.
            return MatchReply(0, [], "a KV format of this match is not registered in the namespace")
        names = [entry_keys(place.keys.names.entry, one.fingerprint, request.keys) for one in formats]
        found = await self._rooms.catalog.lookup(
            place.scope,
            [one.format_id for one in formats],
            [key for keys in names for key in keys],
            self._rooms.time.now_ms(),
        )
        count = min(_leading_run(keys, found) for keys in names)
        if request.lease_ms:
            leased = (found[key].blob_id for keys in names for key in keys[:count])
            self._rooms.leases.take(place.scope.tenant, leased, request.lease_ms)
        self._rooms.metrics.match_keys.labels("hit").inc(count)
        self._rooms.metrics.match_keys.labels("miss").inc(len(request.keys) - count)
        return MatchReply(count, [self._fastest(place, found[key]) for key in names[0][:count]])

    def _fastest(self, place: Place, found: FoundChunk) -> str:
        if self._rooms.staging.holds(blob_name(place.scope.namespace, found.blob_id)):
            return STAGING
        return "nvme" if found.on_nvme else "s3"

    async def _touch(self, caller: Caller, request: TouchRequest) -> TouchReply:
        caller.require(Permission.GET)
        place = await self._directory.place(caller, request.namespace)
        kv_format = await self._directory.format(place.scope, request.fingerprint)
        keys = entry_keys(place.keys.names.entry, kv_format.fingerprint, request.keys)
        ttl_ms = None if request.ttl_ms is None else min(request.ttl_ms, place.namespace.max_ttl_ms)
        now_ms = self._rooms.time.now_ms()
        return TouchReply(await self._rooms.catalog.extend(place.scope, kv_format.format_id, keys, ttl_ms, now_ms))

    async def _delete(self, caller: Caller, request: DeleteRequest) -> DeleteReply:
        caller.require(Permission.DELETE)
        place = await self._directory.place(caller, request.namespace)
        kv_format = await self._directory.format(place.scope, request.fingerprint)
        keys = entry_keys(place.keys.names.entry, kv_format.fingerprint, request.keys)
        count, dead, generation = await self._rooms.catalog.delete_for_good(
            place.scope, kv_format.format_id, keys, self._rooms.time.now_ms()
        )
        for blob_id in dead:
            self._rooms.staging.drop(blob_name(place.scope.namespace, blob_id))
        if dead:
            self._rooms.backlog.note_dead(place.scope)
        # Before it is acknowledged: from now on an older copy of the catalog, which still lists the chunks, is refused.
        await self._rooms.keyring.advance(generation)
        return DeleteReply(count)

    async def _stat(self, caller: Caller, request: StatRequest) -> StatReply:
        caller.require(Permission.READ)
        place = await self._directory.place(caller, request.namespace)
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


def _leading_run(keys: Sequence[bytes], found: dict[bytes, FoundChunk]) -> int:
    for index, key in enumerate(keys):
        if key not in found:
            return index
    return len(keys)


def _check_distinct(keys: Sequence[bytes]) -> None:
    seen: dict[bytes, int] = {}
    for index, key in enumerate(keys):
        if key in seen:
            raise FormatError(f"key {index} repeats key {seen[key]}; name each chunk once", Code.BAD_REQUEST)
        seen[key] = index
