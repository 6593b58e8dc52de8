"""Who lets disasters happen, and the operator who cleans up after some of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

from kvgw.errors import KvgwError
from kvgw.model import NodeForgetRequest
from kvgw.wiring import Opened
from storage.errors import StorageError
from tenancy.audit.chain import Act
from tenancy.deletion import selection
from tenancy.deletion.jobs import Job
from tenancy.errors import TenancyError
from tests.simulation.faults import Disaster
from tests.simulation.model import Model
from tests.simulation.tiers import Disk
from tests.simulation.workload import DOOMED, NAMESPACES
from tests.simulation.world import SLOW_FACTOR, Node, World

LASTS_S: Final = (1.0, 40.0)
"""How long what ends by itself lasts: up to well above a gateway's lease."""
STEPS_MS: Final = (-3_600_000, -60_000, -7_000, 7_000, 60_000, 3_600_000)
FORGET_AFTER_S: Final = 20.0
ACT: Final = Act(actor="owner", action="key.test")

Do = Callable[[Opened], Awaitable[Any]]


async def at(world: World, node: Node, do: Do) -> Any:
    """Let a node's gateway do something, in its own process. Raises `ConnectionResetError` when it dies meanwhile."""
    process, opened = node.process, node.serving
    if process is None or opened is None:
        raise ConnectionResetError("nobody serves there")
    answer: asyncio.Future[Any] = world.loop.create_future()
    process.calls[answer] = None

    async def work() -> None:
        try:
            result = await do(opened)
        except Exception as error:
            if not answer.done():
                answer.set_exception(error)
        else:
            if not answer.done():
                answer.set_result(result)

    task = world.spawn(process, work())
    process.handlers[task] = None
    task.add_done_callback(lambda ended: process.handlers.pop(task, None))
    try:
        return await answer
    finally:
        process.calls.pop(answer, None)


