"""Load of several tenants on one catalog: each worker owns its keys, knows what was acknowledged, judges all it reads.

Every tenant uses the same names of keys for contents of its own, so that whatever crosses from one to another is wrong
bytes.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from kvgw.client import Client
from kvgw.errors import Code, Outage, RequestRefused
from kvgw.model import Durability, Outcome, PutOutcome
from kvgw.reports import Registered
from tests.support.gateways import format_of
from tests.torture.figures import Figures

TENANTS: Final = ("amber", "beryl", "coral", "dusk")
CHUNK_BYTES: Final = 4096
CONTENTS: Final = 200
"""So many contents of a tenant are shared by all its keys: entries come to share chunks."""
KEYS_MAX: Final = 60
"""Live keys of a worker; above it deletes."""
READ_S, WRITE_S = 2.0, 5.0
SHORT_TTL_S: Final = 1.0
MARGIN_S: Final = 0.3
BATCH: Final = 32
FORMAT: Final = format_of(CHUNK_BYTES)


@lru_cache(maxsize=10_000)
def content_of(tenant: str, key: str) -> bytes:
    """What `key` holds for `tenant`: it follows from its name."""
    number = random.Random(key).randrange(CONTENTS)
    return random.Random(f"{tenant}/{number}").randbytes(CHUNK_BYTES)


class Lag:
    """How late our own event loop was, lately, and how far the machine's clock was set: nothing that a gateway
    could be blamed for."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque()
        self.clock_set_s = 0.0
        """How far the wall clock was set at once, at most, in either direction."""

    async def run(self) -> None:
        while True:
            before, wall = time.monotonic(), time.time()
            await asyncio.sleep(0.01)
            now = time.monotonic()
            self.clock_set_s = max(self.clock_set_s, abs(time.time() - wall - (now - before)))
            if now - before > 0.03:
                self._late.append((now, now - before - 0.01))
            while self._late and self._late[0][0] < now - 30:
                self._late.popleft()

    def since(self, moment: float) -> float:
        """The longest since then, in seconds."""
        return max((late for when, late in self._late if when >= moment), default=0.0)


@dataclass
class Known:
    """What one worker knows of its keys."""

    kept: set[str] = field(default_factory=set)
    """Acknowledged as durable: must be there."""
    doubtful: set[str] = field(default_factory=set)
    gone: dict[str, str] = field(default_factory=dict)
    """Keys that must not be there, and why."""
    short: list[tuple[float, str]] = field(default_factory=list)
    """When keys with a short life are over."""

    def live(self) -> list[str]:
        return sorted(self.kept | self.doubtful)


Ask = Callable[[], Awaitable[Any]]


class Load:
    """Workers of every tenant. `client_of` gives a tenant's client, and may raise `Outage` while there is none."""

    def __init__(
        self,
        name: str,
        seed: str,
        figures: Figures,
        client_of: Callable[[str], Client],
        *,
        durable: Sequence[Durability],
        workers: int = 2,
        guard: Callable[[asyncio.Task[Any]], None] | None = None,
        honest: bool = True,
    ) -> None:
        """`durable`: what an acknowledgement must survive here. `honest` False: tiers may lie, so chunks may be lost.

        `guard` is told of every call's task, which it may cancel.
        """
        self.figures = figures
        self.lag = Lag()
        self.client_of = client_of
        self.durable = frozenset(durable)
        self.durabilities = (Durability.STAGED, *durable)
        self.guard = guard
        self.honest = honest
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._busy = 0
        self._end = False
        self.workers = [
            Worker(self, tenant, f"{name}{number}", random.Random(f"{seed}/{name}/{tenant}/{number}"))
            for tenant in TENANTS
            for number in range(workers)
        ]

    async def run(self) -> None:
        """Work until `end`."""
        lag = asyncio.create_task(self.lag.run())
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self.workers:
                    group.create_task(self._work(worker))
        finally:
            lag.cancel()
            self.figures.clock_set_ms = max(self.figures.clock_set_ms, 1000 * self.lag.clock_set_s)

    def end(self) -> None:
        self._end = True
        self._may_run.set()

    async def pause(self) -> None:
        """Let everybody finish the call that is under way, and begin no other."""
        self._may_run.clear()
        while self._busy:
            await asyncio.sleep(0.005)

    def resume(self) -> None:
        self._may_run.set()

    async def _work(self, worker: Worker) -> None:
        while True:
            await self._may_run.wait()
            if self._end:
                return
            self._busy += 1
            try:
                answered = await worker.step()
            finally:
                self._busy -= 1
            if not answered:
                await asyncio.sleep(0.05)

    async def read_back(self, deadline_s: float = 20.0) -> None:
        """Ask for everything that anybody knows of, and judge it."""
        for worker in self.workers:
            await worker.read_back(deadline_s)


