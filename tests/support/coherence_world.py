"""A catalog and gateways that remember, on a virtual clock, for every interleaving that chance comes upon.

Coroutines of `kvgw.gateway.coherence` run here without an event loop: each waits until chance lets its statement take
effect, lets its answer arrive, or loses one of them. A statement whose answer was lost may still take effect much
later. Gateways freeze, die and begin anew; their clocks run at different rates and from different beginnings.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

from kvgw.fence import Fence
from kvgw.gateway.coherence import Coherence
from kvgw.metrics import Metrics
from tenancy import versions
from tenancy.errors import CatalogUnavailable
from tenancy.schema import VERSION_MAX
from tenancy.timekeeping import CatalogTime
from tenancy.versions import Look, Version, behind

TENANT = UUID(int=1)
NAMES = ("a", "b", "c")
DRIFT = 0.04
"""Of each clock; what is waited for allows for a tenth between any two."""
METRICS = Metrics()


@dataclass(eq=False)
class Statement:
    """What a gateway has asked the catalog, or (without an effect) its clock."""

    effect: Callable[[], Any] | None
    wake: float = 0.0
    done: bool = False
    result: Any = None

    def __await__(self) -> Generator[Statement, Any, Any]:
        yield self
        return self.result


@dataclass
class Rows:
    """The catalog."""

    version: int
    alive: set[int] = field(default_factory=set)
    seen: dict[str, int] = field(default_factory=dict)

    def run(self, body: Any) -> Any:
        """What the statement of `tenancy.versions` would do."""
        given = body.keywords if isinstance(body, partial) else {}
        match body.func if isinstance(body, partial) else body:
            case versions.look:
                return Look({TENANT: Version(self.version, self.seen.get(given["boot"]))}, everyone_raises=True)
            case versions.confirm:
                new = given["seen"][TENANT]
                if not behind(new, self.seen.get(given["boot"], new)):
                    self.seen[given["boot"]] = new
            case versions.readers:
                return dict(self.seen)
            case versions.drop_reader:
                if self.seen.get(given["boot"]) == given["seen"]:
                    del self.seen[given["boot"]]
        return None

    def delete(self, key: int) -> int:
        self.alive.discard(key)
        self.version = 0 if self.version == VERSION_MAX else self.version + 1
        return self.version


class Clock:
    """One machine's, which only it goes by; its wall clock is as wrong as it likes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rate = 1 + world.rng.uniform(-DRIFT, DRIFT)
        self._start = world.rng.uniform(0, 1e6)

    def monotonic(self) -> float:
        return self._start + self._rate * self._world.now

    def now_ms(self) -> int:
        return self._world.rng.randrange(10**12)

    async def sleep(self, seconds: float) -> None:
        await Statement(None, self.monotonic() + seconds, done=True)


