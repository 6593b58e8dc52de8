"""Room on a full disk: a durable PUT has eviction make some, and is told at once where there is none to be made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from kvgw.errors import Outage
from kvgw.gateway.diskroom import REST_SECONDS, DiskRoom
from kvgw.maintenance import evict
from kvgw.maintenance.evict import HIGH_WATER, LOW_WATER
from kvgw.model import PutOutcome
from storage.errors import TierFull, TierUnavailable
from tests.kvgw.maintenance_bench import CHUNK, MIB, Works, settings, works
from tests.support.aio import aio
from tests.support.manual_clock import ManualClock

STORED = PutOutcome.STORED
CAPACITY = 4 * MIB
FITS = CAPACITY // CHUNK - 1
"""Chunks, each with its header."""


@asynccontextmanager
async def evicting(one: Works) -> AsyncIterator[None]:
    """Eviction answers those who ask, and nobody looks by the clock."""
    task = asyncio.create_task(one.crew.eviction.serve())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@aio
async def test_R33_durable_puts_of_three_times_the_disk_are_all_taken_in_one_go(tmp_path: Path) -> None:
    async with works(tmp_path, chosen=settings(capacity=CAPACITY)) as one:
        async with evicting(one):
            for batch in range(3 * FITS // 8):
                assert await one.put(8, f"batch-{batch}") == [STORED] * 8
                one.clock.advance(0.1)
        assert await one.hits(8, f"batch-{3 * FITS // 8 - 1}") == list(range(8)), "what came last is there"
        assert await one.hits(8, "batch-0") == [], "what came first made way"
        assert one.nvme.statistics.used_bytes <= CAPACITY
        await one.check()


@aio
async def test_R33_many_small_chunks_make_way_in_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks in hundreds of thousands are given up in batches, one after the other, not one batch a look."""
    monkeypatch.setattr(evict, "CANDIDATES", 2)
    async with works(tmp_path, chosen=settings(capacity=CAPACITY)) as one:
        await one.put(FITS)
        # Beside these the mark for a PUT is the lower one, so that a look has several batches to give up.
        monkeypatch.setattr(evict, "HIGH_WATER", LOW_WATER)
        await one.crew.evict()
        assert one.nvme.statistics.used_bytes <= LOW_WATER * CAPACITY < HIGH_WATER * CAPACITY


@aio
async def test_a_put_is_refused_at_once_where_nothing_can_be_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with works(tmp_path, chosen=settings(capacity=CAPACITY)) as one, evicting(one):
        await one.put(FITS)

        async def refuse(names: object) -> None:
            raise TierUnavailable("the disk does not delete")

        monkeypatch.setattr(one.rooms.tiers["nvme"], "delete", refuse)
        started, looks = time.monotonic(), []
        look = one.rooms.catalog.eviction_candidates

        async def counted(*args: object) -> object:
            looks.append(args)
            return await look(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(one.rooms.catalog, "eviction_candidates", counted)
        for attempt in range(20):
            with pytest.raises(Outage, match="do not fit"):
                await one.put(1, f"more-{attempt}")
        assert time.monotonic() - started < 5, "each would have waited for half of its deadline"
        assert len(looks) == 1, "who finds nothing to give up is not asked again and again"
        await one.check()


@aio
async def test_an_error_that_lives_on_keeps_no_memory_of_a_put_that_then_goes_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is published cannot be written any more, so that no slice of it may be alive (law 7)."""
    kept: list[TierFull] = []

    async def full_once(name: str, sealed: memoryview) -> None:
        if not kept:
            kept.append(TierFull("full"))
            with sealed[:1]:
                raise kept[0]
        await put(name, sealed)

    async def makes_room(since: int, limit_s: float) -> bool:
        return True

    async with works(tmp_path) as one:
        put = one.rooms.tiers["nvme"].put
        monkeypatch.setattr(one.rooms.tiers["nvme"], "put", full_once)
        monkeypatch.setattr(one.rooms.disk_room, "ask", makes_room)
        assert await one.put(1) == [STORED]
        assert kept
        assert await one.hits(1) == [0]


@aio
async def test_a_put_without_eviction_beside_it_is_refused_at_once(tmp_path: Path) -> None:
    async with works(tmp_path, chosen=settings(capacity=CAPACITY)) as one:
        await one.put(FITS)
        with pytest.raises(Outage, match="do not fit"):
            await asyncio.wait_for(one.put(1, "more"), 2)


@aio
async def test_room_is_made_once_for_all_who_ask_and_asked_for_again_after_a_rest() -> None:
    clock, rounds, gives = ManualClock(), [], [True, False, True]
    go = asyncio.Event()

    async def make_room() -> bool:
        await go.wait()
        rounds.append(len(rounds))
        return gives[rounds[-1]]

    room = DiskRoom(clock)
    assert not await room.ask(0, 60), "nobody evicts"
    task = asyncio.create_task(room.serve(make_room))
    await asyncio.sleep(0)
    asking = [asyncio.create_task(room.ask(0, 60)) for _ in range(10)]
    await asyncio.sleep(0)
    go.set()
    assert await asyncio.gather(*asking) == [True] * 10
    assert await room.ask(0, 60), "who found none before it was made need not ask for more"
    assert (rounds, room.made) == ([0], 1)
    assert not await room.ask(1, 60)
    assert not await room.ask(1, 60), "it rests"
    assert rounds == [0, 1]
    clock.advance(REST_SECONDS)
    go.clear()
    assert not await room.ask(1, 0.01), "late"
    asked = asyncio.create_task(room.ask(1, 60))
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert not await asyncio.wait_for(asked, 1), "who waits is told when eviction ends"
