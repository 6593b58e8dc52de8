"""S13: whatever clears up runs beside PUTs and deletions in every order that chance brings, and takes nothing live."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from kvgw.maintenance.pacing import PAUSE_SECONDS_MAX
from kvgw.model import Durability, PutOutcome
from storage.tier import BlobInfo
from tests.kvgw.maintenance_bench import FlakyTier, Works, works
from tests.support.aio import run
from tests.support.gateways import payloads_of, read

KEYS = 6
TIMES_S = (0.0, 0.1, 5.0, 150.0, 1_100.0)
"""By which the clock jumps: within a lease, over one, over the graces of orphans on NVMe and in S3."""


class PausingTier(FlakyTier):
    """An S3 tier every call of which lets others run first, as often as chance says."""

    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random(0)

    async def _pause(self) -> None:
        for _ in range(self.chance.randrange(6)):
            await asyncio.sleep(0)

    async def put(self, name: str, sealed: memoryview) -> None:
        await self._pause()
        await super().put(name, sealed)
        await self._pause()

    async def delete(self, names: Sequence[str]) -> None:
        await self._pause()
        await super().delete(names)
        await self._pause()

    async def scan(self) -> AsyncIterator[BlobInfo]:
        async for info in super().scan():
            await self._pause()
            yield info


class Schedule:
    """One round of puts, deletions and jobs that begin in an order that the seed says."""

    def __init__(self, one: Works, s3: PausingTier, seed: int) -> None:
        self.one, self.s3 = one, s3
        self.chance = s3.chance = random.Random(seed)
        self.live: set[int] = set()
        self.unsure: set[int] = set()

    async def put(self, number: int) -> None:
        part = self.one.registered
        where = self.chance.choice((Durability.STAGED, Durability.NVME, Durability.S3))
        report = await self.one.client.put(
            part, [self._key(number)], [payloads_of(part, KEYS)[number]], durability=where
        )
        if report.outcomes[0] not in (PutOutcome.STORED, PutOutcome.HAVE):
            self.unsure.add(number)
        elif where is not Durability.STAGED:
            self.live.add(number)

    async def delete(self, number: int) -> None:
        self.unsure.add(number)
        await self.one.client.delete(self.one.registered, [self._key(number)])

    async def job(self) -> None:
        crew = self.one.crew
        looks = (crew.look_for_orphans, crew.look_for_orphans)
        await self.chance.choice((*looks, crew.sweep_everywhere, crew.drain_everywhere, crew.evict))()

    async def time(self) -> None:
        await self.one.wait(self.chance.choice(TIMES_S))

    async def go(self) -> None:
        acts = [self.put(number) for number in range(KEYS)]
        acts += [self.delete(self.chance.randrange(KEYS)) for _ in range(2)]
        acts += [self.job() for _ in range(8)] + [self.time() for _ in range(4)]
        self.chance.shuffle(acts)
        tasks = []
        for act in acts:
            tasks.append(asyncio.create_task(act))
            for _ in range(self.chance.randrange(8)):
                await asyncio.sleep(0)
        ended = asyncio.gather(*tasks, return_exceptions=True)
        while not ended.done():  # time goes on for those that rest between two looks
            await self.one.wait(PAUSE_SECONDS_MAX)
        for result in await ended:
            if isinstance(result, BaseException):
                raise result

    async def check(self) -> None:
        """What was acknowledged and not deleted is whole on disk or in S3, and read from there."""
        names = {*self.s3.names, *("/".join(file.parts[-4:]) for file in self.one.blob_files())}
        for _ in range(2):  # whoever was taken for an orphan in between is looked at once more, a grace later
            await self.one.wait(TIMES_S[-1])
            await self.one.crew.look_for_orphans()
        for name in names:  # read from the tiers, not from memory
            self.one.rooms.staging.drop(name)
        part = self.one.registered
        keys = [self._key(number) for number in range(KEYS)]
        _, found = await read(self.one.client, part, keys)
        wanted = payloads_of(part, KEYS)
        for number, one in enumerate(found):
            assert one is None or one == wanted[number], "law 3"
            assert one is not None or number not in self.live - self.unsure, f"law 1: {number} was live and is gone"
        await self.one.client.delete(part, keys)
        await self.one.check()

    def _key(self, number: int) -> bytes:
        return b"key-%d" % number


async def schedules(folder: Path, count: int) -> None:
    s3 = PausingTier()
    async with works(folder, s3=s3, chunk=4096) as one:
        lived = 0
        for seed in range(count):
            schedule = Schedule(one, s3, seed)
            try:
                await schedule.go()
                await schedule.check()
            except Exception as error:
                error.add_note(f"seed {seed}")
                raise
            lived += len(schedule.live - schedule.unsure)
        assert lived > count, "much of it was acknowledged and is there"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [30, pytest.param(1_000, marks=pytest.mark.slow)])
def test_S13_nothing_live_is_cleared_up_in_any_order(tmp_path: Path, count: int) -> None:
    run(schedules(tmp_path, count), timeout=880)
