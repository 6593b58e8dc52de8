"""The order of things: systems are measured one after the other inside each round, so that one noise meets them all."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import kvgw.bench.worker
from kvgw.bench.gateway import GatewayUnderTest, gateway_under_test
from kvgw.bench.operator import Operator, operator_of
from kvgw.bench.plan import BenchError, Case, Limit, Op, Options, Report, Sample, SystemName, socket_of
from kvgw.bench.processes import Answer, Child, child, cpu_seconds
from kvgw.bench.protocol import (
    Check,
    Done,
    Forget,
    MachineLimits,
    Measure,
    Measured,
    MeasureLimits,
    Open,
    Prepare,
)
from kvgw.bench.redis import RedisServer, find_redis, redis_server
from kvgw.bench.report import Figures, machine, median_limits, rows

ANSWER_SECONDS: Final = 600.0
"""Calls have deadlines of their own; this is for a client process that hangs in an unforeseen way."""
SETTLE_SECONDS: Final = 60.0

Progress = Callable[[str, int, int], None]
"""Told before each step: what it is, its number from 0, and how many there are."""


@dataclass(frozen=True, slots=True)
class System:
    """A system under measurement; `pid` is None where its CPU time cannot be had."""

    name: SystemName
    version: str
    pid: int | None


@dataclass(slots=True)
class Bench:
    """All processes, and what was measured so far."""

    options: Options
    systems: Sequence[System]
    clients: Sequence[Child]
    operator: Operator
    figures: Figures = field(default_factory=dict)
    limits: list[dict[str, Limit]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    async def round(self, number: int, step: Callable[[str], None]) -> None:
        """Measure everything once. Round 0 warms up and is not counted."""
        cases = self.options.cases()
        for case in cases:
            # Who comes first would otherwise always meet the caches as preparing left them.
            for system in self.systems if number % 2 else self.systems[::-1]:
                step(f"{system.name} {' '.join(case.ops)}, {case.batch} × {case.chunk_bytes} B")
                samples = await self._measure_case(case, system)
                if number:
                    for op, sample in samples.items():
                        self.figures.setdefault((system.name, op, case), []).append(sample)
        if number:
            answers = await self._tell([self.clients[0]], MeasureLimits(self.options.transport), MachineLimits)
            self.limits.append(answers[0].limits)

    async def _measure_case(self, case: Case, system: System) -> dict[Op, Sample]:
        """Store new content, measured or not; read or find it, delete it, and wait until the gateway is quiet."""
        await self._tell(self.clients, Prepare(case.chunk_bytes, case.batch, case.calls), Done)
        stored = await self._sample(case, system, "put")
        before, _ = self._cpu(system)
        await self._settle(system)
        after, _ = self._cpu(system)
        if before is not None and after is not None:
            stored = replace(stored, later_cpu_s=after - before)
        found: dict[Op, Sample] = {}
        for op in case.ops:
            found[op] = stored if op == "put" else await self._sample(case, system, op)
        if "get" in case.ops:
            await self._tell(self.clients, Check(), Done)
        await self._tell(self.clients, Forget(system.name), Done)
        await self._settle(system)
        return found

    async def _sample(self, case: Case, system: System, op: Op) -> Sample:
        server, clients = self._cpu(system)
        measured = await self._tell(self.clients, Measure(system.name, op), Measured)
        server_after, clients_after = self._cpu(system)
        moved = 0 if op == "match64" else case.stored_bytes * len(self.clients)
        return Sample(
            seconds=max(one.ended_s for one in measured) - min(one.started_s for one in measured),
            payload_bytes=moved,
            call_us=tuple(duration for one in measured for duration in one.call_us),
            server_cpu_s=None if server is None or server_after is None else server_after - server,
            client_cpu_s=clients_after - clients,
        )

    def _cpu(self, system: System) -> tuple[float | None, float]:
        server = None if system.pid is None else cpu_seconds(system.pid)
        return server, sum(cpu_seconds(one.pid) for one in self.clients)

    async def _settle(self, system: System) -> None:
        if system.name != "kvgw":
            return
        busy = await self.operator.settle(SETTLE_SECONDS)
        if busy:
            self._note(f"the gateway was not quiet after {SETTLE_SECONDS:g} s ({busy}): figures include that work")

    def _note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)

    @staticmethod
    async def _tell(
        clients: Sequence[Child], command: Open | Prepare | Measure | Check | Forget | MeasureLimits, kind: type[Answer]
    ) -> list[Answer]:
        """Give a command to all clients at once, and wait for all answers."""
        for one in clients:
            one.tell(command)
        return [await one.hear(kind, ANSWER_SECONDS) for one in clients]

    async def open_clients(self, gateway: GatewayUnderTest, redis: RedisServer | None) -> None:
        """Connect the clients, each to its namespace."""
        options, cases = self.options, self.options.cases()
        namespaces = await self.operator.namespaces(options.namespaces, options.durability)
        for number, one in enumerate(self.clients):
            command = Open(
                endpoint=str(gateway.endpoint),
                token=gateway.token,
                namespace=namespaces[number % len(namespaces)],
                durability=options.durability,
                redis="" if redis is None else str(redis.endpoint),
                stored_bytes=max(case.stored_bytes for case in cases),
                call_bytes=max(case.call_bytes for case in cases),
                shared_memory=options.transport == "shm",
            )
            await self._tell([one], command, Done)


async def run(options: Options, progress: Progress) -> Report:
    """Measure, and end every process that was started, however this ends. Raises `BenchError` and `Outage`."""
    load_before = os.getloadavg()
    with _terminate_like_interrupt():
        async with _bench(options) as bench:
            total = (options.rounds + 1) * len(options.cases()) * len(bench.systems)
            done = 0

            def step(what: str) -> None:
                nonlocal done
                progress(what, done, total)
                done += 1

            for number in range(options.rounds + 1):
                await bench.round(number, step)
            progress("done", total, total)
    limits = median_limits(bench.limits)
    versions = {one.name: one.version for one in bench.systems}
    return Report(
        rows=rows(options, versions, bench.figures, limits),
        limits=limits,
        machine=machine(load_before, os.getloadavg()),
        options=options.public(),
        notes=bench.notes,
    )


@asynccontextmanager
async def _bench(options: Options) -> AsyncIterator[Bench]:
    """Start all processes; leaving ends them and removes their folder."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgw-bench-")))
        gateway = await stack.enter_async_context(gateway_under_test(options, folder / "gateway"))
        operator = await stack.enter_async_context(operator_of(gateway))
        systems = [System("kvgw", await operator.version(), gateway.pid)]
        notes: list[str] = []
        if gateway.pid is None:
            notes.append("the gateway's process cannot be seen from here: its CPU time is not measured")
        redis = None
        binary = _redis_binary(options, notes)
        if binary is not None:
            redis = await stack.enter_async_context(redis_server(binary, folder, socket_of(options.transport)))
            systems.append(System("redis", redis.version, redis.pid))
        clients = [
            await stack.enter_async_context(child(f"client {number}", kvgw.bench.worker.__name__))
            for number in range(1, options.clients + 1)
        ]
        bench = Bench(options, systems, clients, operator, notes=notes)
        await bench.open_clients(gateway, redis)
        yield bench


def _redis_binary(options: Options, notes: list[str]) -> str | None:
    if options.redis is False:
        return None
    binary = find_redis()
    if binary is None:
        if options.redis:
            raise BenchError("--redis was asked for, but redis-server is not on PATH: install it, or leave --redis out")
        notes.append("redis: not measured: redis-server is not installed")
    return binary


@contextmanager
def _terminate_like_interrupt() -> Iterator[None]:
    """Take SIGTERM for Ctrl-C: both end the processes that were started."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
