"""The simulated world: what all gateways share, the nodes that they run on, and the order of all that happens."""

from __future__ import annotations

import asyncio
import hashlib
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.pool import StaticPool

from kvgw.wiring import Opened
from tenancy import migrate
from tests.simulation.faults import Kind, Mixture, draw
from tests.simulation.loop import OWNER, SimTask, VirtualLoop, context_of
from tests.simulation.seams import SimClock, SimRng
from tests.simulation.tiers import Bucket, Disk

EPOCH_MS: Final = 1_700_000_000_000
WIDE_BYTES, NARROW_BYTES = 256 * 1024 * 1024, 24
"""Capacity of a disk: for everything, or for so many chunks."""
SLOW_FACTOR: Final = 60.0
LATE_S: Final = (0.5, 12.0)
DUPLICATE_S: Final = (0.2, 15.0)
INSPECT_EVERY: Final = 40
"""Writing transactions between two looks at all rows."""
BREACHES_MAX: Final = 20


@dataclass
class Process:
    """One run of a gateway. Satisfies `loop.Mortal`."""

    name: str
    node: Node
    clock: SimClock
    rng: SimRng
    dead: bool = False
    frozen: bool = False
    held: list[asyncio.Handle] = field(default_factory=list)
    tasks: list[SimTask] = field(default_factory=list)
    opened: Opened | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is over, whichever way."""
    calls: dict[asyncio.Future[Any], None] = field(default_factory=dict)
    """Clients that wait for an answer: they hear when the connection ends."""
    handlers: dict[SimTask, None] = field(default_factory=dict)


@dataclass
class Node:
    """A machine with a disk and a wall clock."""

    letter: str
    number: int
    disk: Disk
    skew_ms: int = 0
    runs: int = 0
    process: Process | None = None
    wanted: bool = True
    """Whether a gateway should be running here."""
    cut: set[str] = field(default_factory=set)
    """What it cannot reach: ``catalog``, ``s3``, ``clients``."""

    @property
    def name(self) -> str:
        """Of a node whose disk was replaced, a new one."""
        return f"{self.letter}{self.number}"

    @property
    def serving(self) -> Opened | None:
        """Its gateway, if it takes requests."""
        process = self.process
        return None if process is None or process.dead else process.opened


class World:
    """Everything of one seed."""

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        self.seed = seed
        self.loop = VirtualLoop()
        self.rng = random.Random(f"{seed}/world")
        self.mix: Mixture = draw(random.Random(f"{seed}/mixture"))
        self.bucket = Bucket()
        self.entry_of: dict[str, bytes] = {}
        """Keys that were ever put, as the catalog has them."""
        self.keys_kept: dict[UUID, dict[int, bytes] | None] = {}
        self.generation = 0
        self.connection, self.engine = _new_catalog()
        self.down: set[str] = set()
        """What nobody reaches: ``catalog``, ``s3``."""
        self.slow = 1.0
        self.counts: Counter[str] = Counter()
        self.breaches: list[str] = []
        self.inspect: Callable[[], None] = lambda: None
        self.processes: list[Process] = []
        self._closed = False
        self.gone_nodes: list[str] = []
        """Names of nodes that will never come back, and that nobody has told the others about yet."""
        self.lines: list[str] | None = [] if keep_trace else None
        self._hash = hashlib.blake2b(digest_size=16)
        capacity = NARROW_BYTES * (self.mix.chunk_bytes + 300) if self.mix.narrow else WIDE_BYTES
        self.nodes = [Node(letter, 1, Disk(capacity)) for letter in "ab"[: self.mix.gateways]]

    # What happened

    def note(self, who: str, what: str) -> None:
        """A line of the trace."""
        if self._closed:
            return
        line = f"{self.loop.now_s:12.6f} {who:<10} {what}"
        self._hash.update(line.encode() + b"\n")
        if self.lines is not None:
            self.lines.append(line)

    @property
    def trace_hash(self) -> str:
        return self._hash.hexdigest()

    def breach(self, what: str) -> None:
        """Something that must hold does not."""
        self.note("law", f"BREACH {what}")
        if len(self.breaches) < BREACHES_MAX and not self._closed:
            self.breaches.append(f"at {self.loop.now_s:.3f} s: {what}")

    def inspect_sometimes(self) -> None:
        """Look at all rows after some of the transactions."""
        self.counts["transactions"] += 1
        if self.counts["transactions"] % INSPECT_EVERY == 0:
            self.inspect()

    def close(self) -> None:
        """Nothing counts any more: what stands still is about to be taken apart."""
        self._closed = True
        self.engine.dispose()
        self.connection.close()

    # Time and chance

    def wall_ms(self) -> int:
        """The true time: that of the catalog's server and of S3."""
        return EPOCH_MS + int(self.loop.now_s * 1000)

    def delay(self) -> float:
        """How long something small takes."""
        return min(0.05, self.rng.expovariate(1500.0)) * self.slow

    def fate(self, who: str, what: str, allowed: tuple[Kind, ...]) -> Kind | None:
        """What becomes of a call, noted down."""
        kind = self.mix.fate(self.rng, allowed)
        self.counts["calls"] += 1
        self.note(who, f"{what} [{kind}]" if kind else what)
        return kind

    def reaches(self, node: Node, place: str) -> bool:
        return place not in node.cut and place not in self.down

    # Asking a server

    async def ask(
        self,
        process: Process,
        place: str,
        what: str,
        do: Callable[[], Any],
        failure: type[Exception],
        limit_s: float,
        *,
        more: tuple[Kind, ...] = (),
        given_up: Callable[[], None] | None = None,
    ) -> Any:
        """Let a server `do` something. A request may get lost, arrive late or twice, and so may its answer.

        Who gives up does not know whether it was done, or will be. `given_up` is called then, if it may still be.
        """
        kind = self.fate(process.name, what, (Kind.ERROR, Kind.LOST_ANSWER, Kind.LATE, *more))
        if kind is Kind.ERROR:
            await asyncio.sleep(self.delay())
            raise failure(f"planned: {what} fails")
        request = _Request(self, process, place, what, do, failure, kind)
        self.loop.run_outside(self.delay() + (self.rng.uniform(*LATE_S) if kind is Kind.LATE else 0), request.arrive)
        try:
            async with asyncio.timeout(limit_s):
                return await request.answer
        except BaseException as error:
            if request.on_its_way:
                request.on_its_way = self.rng.random() < 0.5
                if given_up is not None and request.on_its_way:
                    given_up()
            if isinstance(error, TimeoutError):
                raise failure(f"{place} did not answer {what} within {limit_s:g} s") from None
            raise

    # Processes

    def spawn(self, process: Process, work: Coroutine[Any, Any, Any]) -> SimTask:
        """A task that belongs to a process."""
        return self.loop.create_task(work, context=context_of(process))

    def new_process(self, node: Node) -> Process:
        node.runs += 1
        name = f"{node.name}.{node.runs}"
        node.process = Process(name, node, SimClock(self, node), SimRng(f"{self.seed}/{name}"))
        self.processes.append(node.process)
        return node.process

    def kill(self, node: Node) -> None:
        """End a node's process in this instant, wherever it is. Its clients hear a little later."""
        process = node.process
        if process is None or process.dead:
            return
        self.note(process.name, "dies")
        process.dead = True
        process.ended.set()
        node.process = None
        for future in process.calls:
            self.loop.run_outside(self.delay(), _reset, future)


