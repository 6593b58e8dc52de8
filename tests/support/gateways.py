"""Gateways for tests: small, in this process, reached embedded, over a Unix socket, or over TCP on loopback."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from msgspec.structs import replace as replace_fields

from kvgw.authenticate import token_row
from kvgw.client import Client, ClientOptions
from kvgw.embedded import EmbeddedTransport
from kvgw.endpoint import Endpoint, TcpEndpoint, UnixEndpoint
from kvgw.held import HeldWindows
from kvgw.kvformat import KVFormat, LayerGroup
from kvgw.maintenance.crew import Crew, Pace
from kvgw.model import NamespaceCreateRequest
from kvgw.reports import GetReport, Registered
from kvgw.runtime import Clock, SystemClock, SystemRng
from kvgw.server.connection import Connection
from kvgw.server.limits import Limits
from kvgw.server.listeners import listening
from kvgw.server.serve import serving
from kvgw.settings import NvmeSettings, ServerSettings, Settings, StagingSettings
from kvgw.transport import SocketTransport
from kvgw.wiring import Opened, World, opened
from tenancy import usage
from tenancy.access import Caller, Permission, new_token
from tenancy.catalog import Catalog
from tenancy.model import Namespace
from tenancy.sight import Sight
from tests.support.manual_clock import ManualClock

MIB = 1024 * 1024
YEAR_MS = 365 * 86_400_000

Kind = Literal["embedded", "unix", "shm", "tcp"]
"""``shm``: over the Unix socket, with payloads of every length in windows that the gateway lends."""

SMALL = Settings(
    server=ServerSettings(http=""),
    staging=StagingSettings(bytes=16 * MIB, tenants=2),
    nvme=NvmeSettings(capacity_bytes=256 * MIB, min_free_bytes=0),
)
"""A gateway that starts in a moment and listens on nothing but its socket."""


def format_of(chunk_bytes: int = 4096, **changes: Any) -> KVFormat:
    """A KV format whose chunks have `chunk_bytes` bytes (a multiple of 64) unless `changes` say otherwise."""
    assert chunk_bytes % 64 == 0
    plain = KVFormat(
        model="test/model",
        weights=b"w" * 32,
        tokenizer=b"t" * 32,
        kv_dtype="float16",
        kv_quantisation=None,
        adapter=None,
        adapter_digest=None,
        positions=("kind", "rope", "theta", 10000.0),
        attention=(LayerGroup("mha", 1, kv_heads=1, head_dim=chunk_bytes // 64),),
        layout="layer,kv,token,head,dim",
        tokens_per_chunk=16,
        engine="test",
        engine_abi="1",
        parallel=(1, 0, 1, 0, 1, 0),
        multimodal=None,
        extra=(),
    )
    return replace(plain, **changes)


def keys_of(count: int, name: str = "key") -> list[bytes]:
    return [f"{name}-{index}".encode() for index in range(count)]


def payloads_of(registered: Registered, count: int, seed: int = 0) -> list[bytes]:
    """Different content for each index and seed, of the format's length."""
    return [(b"%08d-%06d|" % (seed, index) * (registered.chunk_bytes // 16 + 1))[: registered.chunk_bytes]
            for index in range(count)]  # fmt: skip


def buffers_for(registered: Registered, count: int) -> list[bytearray]:
    return [bytearray(b"\xee" * registered.chunk_bytes) for _ in range(count)]


async def read(client: Client, registered: Registered, keys: Sequence[bytes]) -> tuple[GetReport, list[bytes | None]]:
    """The report, and for each key what was read or None."""
    buffers = buffers_for(registered, len(keys))
    report = await client.get(registered, keys, buffers)
    hits = {hit.index for hit in report.hits}
    return report, [bytes(buffer) if index in hits else None for index, buffer in enumerate(buffers)]


@dataclass
class House:
    """A gateway under test, and clients of it."""

    opened: Opened
    kind: Kind
    endpoint: Endpoint | None
    token: str
    clock: ManualClock | None = None
    _clients: list[Client] = field(default_factory=list)

    def client(self, namespace: str = "", *, token: str | None = None, **options: Any) -> Client:
        """A client over this house's transport."""
        transport: EmbeddedTransport | SocketTransport
        if self.endpoint is None:
            transport = EmbeddedTransport(self.opened.gateway, self.owner)
        else:
            given = token or (self.token if isinstance(self.endpoint, TcpEndpoint) else None)
            transport = SocketTransport(self.endpoint, given, windows=HeldWindows() if self.kind == "shm" else None)
        client = Client(transport, ClientOptions(namespace=namespace, **options))
        self._clients.append(client)
        return client

    def now_ms(self) -> int:
        """The catalog's time, which its rows are compared with."""
        return self.opened.rooms.time.now_ms()

    async def rows(self, statement: str) -> list[Any]:
        """What a statement finds among the rows of the first tenant, on any database."""
        return await self.opened.rooms.catalog._database.read(
            lambda connection: [tuple(row) for row in connection.exec_driver_sql(statement)], self._sight
        )

    async def wait(self, seconds: float) -> None:
        """Let time pass for a gateway on a manual clock, which says afterwards that it lives."""
        assert self.clock is not None
        self.clock.advance(seconds)
        await self.opened.crew.heartbeat()

    @property
    def owner(self) -> Caller:
        return self.opened.authenticator.owner()

    @property
    def _sight(self) -> Sight:
        return Sight(self.owner.tenant)

    async def namespace(self, name: str, **policy: Any) -> Namespace:
        """Make a namespace of the first tenant."""
        await self.opened.gateway.answer(self.owner, NamespaceCreateRequest(name, **policy))
        return await self.place(name)

    async def place(self, name: str = "default") -> Namespace:
        found = await self.opened.rooms.catalog.namespace(self.owner.tenant, name)
        assert found is not None
        return found

    async def new_token(
        self, permissions: frozenset[Permission] = frozenset(Permission), *, expires_ms: int | None = None
    ) -> tuple[str, str]:
        """A token of the first tenant: its text and its id."""
        rooms = self.opened.rooms
        token = new_token(rooms.rng.token)
        pepper = self.opened.authenticator._pepper
        until = rooms.time.now_ms() + YEAR_MS if expires_ms is None else expires_ms
        row = token_row(token, pepper, self.owner.tenant, permissions, "*", until)
        await rooms.catalog.add_token(row, rooms.time.now_ms())
        return token.text, token.token_id

    async def check_clean(self, within_s: float = 5.0) -> None:
        """Nothing outlived its bracket (laws 4 and 7); a task that is just ending gets `within_s` for it."""
        deadline = time.monotonic() + within_s
        while held := await self.held():
            assert time.monotonic() < deadline, f"law 7: still held after {within_s} s: {held}"
            await asyncio.sleep(0.01)
        for namespace in await self.opened.rooms.catalog.namespaces(self.owner.tenant):
            scope = namespace.scope
            counters, rows = await self.opened.rooms.catalog._database.read(
                # In one transaction: maintenance goes on meanwhile.
                lambda connection, scope=scope: (
                    usage.namespace_usage(connection, scope)[0],
                    usage.counted_rows(connection, scope),
                ),
                self._sight,
            )
            assert counters == rows, "law 4: counters = rows"

    async def held(self) -> dict[str, int]:
        """What somebody still holds; empty when nobody does."""
        now = self.opened.rooms.staging.statistics()
        connections = int(self.opened.rooms.metrics.registry.get_sample_value("kvgw_connections") or 0)
        idle = [connection for one in self._clients if isinstance(one._transport, SocketTransport)
                for connection in one._transport._free]  # fmt: skip
        ((reservations,),) = await self.rows("SELECT count(*) FROM reservation")
        found = {
            "window bytes": now.windows.used_bytes,
            "draft bytes": now.draft_bytes,
            "bytes being filled": now.filling_bytes,
            "bytes gone but in use": now.gone_bytes,
            "lingering brackets": now.lingering,
            "waiters": now.waiters,
            "reservations": int(reservations),
            "connections": connections - len(idle),
            "shared windows": self.opened.rooms.lending.count - sum(one.window is not None for one in idle),
        }  # fmt: skip
        return {name: count for name, count in found.items() if count}

    async def aclose(self) -> None:
        for client in self._clients:
            await client.aclose()


def world_of(clock: Clock | None = None) -> World:
    return World(clock or SystemClock(), SystemRng(), Pace())


@asynccontextmanager
async def house(
    kind: Kind, folder: Path, *, clock: ManualClock | None = None, settings: Settings = SMALL, check: bool = True
) -> AsyncIterator[House]:
    """Run a gateway on `folder`; at the end nothing may be held any more.

    `settings` choose catalog and tiers. On a manual clock a database server's own clock is left out, as on SQLite.
    """
    with ExitStack() as stack:
        if clock:
            stack.enter_context(_database_without_a_clock())
        if kind == "shm":  # otherwise only large payloads are
            stack.enter_context(mock.patch("kvgw.connection.COPIED_BYTES_MIN", 1))
        async with _house(kind, folder, clock, settings, check) as made:
            yield made


def _database_without_a_clock() -> AbstractContextManager[object]:
    async def none(self: Catalog) -> None: ...

    return mock.patch.object(Catalog, "database_now_ms", none)


@asynccontextmanager
async def _house(
    kind: Kind, folder: Path, clock: ManualClock | None, settings: Settings, check: bool
) -> AsyncIterator[House]:
    if kind == "embedded":
        async with (
            opened(settings, folder, world=world_of(clock)) as gateway,
            _clients_of(House(gateway, kind, None, _token_of(gateway), clock), check) as made,
        ):
            yield made
        return
    if kind == "tcp":
        settings = replace_fields(settings, server=replace_fields(settings.server, listen="127.0.0.1:0"))
    async with serving(settings, folder, world=world_of(clock)) as served:
        wanted = TcpEndpoint if kind == "tcp" else UnixEndpoint
        endpoint = next(one for one in served.endpoints if isinstance(one, wanted))
        async with _clients_of(House(served.gateway, kind, endpoint, _token_of(served.gateway), clock), check) as made:
            yield made


@asynccontextmanager
async def limited_house(
    folder: Path, limits: Limits, *, clock: ManualClock | None = None, settings: Settings = SMALL, check: bool = True
) -> AsyncIterator[House]:
    """A gateway behind one Unix socket whose bounds for peers are `limits`."""
    async with opened(settings, folder, world=world_of(clock)) as gateway:

        async def serve(sock: Any) -> None:
            node = gateway.rooms.catalog.node.node
            await Connection(sock, gateway.gateway, gateway.authenticator, node, limits).serve()

        wanted = UnixEndpoint(str(folder / "kvgw.sock"))
        async with (
            listening(wanted, serve, limits.connections, gateway.rooms.metrics) as endpoint,
            _clients_of(House(gateway, "unix", endpoint, _token_of(gateway), clock), check) as made,
        ):
            yield made


@asynccontextmanager
async def _clients_of(made: House, check: bool) -> AsyncIterator[House]:
    try:
        yield made
        if check:
            await made.check_clean()
    finally:
        await made.aclose()


def _token_of(gateway: Opened) -> str:
    return gateway.first_token or ""


async def take_up_backlog(crew: Crew) -> None:
    """Do at once what the gateway's verbs left to do, into every tier."""
    await crew._hand_out()
    await crew._drain()
    await crew._collect_dead()


async def until(reached: Callable[[], bool], within_s: float = 10.0) -> None:
    """Return as soon as `reached()`; fails after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < deadline, f"not reached within {within_s} s"
        await asyncio.sleep(0.005)


def bytes_on_disk(folder: Path) -> int:
    return sum(os.path.getsize(file) for file in folder.rglob("*") if file.is_file())
