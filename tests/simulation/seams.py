"""What a simulated process has in the place of clocks, chance, threads, the catalog's connection and the key store."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID

from sqlalchemy import Connection, Engine

from kvgw.runtime import finish
from tenancy.engine import SqliteDatabase
from tenancy.errors import CatalogUnavailable, KeyGone, KeyUnavailable
from tenancy.keys.keystore import KeyVersions
from tenancy.postgres import PostgresDatabase
from tenancy.sight import NO_TENANT, Sight
from tests.simulation.faults import Kind

if TYPE_CHECKING:
    from tests.simulation.world import Node, Process, World

Result = TypeVar("Result")

CATALOG_SECONDS: Final = 20.0
"""Absolute limit of one transaction, as `tenancy.postgres` has one."""
KEYS_SECONDS: Final = 10.0


class SimClock:
    """A node's clocks: monotonic time is the loop's, the wall clock may be wrong."""

    def __init__(self, world: World, node: Node) -> None:
        self._world, self._node = world, node

    def monotonic(self) -> float:
        return self._world.loop.now_s

    def now_ms(self) -> int:
        return self._world.wall_ms() + self._node.skew_ms

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SimRng:
    """Chance of one process, from the seed."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def token(self, size: int) -> bytes:
        return self._random.randbytes(size)

    def jitter(self) -> float:
        return self._random.random()


class SimWorkers:
    """Worker threads: work runs whole, a moment later, whoever was cancelled meanwhile."""

    def __init__(self, world: World, *, serial: bool = False) -> None:
        """`serial`: a single thread, in the order in which it was asked."""
        self._world, self._serial = world, serial
        self._last_s = 0.0

    async def run(self, work: Callable[[], Result]) -> Result:
        loop = self._world.loop
        future: asyncio.Future[Result] = loop.create_future()
        handed_over = [work]
        del work

        def do() -> None:
            try:
                result = handed_over.pop()()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        at_s = loop.now_s + self._world.delay()
        if self._serial:
            at_s = self._last_s = max(at_s, self._last_s)
        loop.call_at(at_s, do)
        return await finish(future)

    def wanted(self) -> bool:
        return False  # work runs whole: nothing waits for a thread

    def close(self) -> None: ...


class OwnDatabase(SqliteDatabase):
    """The catalog of a gateway that is alone: the product's own, but for its thread and its file."""

    def __init__(self, world: World, process: Process, engine: Engine) -> None:
        self._world, self._process = world, process
        self._engine = engine
        self._workers = SimWorkers(world, serial=True)
        self._versions: defaultdict[UUID, int] = defaultdict(int)

    async def write(self, body: Callable[[Connection], Result], sight: Sight = NO_TENANT, *ends: Any) -> Result:
        kind = self._world.fate(self._process.name, f"catalog.write {_name(body)}", (Kind.ERROR, Kind.LOST_ANSWER))
        if kind is Kind.ERROR:
            raise CatalogUnavailable("planned: the disk of the catalog is full")
        result = await super().write(body, sight, *ends)
        if kind is Kind.LOST_ANSWER:
            raise CatalogUnavailable("planned: committed, and an error came back")
        return result

    async def read(self, body: Callable[[Connection], Result], sight: Sight = NO_TENANT) -> Result:
        kind = self._world.fate(self._process.name, f"catalog.read {_name(body)}", (Kind.ERROR,))
        if kind is Kind.ERROR:
            raise CatalogUnavailable("planned: the catalog cannot be read")
        return await super().read(body, sight)

    def _transact(self, body: Callable[[Connection], Result], options: dict[str, bool]) -> Result:
        result = super()._transact(body, options)
        self._world.inspect_sometimes()
        return result

    async def aclose(self) -> None: ...


class ServerDatabase(PostgresDatabase):
    """The catalog of several gateways: the product's own, but for the connections to its server."""

    def __init__(self, world: World, process: Process, engine: Engine) -> None:
        connections: Any = _Connections(world, process, engine)
        self._engine = self._quick = connections
        self.memory = None

    async def aclose(self) -> None: ...


class _Connections:
    """In the place of SQLAlchemy's asynchronous engine and its connections: each transaction is one question."""

    def __init__(self, world: World, process: Process, engine: Engine) -> None:
        self._world, self._process, self._engine = world, process, engine

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[_Connections]:
        yield self

    connect = begin

    async def run_sync(self, transaction: Callable[[Connection], Any]) -> Any:
        def transact() -> Any:
            with self._engine.begin() as connection:
                result = transaction(connection)
            self._world.inspect_sometimes()
            return result

        what = f"catalog {_name(transaction)}"
        return await self._world.ask(self._process, "catalog", what, transact, CatalogUnavailable, CATALOG_SECONDS)


def _name(body: Callable[..., Any]) -> str:
    """Of what a transaction does, as far as it has one."""
    function = body.func if isinstance(body, partial) else body
    inner = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)).get("body")
    if inner is not None:
        return _name(inner.cell_contents)
    return function.__qualname__.replace(".<locals>.<lambda>", "").rpartition(".")[2]


class SimKeyStore:
    """The key store of all gateways: beside the bucket, as `keys.store = s3` is."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process
        self._kept = world.keys_kept

    async def read(self, namespace: UUID) -> KeyVersions:
        found: KeyVersions = await self._ask("read", lambda: self._found(namespace))
        return found

    async def create(self, namespace: UUID, versions: KeyVersions) -> KeyVersions:
        def put_first() -> KeyVersions:
            if namespace not in self._kept:
                self._kept[namespace] = dict(versions)
            return self._found(namespace)

        stands: KeyVersions = await self._ask("create", put_first)
        return stands

    async def replace(self, namespace: UUID, versions: KeyVersions) -> None:
        def put() -> None:
            self._found(namespace)
            self._kept[namespace] = dict(versions)

        await self._ask("replace", put)

    async def destroy(self, namespace: UUID) -> None:
        def forget() -> None:
            self._kept[namespace] = None

        await self._ask("destroy", forget)

    async def generation(self) -> int:
        found: int = await self._ask("generation", lambda: self._world.generation)
        return found

    async def advance(self, generation: int) -> None:
        def put() -> None:
            self._world.generation = max(self._world.generation, generation)

        await self._ask("advance", put)

    def _found(self, namespace: UUID) -> KeyVersions:
        versions = self._kept.get(namespace, {})
        if versions is None:
            raise KeyGone(f"the key of {namespace} was destroyed")
        if not versions:
            raise KeyUnavailable(f"there is no key of {namespace}")
        return dict(versions)

    async def _ask(self, verb: str, do: Callable[[], Any]) -> Any:
        return await self._world.ask(self._process, "s3", f"keys.{verb}", do, KeyUnavailable, KEYS_SECONDS)
