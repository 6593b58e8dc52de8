"""Bounded concurrency: never more at once, strictly in order, nothing lost to cancellation."""

from __future__ import annotations

import asyncio
import random
from contextlib import AbstractAsyncContextManager

import pytest

from storage.errors import BlobMissing
from storage.limited import LimitedStatistics, LimitedTier
from storage.memory import MemoryTier
from storage.tier import Tier
from tests.support.aio import aio
from tests.support.tier_conformance import TierConformance, name, opened

IDLE = LimitedStatistics(operations=0, bytes_in_flight=0, waiting=0)


class TestLimitedTier(TierConformance):
    def open_tier(self) -> AbstractAsyncContextManager[Tier]:
        return opened(LimitedTier(MemoryTier(), 2, bytes_max=1000))


class GatedTier(MemoryTier):
    """Puts finish when the test says so; notes what ran at once, and in which order puts began."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.began: list[str] = []
        self.now = 0
        self.now_bytes = 0
        self.peak = 0
        self.peak_bytes = 0

    async def put(self, name: str, sealed: memoryview) -> None:
        self.began.append(name)
        self.now += 1
        self.now_bytes += len(sealed)
        self.peak = max(self.peak, self.now)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        try:
            await self.go.wait()
            await super().put(name, sealed)
        finally:
            self.now -= 1
            self.now_bytes -= len(sealed)


async def settle() -> None:
    """Let every task run as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


@aio
async def test_never_more_operations_than_allowed_and_in_order_of_arrival() -> None:
    inner = GatedTier()
    tier = LimitedTier(inner, 3)
    async with asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(tier.put(name(number), memoryview(b"x")))
        await settle()
        assert tier.statistics == LimitedStatistics(operations=3, bytes_in_flight=3, waiting=7)
        inner.go.set()
    assert inner.peak == 3
    assert inner.began == [name(number) for number in range(10)]
    assert tier.statistics == IDLE


@aio
async def test_never_more_bytes_than_allowed_and_large_ones_are_not_overtaken() -> None:
    inner = GatedTier()
    tier = LimitedTier(inner, 100, bytes_max=1000)
    sizes = [600, 300, 500, 100, 5000, 1]
    async with asyncio.TaskGroup() as group:
        for number, size in enumerate(sizes):
            group.create_task(tier.put(name(number), memoryview(bytes(size))))
        await settle()
        assert tier.statistics == LimitedStatistics(operations=2, bytes_in_flight=900, waiting=4)
        inner.go.set()
    assert inner.began == [name(number) for number in range(len(sizes))]
    assert inner.peak_bytes == 5000, "a transfer above the limit runs alone"
    assert tier.statistics == IDLE


@aio
async def test_a_cancelled_large_waiter_lets_the_small_ones_behind_it_in() -> None:
    inner = GatedTier()
    tier = LimitedTier(inner, 100, bytes_max=1000)
    first = asyncio.create_task(tier.put(name(1), memoryview(bytes(600))))
    large = asyncio.create_task(tier.put(name(2), memoryview(bytes(900))))
    small = asyncio.create_task(tier.put(name(3), memoryview(bytes(100))))
    await settle()
    assert inner.began == [name(1)]
    large.cancel()
    await settle()
    assert inner.began == [name(1), name(3)]
    inner.go.set()
    await asyncio.gather(first, small)
    assert tier.statistics == IDLE


@pytest.mark.parametrize("seed", range(20))
@aio
async def test_cancellation_at_any_moment_loses_no_place(seed: int) -> None:
    choose = random.Random(seed)
    inner = GatedTier()
    tier = LimitedTier(inner, 2, bytes_max=50)
    tasks = [asyncio.create_task(tier.put(name(number), memoryview(bytes(40)))) for number in range(12)]
    for task in choose.sample(tasks, 8):
        for _ in range(choose.randrange(3)):
            await asyncio.sleep(0)
        if choose.random() < 0.5:
            inner.go.set()
        task.cancel()
    inner.go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert tier.statistics == IDLE
    await tier.put(name(99), memoryview(b"x"))


@aio
async def test_a_failed_operation_gives_its_place_back() -> None:
    tier = LimitedTier(MemoryTier(), 1)
    for _ in range(3):
        with pytest.raises(BlobMissing):
            await tier.get_into(name(1), memoryview(bytearray(1)))
    assert tier.statistics == IDLE


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="not 0"):
        LimitedTier(MemoryTier(), 0)
    with pytest.raises(ValueError, match="not 0"):
        LimitedTier(MemoryTier(), 1, bytes_max=0)