class Nemesis:
    """Draws disasters until it is cancelled."""

    def __init__(self, world: World, model: Model) -> None:
        self._world, self._model = world, model
        self._rng = random.Random(f"{world.seed}/nemesis")
        self._undoing: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        mix = self._world.mix
        while mix.disasters:
            await asyncio.sleep(self._rng.expovariate(1 / mix.pause_s))
            disaster = self._rng.choice(mix.disasters)
            node = self._rng.choice(self._world.nodes)
            self._world.note("nemesis", f"{disaster} {node.name}")
            mix.fired[disaster] += 1
            await self._strike(disaster, node)

    async def heal(self) -> None:
        """All that can be made good is: partitions end, disks sync, time goes at its usual pace. Clocks stay wrong."""
        world = self._world
        world.mix.on, world.slow = False, 1.0
        world.down.clear()
        for task in self._undoing:
            task.cancel()
        for node in world.nodes:
            node.cut.clear()
            node.wanted = True
            node.disk.full = node.disk.sync_fails = False
            if node.process is not None and node.process.frozen:
                world.loop.thaw(node.process)
            if node.process is not None and world.mix.fired[Disaster.SYNC_FAILS]:
                node.process.stop.set()  # a disk under suspicion is believed again when its gateway opens it anew
        world.note("nemesis", "heals")

    async def _strike(self, disaster: Disaster, node: Node) -> None:
        match disaster:
            case Disaster.KILL | Disaster.POWER | Disaster.WIPE:
                self._kill(disaster, node)
            case Disaster.FREEZE:
                self._freeze(node)
            case Disaster.CUT_CATALOG | Disaster.CUT_S3 | Disaster.CUT_CLIENTS:
                place = disaster.rpartition(" ")[2].replace("S3", "s3")
                node.cut.add(place)
                self._later(lambda: node.cut.discard(place))
            case Disaster.DOWN_CATALOG | Disaster.DOWN_S3:
                place = disaster.partition(" ")[0].lower()
                self._world.down.add(place)
                self._later(lambda: self._world.down.discard(place))
            case Disaster.CLOCK:
                node.skew_ms += self._rng.choice(STEPS_MS)
            case Disaster.ROT:
                if self._rng.random() < 0.5:
                    self._world.bucket.rot(self._rng)
                else:
                    node.disk.rot(self._rng)
            case Disaster.SYNC_FAILS | Disaster.DISK_FULL:
                setattr(node.disk, "full" if disaster is Disaster.DISK_FULL else "sync_fails", True)
                self._later(lambda: self._disk_is_well(node))
            case Disaster.SLOW:
                self._world.slow = SLOW_FACTOR
                self._later(lambda: setattr(self._world, "slow", 1.0))
            case Disaster.ROTATE:
                await self._rotate(node)
            case Disaster.RESTART:
                if node.process is not None:
                    node.process.stop.set()

    def _kill(self, disaster: Disaster, node: Node) -> None:
        world = self._world
        world.counts["crashes"] += 1
        world.kill(node)
        if disaster is Disaster.POWER:
            node.disk.lose_power(self._rng)
        if disaster is Disaster.WIPE:
            self._model.lost_disk()
            world.gone_nodes.append(node.name)
            node.disk = Disk(node.disk.capacity)
            node.number += 1
        if self._rng.random() < 0.3:
            node.wanted = False
            self._later(lambda: setattr(node, "wanted", True))

    def _freeze(self, node: Node) -> None:
        process = node.process
        if process is None or process.dead or process.frozen:
            return
        process.frozen = True
        self._later(lambda: self._world.loop.thaw(process))

    def _disk_is_well(self, node: Node) -> None:
        node.disk.full = node.disk.sync_fails = False

    async def _rotate(self, node: Node) -> None:
        world = self._world
        tenant, _, name = self._rng.choice(NAMESPACES).partition("/")

        async def rotate(opened: Opened) -> None:
            known = await opened.rooms.catalog.tenant(tenant)
            assert known is not None
            found = await opened.rooms.catalog.namespace(known, name)
            assert found is not None
            if self._rng.random() < 0.7:
                await opened.custodian.rotate_data_key(found.scope, ACT)
            else:
                await opened.custodian.rotate_namespace_key(found.scope, ACT)

        await self._tried(at(world, node, rotate))

    async def _tried(self, work: Awaitable[Any]) -> bool:
        """Whether it was answered within half a minute."""
        try:
            async with asyncio.timeout(30.0):
                await work
        except (KvgwError, StorageError, TenancyError, ConnectionResetError, TimeoutError):
            return False
        return True

    def _later(self, undo: Callable[[], object]) -> None:
        async def wait() -> None:
            await asyncio.sleep(self._rng.uniform(*LASTS_S))
            undo()

        self._undoing.append(asyncio.ensure_future(wait()))

    async def delete_doomed(self, after_s: float) -> None:
        """Ask for the deletion of a whole namespace, again and again until it was heard."""
        await asyncio.sleep(after_s)
        names = [name for name in self._model.facts if name[0] == DOOMED]
        for name in names:
            self._model.begin(name)
            self._model.unanswered(name, 0.0)

        async def begin(opened: Opened) -> None:
            """As the admin API does it."""
            rooms = opened.rooms
            tenant = opened.authenticator.owner().tenant
            found = await rooms.catalog.namespace(tenant, DOOMED.partition("/")[2])
            if found is None or found.state == "deleting":
                return
            job = Job(
                found.scope, rooms.rng.token(16), "namespace", selection.Namespace(found.name), "removing", "owner",
                rooms.time.now_ms(),
            )  # fmt: skip
            act = Act(actor="owner", action="deletion.begin", tenant=tenant, namespace=found.scope.namespace)
            await rooms.deletions.begin([job], act, job.requested_ms)
            opened.directory.forget(tenant)
            await rooms.keyring.advance(await rooms.deletions.grow_generation())
            rooms.backlog.note_deletion()

        while not await self._tried(at(self._world, self._rng.choice(self._world.nodes), begin)):
            await asyncio.sleep(2.0)
        self._world.note("operator", "the namespace's deletion is acknowledged")

    async def forget_gone(self) -> None:
        """Tell the others of nodes that never return, once everybody takes them for dead."""
        await asyncio.sleep(FORGET_AFTER_S)
        for name in self._world.gone_nodes:
            goes_on = False
            for _ in range(20):
                node = self._rng.choice(self._world.nodes)
                request = NodeForgetRequest(name, goes_on=goes_on)
                with contextlib.suppress(ConnectionResetError, KvgwError):
                    reply = await at(
                        self._world,
                        node,
                        lambda opened, request=request: opened.gateway.answer(opened.authenticator.owner(), request),
                    )
                    if reply.done:
                        break
                    goes_on = True
                await asyncio.sleep(3.0)
