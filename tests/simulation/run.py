"""One seed from its beginning to its end, and what it came to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from kvgw.model import NamespaceCreateRequest
from kvgw.wiring import Opened
from tenancy.provision import create_namespace
from tests.simulation.gateways import keep_running, simulated
from tests.simulation.laws import Laws
from tests.simulation.loop import Deadlock, bury, simulate
from tests.simulation.model import Model
from tests.simulation.nemesis import Nemesis, at
from tests.simulation.workload import DOOMED, NAMESPACES, Callers, Worker, read_back
from tests.simulation.world import World

OPERATIONS: Final = 500
START_S: Final = 60.0
SETTLE_S: Final = 600.0
"""Virtual seconds within which everything must settle once nothing goes wrong any more."""
LOOK_S: Final = 20.0
SMALL_CHUNKS: Final = 30
"""Quota of the small namespace, in chunks."""


@dataclass
class Result:
    """What one seed came to."""

    seed: int
    trace_hash: str
    breaches: list[str]
    counts: Counter[str]
    fired: Counter[str]
    virtual_s: float
    cpu_s: float
    lines: list[str] = field(default_factory=list)


class _Errors(logging.Handler):
    """What a gateway logs as an error is a bug that it survived."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.breach(f"unforeseen: {self.format(record)[-1500:]}")


def run_seed(seed: int, operations: int = OPERATIONS, *, keep_trace: bool = False) -> Result:
    """Run one seed; the same seed always does the same."""
    began = time.process_time()
    world = World(seed, keep_trace=keep_trace)
    errors, log = _Errors(world), logging.getLogger("kvgw")
    before = log.propagate
    log.addHandler(errors)
    log.propagate = False
    collects = gc.isenabled()
    gc.disable()  # so that nothing of a dead process is taken apart in the middle of a living one's step
    try:
        with simulated(world):
            simulate(lambda: _main(world, operations), world.loop)
    except Deadlock as error:
        world.breach(f"law 7: {error}")
    except Exception as error:
        world.breach(f"unforeseen: the simulation ended with {type(error).__name__}: {error}")
    finally:
        log.removeHandler(errors)
        log.propagate = before
        for what in world.loop.unhandled:
            world.breach(f"unforeseen: nobody took {what}")
        world.close()
        bury([task for process in world.processes for task in process.tasks])
        if collects:
            gc.enable()
    return Result(
        seed, world.trace_hash, world.breaches, world.counts, world.mix.fired, world.loop.now_s,
        time.process_time() - began, world.lines or [],
    )  # fmt: skip


async def _main(world: World, operations: int) -> None:
    laws, model, callers = Laws(world), Model(world), Callers()
    world.inspect = laws.look
    world.mix.on = False
    keepers = [asyncio.ensure_future(keep_running(world, node)) for node in world.nodes]
    for node in world.nodes:
        if not await _reached(lambda node=node: node.serving is not None, START_S):
            world.breach(f"{node.name} does not serve within {START_S:g} s")
            return
    callers.other = await at(world, world.nodes[0], lambda opened: _found(opened, world.mix.chunk_bytes))
    world.mix.on = True
    nemesis = Nemesis(world, model)
    shares = (*NAMESPACES, NAMESPACES[0], DOOMED)
    workers = [
        Worker(world, model, callers, number, namespace, operations // len(shares))
        for number, namespace in enumerate(shares)
    ]
    striking = asyncio.ensure_future(nemesis.run())
    deleting = asyncio.ensure_future(nemesis.delete_doomed(nemesis_hour(world, operations)))
    await asyncio.gather(*(worker.run() for worker in workers))
    await _ended(striking)
    await nemesis.heal()
    await deleting
    await nemesis.forget_gone()
    await _settle(world, laws)
    if all(node.serving is not None for node in world.nodes):
        await _judge(world, model, callers, laws)
    await _close(world, keepers)


def nemesis_hour(world: World, operations: int) -> float:
    """When the doomed namespace goes: somewhere in the middle."""
    return world.rng.uniform(0.3, 0.8) * operations / 5


async def _found(opened: Opened, chunk_bytes: int) -> UUID:
    """What is there when the work begins: namespaces, one of them with a small quota, and a second tenant."""
    rooms, owner = opened.rooms, opened.authenticator.owner()
    small = SMALL_CHUNKS * (chunk_bytes + 300)
    await opened.gateway.answer(owner, NamespaceCreateRequest("small", limit_bytes=small))
    await opened.gateway.answer(owner, NamespaceCreateRequest(DOOMED.partition("/")[2]))
    other = UUID(bytes=rooms.rng.token(16), version=4)
    await rooms.catalog.create_tenant(other, "other", rooms.time.now_ms())
    await create_namespace(
        rooms.catalog, rooms.keyring, rooms.rng.token, rooms.time.now_ms(), other, "default", opened.default_policy
    )
    return other


async def _settle(world: World, laws: Laws) -> None:
    began = world.loop.now_s
    while rest := laws.unsettled():
        if world.loop.now_s > began + SETTLE_S:
            world.breach(f"not settled after {SETTLE_S:g} s: {rest}")
            return
        await asyncio.sleep(LOOK_S)
    world.note("law", "all has settled")
    world.counts["settling seconds"] += int(world.loop.now_s - began)


async def _judge(world: World, model: Model, callers: Callers, laws: Laws) -> None:
    """Read everything from everywhere, with staging emptied, then look at what is held."""
    for node in world.nodes:
        await read_back(world, model, callers, node)
    await asyncio.sleep(5.0)
    await _settle(world, laws)
    laws.look()
    for node in world.nodes:
        await at(world, node, lambda _, node=node: laws.at_the_end(node))


async def _close(world: World, keepers: list[asyncio.Future[None]]) -> None:
    for node in world.nodes:
        node.wanted = False
        process = node.process
        if process is not None and not process.dead:
            process.stop.set()
            if not await _reached(process.ended.is_set, 120.0):
                world.breach(f"law 7: {process.name} does not end")
    for keeper in keepers:
        await _ended(keeper)


async def _ended(task: asyncio.Future[Any]) -> None:
    """Cancel and wait; its own failure goes on."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _reached(condition: Any, within_s: float) -> bool:
    for _ in range(int(within_s * 2)):
        if condition():
            return True
        await asyncio.sleep(0.5)
    return bool(condition())


def result_of(seed: int, operations: int) -> dict[str, Any]:
    """`run_seed`, as plain values: for a process of a pool."""
    result = run_seed(seed, operations)
    return {
        "seed": seed,
        "trace_hash": result.trace_hash,
        "breaches": result.breaches,
        "virtual_s": result.virtual_s,
        "cpu_s": result.cpu_s,
        "counts": dict(result.counts),
        "fired": dict(result.fired),
    }