class _Request:
    """One request on its way to a server, and its answer on the way back."""

    def __init__(
        self,
        world: World,
        process: Process,
        place: str,
        what: str,
        do: Callable[[], Any],
        failure: type[Exception],
        kind: Kind | None,
    ) -> None:
        self.answer: asyncio.Future[Any] = world.loop.create_future()
        self.on_its_way = True
        self._world, self._process, self._place, self._what = world, process, place, what
        self._do, self._failure, self._kind = do, failure, kind

    def arrive(self) -> None:
        world = self._world
        if not self.on_its_way or not world.reaches(self._process.node, self._place):
            return
        self.on_its_way = False
        try:
            result, error = self._do(), None
        except Exception as raised:
            result, error = None, raised
        if self._kind is Kind.DUPLICATE:
            world.loop.run_outside(world.rng.uniform(*DUPLICATE_S), self._again)
        if self._kind is Kind.FLIP and isinstance(result, bytes):
            result = bytes([result[0] ^ 1]) + result[1:]
        if self._kind is Kind.LOST_ANSWER:
            if world.rng.random() < 0.5:  # silence; else the connection breaks
                return
            error = self._failure(f"planned: {self._what} was done, and its answer got lost")
        world.loop.run_outside(world.delay(), self._back, result, error)

    def _again(self) -> None:
        self._world.note(self._process.name, f"{self._what} arrives again")
        self._do()

    def _back(self, result: Any, error: Exception | None) -> None:
        if self.answer.done() or not self._world.reaches(self._process.node, self._place):
            return
        if error is None:
            self.answer.set_result(result)
        else:
            self.answer.set_exception(error)


def _reset(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(ConnectionResetError("the gateway's process has ended"))


def owner() -> Process:
    """The process that runs now."""
    process = OWNER.get()
    assert isinstance(process, Process), "this belongs to a gateway"
    return process


@cache
def _migrated() -> bytes:
    """An empty catalog with the newest schema."""
    connection, engine = _engine_on(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))
    with engine.begin() as bound:
        migrate.upgrade(bound)
    return connection.serialize()


def _new_catalog() -> tuple[sqlite3.Connection, Engine]:
    raw = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    raw.deserialize(_migrated())
    return _engine_on(raw)


def _engine_on(raw: sqlite3.Connection) -> tuple[sqlite3.Connection, Engine]:
    raw.execute("PRAGMA foreign_keys=ON")
    engine = create_engine("sqlite+pysqlite://", creator=lambda: raw, poolclass=StaticPool)

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        if not connection.get_execution_options().get("kvgw_read_only"):
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    return raw, engine
