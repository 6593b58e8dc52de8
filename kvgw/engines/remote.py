"""The gateway as an adapter sees it: one client per tenant, formats registered when first used, nothing raised.

Everything here runs in one event loop. A call ends by an absolute instant of the clock, `until`; what could not be had
is a miss, with its reason counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvgw.breaker import BreakerOptions
from kvgw.client import Buffer, Client, ClientOptions, connect
from kvgw.engines.counters import Counters
from kvgw.engines.options import EngineOptions
from kvgw.engines.tenants import TenantMap
from kvgw.errors import Code, KvgwError, Outage, RequestRefused
from kvgw.kvformat import KVFormat
from kvgw.model import KEYS_MAX, Outcome
from kvgw.reports import PutReport, Registered
from kvgw.runtime import Clock
from kvgw.transport import CONNECTIONS_DEFAULT

_PERIOD_MAX_S: Final = 5.0
"""A gateway that is back is noticed after so long at the latest."""


@dataclass(frozen=True, slots=True)
class Found:
    """How many leading chunks can be had. `answered`: the gateway said so; otherwise it is not known."""

    count: int
    answered: bool


class Remote:
    """Reads and writes chunks of many tenants. Owned by one event loop."""

    def __init__(
        self,
        options: EngineOptions,
        tenants: TenantMap,
        counters: Counters,
        clock: Clock,
        *,
        connections: int = CONNECTIONS_DEFAULT,
    ) -> None:
        """`connections`: of each tenant to each gateway, and so many calls at once."""
        self._options = options
        self._connections = connections
        self._tenants = tenants
        self._counters = counters
        self._clock = clock
        self._clients: dict[str, Client] = {}
        self._registered: dict[tuple[str, bytes], Registered] = {}

    async def match(
        self,
        tenant: str,
        formats: Sequence[KVFormat],
        keys: Sequence[bytes],
        until: float,
        *,
        public: bool = False,
        wait: bool = False,
    ) -> Found:
        """The leading run of `keys` that every one of `formats` has, shielded for the time of the lease.

        `public`: the public namespaces of the map are asked for what the tenant's own lacks; nothing shields that.
        `wait`: for all of `keys` until the deadline, in the tenant's own namespace.
        """
        count = 0
        try:
            client = self._client(tenant)
            registered = [await self._register(client, tenant, one, until) for one in formats]
            for start in range(0, len(keys), KEYS_MAX):
                page = keys[start : start + KEYS_MAX]
                lease_ms = int(self._options.lease_s * 1000)
                left = self._left(until)
                if wait:
                    match = await client.wait(registered, page, lease_ms=lease_ms, deadline_s=left)
                else:
                    match = await client.match(
                        registered, page, lease_ms=lease_ms, public=self._public(public), deadline_s=left
                    )
                if match.outcome is Outcome.OUTAGE:
                    self._counters.reason("lookup_outages", match.reason)
                    return Found(0, answered=False)
                count += match.count
                if match.count < len(page):
                    if match.reason:
                        self._counters.reason("lookups_cut_short", match.reason)
                        self._forget(tenant)
                    break
        except KvgwError as error:
            await self._failed(tenant, "lookup_outages", error)
            return Found(0, answered=False)
        return Found(count, answered=True)

    async def get(
        self,
        tenant: str,
        kv_format: KVFormat,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        until: float,
        *,
        public: bool = False,
    ) -> int:
        """Read chunks into buffers of exactly ``chunk_bytes`` bytes; how many leading ones hold their chunk now."""
        try:
            client = self._client(tenant)
            registered = await self._register(client, tenant, kv_format, until)
            report = await client.get(registered, keys, into, public=self._public(public), deadline_s=self._left(until))
        except KvgwError as error:
            await self._failed(tenant, "load_outages", error)
            return 0
        if report.outcome is Outcome.OUTAGE:
            self._counters.reason("load_outages", report.reason)
        elif report.leading < len(keys):
            self._counters.add("chunks_lost", len(keys) - report.leading)
        return report.leading

    async def put(
        self,
        tenant: str,
        kv_format: KVFormat,
        keys: Sequence[bytes],
        chunks: Sequence[Buffer],
        *,
        parent: bytes | None,
        depth: int,
        until: float,
    ) -> int:
        """Store chunks as a chain behind `parent`; how many leading ones the gateway has now."""
        try:
            client = self._client(tenant)
            registered = await self._register(client, tenant, kv_format, until)
            report = await client.put(
                registered, keys, chunks, parent=parent, depth=depth, deadline_s=self._left(until)
            )
        except KvgwError as error:
            await self._failed(tenant, "store_outages", error)
            return 0
        self._not_taken(report, len(keys) - report.stored)
        return report.stored

    async def aclose(self) -> None:
        """Close every connection."""
        clients = list(self._clients.values())
        self._clients.clear()
        self._registered.clear()
        for client in clients:
            await client.aclose()

    def _not_taken(self, report: PutReport, count: int) -> None:
        if count:
            name = "store_outages" if report.outcome is Outcome.OUTAGE else "chunks_refused"
            self._counters.reason(name, report.reason or "the gateway did not take a chunk", count)

    def _public(self, wanted: bool) -> tuple[str, ...]:
        return self._tenants.public if wanted else ()

    def _client(self, tenant: str) -> Client:
        if tenant not in self._clients:
            credential = self._tenants.credential(tenant)
            self._clients[tenant] = connect(
                self._options.endpoints,
                token=credential.token(),
                ca_file=self._options.ca_file,
                options=ClientOptions(
                    namespace=credential.namespace,
                    breaker=BreakerOptions(period_max_s=_PERIOD_MAX_S),
                    connections=self._connections,
                    shared_memory=self._options.shared_memory,
                ),
            )
        return self._clients[tenant]

    async def _register(self, client: Client, tenant: str, kv_format: KVFormat, until: float) -> Registered:
        name = tenant, kv_format.canonical()
        known = self._registered.get(name)
        if known is None:
            known = await client.register(kv_format, deadline_s=self._left(until))
            self._registered[name] = known
        return known

    def _left(self, until: float) -> float:
        """Seconds until the deadline. Raises `Outage` when none are left."""
        left = until - self._clock.monotonic()
        if left < 0.001:
            raise Outage("the deadline of the whole operation is over", Code.DEADLINE)
        return left

    async def _failed(self, tenant: str, name: str, error: KvgwError) -> None:
        """Count the reason; after a refusal the next call registers anew, and reads the token anew if that was it."""
        self._counters.reason(name, str(error))
        if isinstance(error, RequestRefused):
            self._forget(tenant)
            client = self._clients.pop(tenant, None) if error.code is Code.UNAUTHENTICATED else None
            if client is not None:
                await client.aclose()

    def _forget(self, tenant: str) -> None:
        for name in [name for name in self._registered if name[0] == tenant]:
            del self._registered[name]
