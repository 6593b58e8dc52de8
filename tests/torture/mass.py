"""Mass faults: a gateway in this process over seams that fail at some calls of a hundred, and four tenants at work.

Three quarters of the time the faults are what the protocols allow (errors, lost answers, cancellations, delays, torn
PUTs): everything must hold. Then tiers lie, by flipped bits and lost writes: chunks may be lost, never wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvgw.model import Durability
from kvgw.runtime import SystemClock
from kvgw.wiring import Opened
from tenancy.audit.chain import Act
from tests.support.gateways import House
from tests.torture.bench import faulty
from tests.torture.faults import Chance, FolderTier, Kind
from tests.torture.figures import Figures
from tests.torture.ground import (
    AT_ONCE,
    SETTINGS,
    LaterClock,
    embedded_clients,
    look_through,
    make_tenants,
    rows_of,
    settle,
)
from tests.torture.load import Load

HONEST: Final = (Kind.ERROR, Kind.LOST_ANSWER, Kind.CANCEL, Kind.CANCEL_AFTER, Kind.DELAY, Kind.TEAR)
LYING: Final = (*HONEST, Kind.CORRUPT, Kind.CORRUPT, Kind.LOSE)
RATES: Final = (0.05, 0.25)
"""Of the calls, in turn: few faults let much be done between them, many meet each other."""
ROUND_S: Final = 12.0
"""After so long the gateway is closed and opened again."""
DURABLE: Final = (Durability.NVME, Durability.S3)
ACT: Final = Act(actor="torture", action="fsck.repair")


class Mass:
    """One data folder under faults of some kinds."""

    def __init__(self, folder: Path, seed: str, kinds: tuple[Kind, ...], *, honest: bool) -> None:
        folder.mkdir()
        self.figures = Figures()
        self._folder = folder
        self._s3 = FolderTier(folder / "bucket")
        self._plan = Chance(random.Random(seed), RATES[0], kinds)
        self._honest = honest
        self._tokens: dict[str, str] = {}
        self._load = Load("m", seed, self.figures, self._nobody, durable=DURABLE, guard=self._guard, honest=honest)

    async def run(self, seconds: float, tell: Callable[[str], None]) -> None:
        ends = time.monotonic() + seconds
        load = asyncio.create_task(self._load.run())
        await self._load.pause()
        try:
            for rate in itertools.cycle(RATES):
                if (left := ends - time.monotonic()) <= 0:
                    break
                self._plan.rate = rate
                await self._round(min(ROUND_S, left))
                self._count_faults()
                tell(self.figures.line())
        finally:
            self._load.end()
            await load
        await self._close_down()

    async def _round(self, seconds: float) -> None:
        async with faulty(SETTINGS, self._folder / "data", SystemClock(), self._plan, self._s3) as gateway:
            self._tokens = self._tokens or await make_tenants(gateway)
            clients = await embedded_clients(gateway, self._tokens)
            self._load.client_of = clients.__getitem__
            crew = asyncio.create_task(gateway.crew.run())
            self._plan.armed = True
            self._load.resume()
            await asyncio.sleep(seconds)
            self._plan.armed = False
            await self._load.pause()
            crew.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await crew
            await self._look_at_memory(gateway)

    async def _look_at_memory(self, gateway: Opened) -> None:
        """Law 7: a task that is just ending gets a moment, then nothing is held."""
        house = House(gateway, "embedded", None, "")
        deadline = time.monotonic() + 5.0
        while True:
            held = {what: count for what, count in (await house.held()).items() if what != "reservations"}
            if not held:
                return
            if time.monotonic() > deadline:
                self.figures.breach("leaked_slots", f"after a round of mass faults: {held}", len(held))
                return
            await asyncio.sleep(0.02)

    async def _close_down(self) -> None:
        where = "mass faults" if self._honest else "lying tiers"
        async with faulty(SETTINGS, self._folder / "data", LaterClock(), self._plan, self._s3, AT_ONCE) as gateway:
            await settle(gateway)
            if not self._honest:
                await gateway.crew.fsck.run(ACT)
                await settle(gateway)
            clients = await embedded_clients(gateway, self._tokens)
            self._load.client_of = clients.__getitem__
            await self._load.read_back()
            await settle(gateway)  # what reading found damaged goes
            await look_through(gateway, self.figures, rows_of(gateway), where)

    def _count_faults(self) -> None:
        for kind, count in self._plan.fired.items():
            self.figures.fault(kind, count)
        self._plan.fired.clear()

    def _guard(self, task: asyncio.Task[object]) -> None:
        self._plan.victims.add(task)
        task.add_done_callback(self._plan.victims.discard)

    @staticmethod
    def _nobody(tenant: str) -> object:
        raise KeyError(tenant)


async def run(folder: Path, seconds: float, seed: str, tell: Callable[[str], None]) -> Figures:
    """Both halves; the figures of both."""
    total = Figures()
    for name, kinds, share in (("honest", HONEST, 0.75), ("lying", LYING, 0.25)):
        one = Mass(folder / name, f"{seed}/{name}", kinds, honest=name == "honest")
        await one.run(seconds * share, lambda line, name=name: tell(f"{name}: {line}"))
        total.add(one.figures)
    return total
