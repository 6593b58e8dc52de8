"""Clients at work: each owns its keys, reads those of all, and judges what it gets."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from kvgw.breaker import BreakerOptions
from kvgw.client import Client, ClientOptions
from kvgw.errors import KvgwError, Outage, RequestRefused
from kvgw.model import Durability, Outcome, PutOutcome
from kvgw.reports import Registered
from kvgw.wiring import Opened
from tenancy.access import Caller, Permission
from tests.simulation.faults import Kind
from tests.simulation.model import Model, Name, State, content_of
from tests.simulation.transport import SimTransport
from tests.simulation.world import Node, World
from tests.support.gateways import format_of

NAMESPACES: Final = ("default/default", "default/small", "other/default")
"""As ``tenant/namespace``; a client works in one of them."""
DOOMED: Final = "default/doomed"
"""The namespace that is deleted as a whole, with a receipt."""
KEYS_MAX: Final = 24
THINK_S: Final = 1.0
DEADLINES_S: Final = (0.5, 2.0, 8.0)
PATIENT_S: Final = 30.0
OPTIONS: Final = ClientOptions(breaker=BreakerOptions(failures=2**62))


@dataclass
class Callers:
    """Who asks: the owner of each tenant."""

    other: UUID | None = None
    """The second tenant."""

    def of(self, namespace: str, opened: Opened) -> Caller:
        owner = opened.authenticator.owner()
        if namespace.startswith("default/"):
            return owner
        assert self.other is not None
        return Caller(self.other, "other", frozenset(Permission), ("*",), "default")


class Worker:
    """One client: its own keys in one namespace, over connections to every node."""

    def __init__(
        self, world: World, model: Model, callers: Callers, number: int, namespace: str, operations: int
    ) -> None:
        self.name = f"client{number}"
        self.namespace = namespace
        self._world, self._model, self._callers = world, model, callers
        self._rng = random.Random(f"{world.seed}/{self.name}")
        self._left = operations
        self._keys: list[Name] = []
        self._count = 0
        self._registered: Registered | None = None
        self.done: Counter[str] = world.counts

    async def run(self) -> None:
        while self._left > 0:
            self._left -= 1
            await asyncio.sleep(self._rng.expovariate(1 / THINK_S))
            node = self._rng.choice(self._world.nodes)
            try:
                await self._step(node)
            except Outage:
                self.done["outages"] += 1
            except RequestRefused as error:
                self.done[f"refused {error.code}"] += 1
            except asyncio.CancelledError:
                self.done["cancelled calls"] += 1

    async def _step(self, node: Node) -> None:
        client, registered = await self._speak(node)
        live = [name for name in self._keys if self._model.fact(name).state in (State.DOUBT, State.KEPT)]
        dice = self._rng.random()
        if len(live) > KEYS_MAX or (live and dice < 0.10):
            await self._delete(client, registered, self._some(live, 3))
        elif not live or dice < 0.34:
            names = [self._new() for _ in range(self._rng.randint(1, 4))]
            if self._keys and self._rng.random() < 0.4:
                names.append(self._rng.choice(self._keys))
            ttl = self._rng.choice((6.0, 20.0)) if self._rng.random() < 0.15 else None
            await self._put(client, registered, node, names, self._rng.choice(list(Durability)), ttl)
        elif dice < 0.38:
            await self._store_twice()
        elif dice < 0.42:
            await self._end_what_is_remembered(self._some(live, 3))
        elif dice < 0.85:
            await self.read(client, registered, node, self._some(self._readable(), 5))
        elif dice < 0.95:
            await self._match(client, registered, self._some(self._readable(), 4))
        else:
            names = self._some(live, 3)
            self._model.lengthen(names)
            await self._call(client.touch(registered, _keys(names), deadline_s=2.0, on_error="raise"), 2.0)

    async def _speak(self, node: Node) -> tuple[Client, Registered]:
        namespace = self.namespace
        shares = self._rng.random() < 0.3
        transport = SimTransport(self._world, node, lambda opened: self._callers.of(namespace, opened), shares=shares)
        name = namespace.partition("/")[2]
        client = Client(transport, ClientOptions(namespace=name, breaker=OPTIONS.breaker))
        if self._registered is None:
            kv_format = format_of(self._world.mix.chunk_bytes)
            self._registered = await self._call(client.register(kv_format, deadline_s=8.0), 8.0)
        return client, self._registered

    def _readable(self) -> list[Name]:
        """Own keys, those of other clients, and of the same name in other namespaces."""
        own = list(self._keys)
        others = [(self.namespace, key) for _, key in self._model.facts]
        return own + own + others

    async def _store_twice(self) -> None:
        """Equal content through two gateways, the second time for less: what the first was promised stands."""
        one, other = self._two_nodes()
        client, registered = await self._speak(one)
        name = self._new()
        await self._put(client, registered, one, [name], Durability.NVME, None)
        await self._put(*await self._speak(other), other, [self._new(like=name)], Durability.STAGED, None)
        await self.read(client, registered, one, [name])

    async def _end_what_is_remembered(self, names: Sequence[Name]) -> None:
        """Let one gateway answer from memory, end it through another one, and ask the first again at once."""
        one, other = self._two_nodes()
        client, registered = await self._speak(one)
        for _ in range(2):
            await self._match(client, registered, names)
            await asyncio.sleep(self._rng.uniform(0.3, 0.8))
        await self._delete(*await self._speak(other), names)
        await self._match(client, registered, names)

    def _two_nodes(self) -> tuple[Node, Node]:
        """Two of them, where there are two."""
        nodes = self._rng.sample(self._world.nodes, len(self._world.nodes))
        return nodes[0], nodes[-1]

    async def _put(
        self,
        client: Client,
        registered: Registered,
        node: Node,
        names: Sequence[Name],
        durability: Durability,
        ttl: float | None,
    ) -> None:
        model = self._model
        names = sorted(set(names))
        limit = self._rng.choice(DEADLINES_S)
        chunks = [bytearray(content_of(*name, registered.chunk_bytes)) for name in names]
        for name in names:
            model.begin(name, mortal=ttl is not None)
        home = node.name
        try:
            report = await self._call(
                client.put(
                    registered, _keys(names), chunks, durability=durability, ttl=ttl, deadline_s=limit,
                    on_error="raise",
                ),
                limit,
            )  # fmt: skip
        except BaseException:
            for name in names:
                model.unanswered(name, limit)
            for chunk in chunks:
                chunk[:] = b"\xdd" * len(chunk)  # it is the client's own again
            raise
        for name, outcome in zip(names, report.outcomes, strict=True):
            self.done[f"chunks {outcome}"] += 1
            if outcome in (PutOutcome.STORED, PutOutcome.HAVE):
                sure = home if outcome is PutOutcome.STORED else ""
                # What was there before may have longer to live than was asked for now.
                model.stored(name, durability, sure, report.expires_ms if ttl and sure else 0)

    async def read(self, client: Client, registered: Registered, node: Node, names: Sequence[Name]) -> None:
        """Get chunks and judge them."""
        model = self._model
        names = list(dict.fromkeys(names))
        if not names:
            return
        model.expire(node.process)
        model.lengthen(names)
        before, home = model.snapshot(names), node.name
        limit = self._rng.choice(DEADLINES_S)
        buffers = [bytearray(b"\xee" * registered.chunk_bytes) for _ in names]
        report = await self._call(
            client.get(registered, _keys(names), buffers, deadline_s=limit, on_error="raise"), limit
        )
        hits = {hit.index for hit in report.hits}
        found = {name: bytes(buffers[at]) if at in hits else None for at, name in enumerate(names)}
        model.judge(before, found, home, whole=report.outcome is Outcome.OK)

    async def _match(self, client: Client, registered: Registered, names: Sequence[Name]) -> None:
        names = list(dict.fromkeys(names))
        before = self._model.snapshot(names)
        match = await self._call(
            client.match(registered, _keys(names), deadline_s=2.0, on_error="raise", lease_ms=2000), 2.0
        )
        for name in names[: match.count]:
            state, change = before[name]
            if state is State.GONE and self._model.fact(name).change == change:
                self._world.breach(f"law 5: {name[1]} was matched after its end")

    async def _delete(self, client: Client, registered: Registered, names: Sequence[Name]) -> None:
        limit = self._rng.choice(DEADLINES_S)
        for name in names:
            self._model.begin(name)
        try:
            await self._call(client.delete(registered, _keys(names), deadline_s=limit), limit)
        except BaseException:
            for name in names:
                self._model.unanswered(name, limit)
            raise
        for name in names:
            self._model.ended(name)

    async def _call(self, work: Awaitable[Any], limit_s: float) -> Any:
        """One call, which may be given up in its middle, and must end within its deadline."""
        world = self._world
        self.done["operations"] += 1
        began = world.loop.now_s
        task = asyncio.ensure_future(work)
        if world.mix.fate(world.rng, (Kind.CANCEL,)) is Kind.CANCEL:
            world.loop.run_outside(self._rng.uniform(0, 0.05) * world.slow, task.cancel)
        try:
            return await task
        except (KvgwError, asyncio.CancelledError):
            raise
        except Exception as error:
            world.breach(f"unforeseen: a client met {type(error).__name__}: {error}")
            raise Outage("unforeseen") from error
        finally:
            world.note(self.name, "has its answer")
            if world.loop.now_s > began + limit_s + 0.01:
                world.breach(f"law 9: a call took {world.loop.now_s - began:.3f} s, its deadline was {limit_s} s")

    def _new(self, *, like: Name | None = None) -> Name:
        """A new key of this client's; `like`: one with the content of that one."""
        self._count += 1
        key, number = f"{self.name}-{self._count}", 0
        while like is not None and content_of(self.namespace, key, 8) != content_of(*like, 8):
            key, number = f"{self.name}-{self._count}.{number}", number + 1
        name = (self.namespace, key)
        self._keys.append(name)
        return name

    def _some(self, names: Sequence[Name], most: int) -> list[Name]:
        return self._rng.sample(list(dict.fromkeys(names)), min(len(set(names)), self._rng.randint(1, most)))


async def read_back(world: World, model: Model, callers: Callers, node: Node) -> None:
    """When everything has settled: read every key from a node, with time enough for all of them."""
    for namespace in (*NAMESPACES, DOOMED):
        reader = Worker(world, model, callers, 90, namespace, 0)
        names = [name for name in sorted(model.facts) if name[0] == namespace]
        try:
            client, registered = await reader._speak(node)
        except RequestRefused:
            if namespace != DOOMED:
                raise
            continue  # it was deleted
        for start in range(0, len(names), 16):
            some = names[start : start + 16]
            model.expire(node.process)
            model.lengthen(some)
            before = model.snapshot(some)
            buffers = [bytearray(registered.chunk_bytes) for _ in some]
            report = await client.get(registered, _keys(some), buffers, deadline_s=PATIENT_S, on_error="raise")
            hits = {hit.index for hit in report.hits}
            found = {name: bytes(buffers[at]) if at in hits else None for at, name in enumerate(some)}
            if report.outcome is not Outcome.OK:
                world.breach(f"when all had settled, reading from {node.name} was an outage: {report.reason}")
            model.judge(before, found, "", whole=True)


def _keys(names: Sequence[Name]) -> list[bytes]:
    return [key.encode() for _, key in names]