class Gateway:
    """Remembers, deletes, and hears of the others."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self.boot = f"{name}{world.boots}"
        self.clock = Clock(world)
        self._fence = Fence(self.clock)
        time = CatalogTime(self.clock, 0)
        self.coherence = world.kind(self, self.boot, self.clock, time, self._fence, METRICS)
        self.shelf: tuple[int | None, set[int]] = None, set()
        self.tasks: list[tuple[Coroutine[Statement, Any, None], Statement]] = []
        self.polls = False
        self.frozen = False

    async def quick(self, body: Any) -> Any:
        return await Statement(lambda: self._world.rows.run(body))

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._go_on(coroutine, None, None)

    def lose(self, index: int) -> None:
        """The connection breaks: nobody knows whether the statement takes effect."""
        coroutine, statement = self.tasks.pop(index)
        if not statement.done:
            self._world.lost.append(statement)
        self._go_on(coroutine, None, CatalogUnavailable("lost"))

    def answer(self, index: int) -> None:
        coroutine, statement = self.tasks.pop(index)
        self._go_on(coroutine, statement, None)

    def _go_on(
        self, coroutine: Coroutine[Any, Any, None], statement: Statement | None, error: Exception | None
    ) -> None:
        try:
            waits = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration:
            return
        self.tasks.append((coroutine, waits))

    async def poll(self) -> None:
        self.polls = True
        try:
            await self.coherence.poll()
        except CatalogUnavailable:
            pass
        finally:
            self.polls = False

    async def delete(self, key: int) -> None:
        try:
            version = await Statement(lambda: self._world.rows.delete(key))
        except CatalogUnavailable:
            return  # nobody is told anything
        self.coherence.ended(TENANT, version)
        await self.coherence.settled(TENANT, version)
        self._world.acknowledged.add(key)

    def match(self) -> None:
        """Answer from memory, or ask the catalog and remember."""
        self._fence.heard(self.clock.monotonic())
        version = self.coherence.version(TENANT)
        if version is not None and self.shelf[0] == version:
            self._world.answers += len(self.shelf[1]) > 0
            self._world.wrong |= self.shelf[1] & self._world.acknowledged
        else:
            self.start(self._look_up(version))

    async def _look_up(self, version: int | None) -> None:
        try:
            found = await Statement(lambda: set(self._world.rows.alive))
        except CatalogUnavailable:
            return
        if version is not None:
            self.shelf = version, found


class World:
    """Everything, driven by chance."""

    def __init__(self, seed: int, kind: Callable[..., Coherence] = Coherence) -> None:
        self.rng = random.Random(seed)
        self.kind = kind
        self.now = 0.0
        self.boots = 0
        self.rows = Rows(self.rng.choice([0, VERSION_MAX - 2]))
        self.lost: list[Statement] = []
        self.acknowledged: set[int] = set()
        self.wrong: set[int] = set()
        """Keys that were answered from memory after their deletion had been acknowledged."""
        self.answers = 0
        """How often something was answered from memory."""
        self.keys = 0
        self.gateways = [self._new(name) for name in NAMES[: self.rng.randint(2, 3)]]
        self.haste = self.rng.choice([0.001, 0.004, 0.015])

    def _new(self, name: str) -> Gateway:
        self.boots += 1
        return Gateway(self, name)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        rng = self.rng
        self.now += rng.expovariate(1 / self.haste)
        at = rng.randrange(len(self.gateways))
        gateway = self.gateways[at]
        match rng.choices(
            ("statement", "act", "freeze", "thaw", "late", "pause", "kill"), (60, 40, 0.5, 3, 2, 0.5, 0.1)
        )[0]:
            case "statement":
                self._statement(gateway)
            case "act" if not gateway.frozen:
                self._act(gateway, rng.random())
            case "freeze" | "thaw" as what:
                gateway.frozen = what == "freeze"
            case "late" if self.lost:
                self._effect(self.lost.pop(rng.randrange(len(self.lost))))
            case "pause":
                self.now += rng.uniform(0.2, 1.2)
            case "kill":
                self.gateways[at] = self._new(NAMES[at])  # others find its word, and nobody behind it

    def _act(self, gateway: Gateway, dice: float) -> None:
        """Something new."""
        if dice < 0.1 and len(self.rows.alive) < 4:
            self.keys += 1
            self.rows.alive.add(self.keys)
        elif dice < 0.12 and self.rows.alive:
            gateway.start(gateway.delete(self.rng.choice(sorted(self.rows.alive))))
        elif dice < 0.4 and not gateway.polls:
            gateway.start(gateway.poll())
        else:
            gateway.match()

    def _statement(self, gateway: Gateway) -> None:
        """A statement takes effect, though who sent it be frozen; or its answer arrives, or is lost."""
        ready = [
            at for at, (_, one) in enumerate(gateway.tasks) if one.wake == 0 or one.wake <= gateway.clock.monotonic()
        ]
        if not ready:
            return
        at = self.rng.choice(ready)
        statement = gateway.tasks[at][1]
        dice = self.rng.random()
        if not gateway.frozen and statement.effect is not None and dice < 0.02:
            gateway.lose(at)
            return
        self._effect(statement)
        if not gateway.frozen and dice < 0.7:
            gateway.answer(at)

    @staticmethod
    def _effect(statement: Statement) -> None:
        if statement.effect is not None and not statement.done:
            statement.result = statement.effect()
            statement.done = True