class Worker:
    """One writer and reader of one tenant."""

    def __init__(self, load: Load, tenant: str, name: str, rng: random.Random) -> None:
        self.known = Known()
        self._load = load
        self._tenant = tenant
        self._name = name
        self._rng = rng
        self._count = 0
        self._registered: Registered | None = None

    async def step(self) -> bool:
        """Do one thing; False when nobody answered."""
        try:
            client = self._load.client_of(self._tenant)
            if self._registered is None:
                return await self._register(client)
            return await self._choose(client, self._registered)
        except (Outage, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            self._load.figures.counts["outages"] += 1
            return False
        except Exception as error:
            self._load.figures.breach("unforeseen", f"{self._tenant}: {type(error).__name__}: {error}")
            return False

    async def _register(self, client: Client) -> bool:
        self._registered = await self._call(WRITE_S, "register", lambda: client.register(FORMAT, deadline_s=WRITE_S))
        return True

    async def _choose(self, client: Client, registered: Registered) -> bool:
        known, now = self.known, time.monotonic()
        if known.short and known.short[0][0] < now:
            key = known.short.pop(0)[1]
            known.gone[key] = "its life was over"
            return await self._get(client, registered, [key])
        live = known.live()
        dice = self._rng.random()
        if len(live) > KEYS_MAX or (live and dice < 0.05):
            return await self._delete(client, registered, self._rng.sample(live, min(len(live), 3)))
        if not live or dice < 0.20:
            return await self._put(client, registered)
        some = self._rng.sample(live, min(len(live), self._rng.randint(1, 4)))
        if known.gone and dice < 0.30:
            some.append(self._rng.choice(sorted(known.gone)))
        if dice < 0.52:
            return await self._get(client, registered, some)
        if dice < 0.96:
            return await self._match(client, registered, some)
        names = [one.encode() for one in some]
        await self._call(READ_S, "touch", lambda: client.touch(registered, names, deadline_s=READ_S, on_error="raise"))
        return True

    async def _put(self, client: Client, registered: Registered) -> bool:
        known = self.known
        keys = [self._new() for _ in range(self._rng.randint(1, 3))]
        durability = self._rng.choice(self._load.durabilities)
        durable = durability in self._load.durable
        short = durable and self._rng.random() < 0.1
        again = known.live()
        if again and not short and self._rng.random() < 0.2:
            keys.append(self._rng.choice(again))
        # Whatever is answered, from now on it may be there; what was promised before stays promised.
        if not short:
            known.doubtful |= set(keys) - known.kept
        report = await self._call(
            WRITE_S,
            f"put {durability}",
            lambda: client.put(
                registered,
                [key.encode() for key in keys],
                [content_of(self._tenant, key) for key in keys],
                durability=durability,
                ttl=SHORT_TTL_S if short else None,
                deadline_s=WRITE_S,
                on_error="raise",
            ),
        )
        held = {
            key for key, one in zip(keys, report.outcomes, strict=True) if one in (PutOutcome.STORED, PutOutcome.HAVE)
        }
        if short:
            known.short += [(time.monotonic() + SHORT_TTL_S + MARGIN_S, key) for key in keys if key in held]
        elif durable:
            known.kept |= held
            known.doubtful -= held
        return True

    async def _get(self, client: Client, registered: Registered, keys: Sequence[str]) -> bool:
        found = await self._read(client, registered, keys, READ_S)
        if found is None:
            self._load.figures.counts["outages"] += 1
            return False
        for key, chunk in zip(keys, found, strict=True):
            self._judge(key, chunk)
        return True

    async def _match(self, client: Client, registered: Registered, keys: Sequence[str]) -> bool:
        names = [one.encode() for one in keys]
        match = await self._call(
            READ_S, "match", lambda: client.match(registered, names, deadline_s=READ_S, on_error="raise")
        )
        for key in keys[: match.count]:
            if key in self.known.gone:
                self._load.figures.breach("read_after_end", f"{self._tenant}/{key} was matched: {self.known.gone[key]}")
        return True

    async def _delete(self, client: Client, registered: Registered, keys: Sequence[str]) -> bool:
        known = self.known
        known.kept -= set(keys)
        known.doubtful |= set(keys)
        names = [one.encode() for one in keys]
        await self._call(WRITE_S, "delete", lambda: client.delete(registered, names, deadline_s=WRITE_S))
        known.doubtful -= set(keys)
        known.gone |= dict.fromkeys(keys, "deleted")
        return True

    async def _read(
        self, client: Client, registered: Registered, keys: Sequence[str], limit_s: float
    ) -> list[bytes | None] | None:
        """For each key its chunk or None; None in all when that was an outage."""
        buffers = [bytearray(b"\xee" * CHUNK_BYTES) for _ in keys]
        names = [one.encode() for one in keys]
        report = await self._call(
            limit_s, "get", lambda: client.get(registered, names, buffers, deadline_s=limit_s, on_error="miss")
        )
        if report.outcome is Outcome.OUTAGE:
            return None
        hits = {hit.index for hit in report.hits}
        return [bytes(buffer) if index in hits else None for index, buffer in enumerate(buffers)]

    def _judge(self, key: str, chunk: bytes | None) -> None:
        figures, which = self._load.figures, f"{self._tenant}/{key}"
        if chunk is not None and chunk != content_of(self._tenant, key):
            figures.breach("wrong_bytes", which)
        if chunk is not None and key in self.known.gone:
            figures.breach("read_after_end", f"{which}: {self.known.gone[key]}")
        if chunk is None and key in self.known.kept:
            if self._load.honest:
                figures.breach("lost_acked", which)
            self.known.kept.discard(key)

    async def read_back(self, deadline_s: float) -> None:
        """Judge everything that is known; whatever is not answered is lost."""
        if self._registered is None:
            return
        keys = [*self.known.live(), *sorted(self.known.gone)[-200:]]
        for start in range(0, len(keys), BATCH):
            some = keys[start : start + BATCH]
            found = None
            for _ in range(3):
                found = await self._read(self._load.client_of(self._tenant), self._registered, some, deadline_s)
                if found is not None:
                    break
                await asyncio.sleep(0.3)
            if found is None:
                self._load.figures.breach("lost_acked", f"{self._tenant}: no answer for {len(some)} keys", len(some))
                continue
            for key, chunk in zip(some, found, strict=True):
                self._judge(key, chunk)

    async def _call(self, limit_s: float, what: str, ask: Ask) -> Any:
        """One call, in a task of its own that may be cancelled; how long it took is held against its deadline."""
        figures = self._load.figures
        started = time.monotonic()
        task = asyncio.ensure_future(ask())
        if self._load.guard is not None:
            self._load.guard(task)
        try:
            result = await task
        except RequestRefused as error:
            if error.code is Code.RESERVATION_EXPIRED:  # it says itself that it may be sent again
                raise Outage(str(error)) from error
            raise
        finally:
            over_s = time.monotonic() - started - limit_s
            if over_s > 0:
                figures.over(1000 * over_s, 1000 * self._load.lag.since(started), f"{what} of {self._tenant}")
        figures.counts["operations"] += 1
        return result

    def _new(self) -> str:
        self._count += 1
        return f"{self._name}-{self._count}"
