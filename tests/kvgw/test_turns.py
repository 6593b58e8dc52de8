"""Whose turn it is: places for requests at work, and the threads' time, between tenants (I16, law 6)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable
from pathlib import Path
from unittest import mock
from uuid import UUID

import pytest

from kvgw.fairqueue import FairQueue
from kvgw.gateway import turns as module
from kvgw.gateway.turns import Turns, step_aside
from kvgw.runtime import ThreadWorkers, payer
from tests.support.aio import aio
from tests.support.gateways import house

QUIET, LOUD, THIRD = UUID(int=1), UUID(int=2), UUID(int=3)


class Crowd:
    """Requests that note when they have their turn, and work until they are told to end."""

    def __init__(self, places: int) -> None:
        self.turns = Turns(places)
        self.begun: list[UUID] = []
        self.most = 0
        self._ends: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self, tenant: UUID, count: int = 1) -> None:
        self.tasks += [asyncio.create_task(self._request(tenant)) for _ in range(count)]
        await asyncio.sleep(0)

    async def _request(self, tenant: UUID) -> None:
        async with self.turns.of(tenant):
            self.begun.append(tenant)
            self.most = max(self.most, self.turns.working)
            end = asyncio.Event()
            self._ends.append(end)
            await end.wait()

    async def end_one(self) -> None:
        self._ends.pop(0).set()
        for _ in range(4):
            await asyncio.sleep(0)

    async def end_all(self) -> None:
        while self._ends:
            await self.end_one()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert (self.turns.working, self.turns.waiting) == (0, 0), "law 7"


@aio
async def test_I16_a_quiet_tenant_works_at_once_however_many_of_another_wait() -> None:
    crowd = Crowd(2)
    await crowd.come(LOUD, 50)
    await crowd.come(QUIET)
    assert crowd.begun == [LOUD, LOUD, QUIET], "one place more than there are, for who has none"
    await crowd.come(THIRD)
    assert crowd.begun[3:] == [], "but only one"
    await crowd.end_one()
    assert crowd.begun[3:] == [THIRD], "and before those who came long before it"
    assert crowd.most == 3
    await crowd.end_all()


@aio
async def test_I16_tenants_take_turns_whatever_each_of_them_asks() -> None:
    crowd = Crowd(1)
    await crowd.come(LOUD, 40)
    await crowd.come(QUIET, 10)
    await crowd.come(THIRD, 10)
    await crowd.end_all()
    assert len(crowd.begun) == 60
    counted = Counter(crowd.begun[:30])
    assert all(abs(count - 10) <= 1 for count in counted.values()), counted


@aio
async def test_law_7_who_gives_up_waiting_leaves_its_place_to_the_next() -> None:
    crowd = Crowd(1)
    await crowd.come(LOUD, 3)
    crowd.tasks[1].cancel()
    await asyncio.sleep(0)
    await crowd.end_one()
    assert len(crowd.begun) == 2, "the third"
    await crowd.come(LOUD)
    await crowd.end_one()
    crowd.tasks[3].cancel()  # its place is given and its cancellation decided in one step of the loop
    await crowd.end_all()
    assert crowd.turns.working == 0


@aio
async def test_who_keeps_a_place_for_long_while_others_wait_has_it_no_more() -> None:
    with mock.patch.object(module, "PATIENCE_SECONDS", 0.01):
        crowd = Crowd(1)
        await crowd.come(LOUD, 3)
        async with asyncio.timeout(5):
            while len(crowd.begun) < 3:
                await asyncio.sleep(0.001)
        assert crowd.turns.working <= 1
        await crowd.end_all()


@aio
async def test_who_waits_for_something_else_steps_aside_wherever_it_is_in_its_request() -> None:
    turns, go_on, order = Turns(1), asyncio.Event(), []

    async def reads_from_a_tier() -> None:
        step_aside()
        step_aside()  # of several chunks each does
        await go_on.wait()
        order.append("read")

    async def first() -> None:
        async with turns.of(LOUD), asyncio.TaskGroup() as tasks:
            tasks.create_task(reads_from_a_tier())

    async def second() -> None:
        async with turns.of(LOUD):
            order.append("second")
            go_on.set()

    async with asyncio.timeout(5):
        await asyncio.gather(first(), second())
    assert order == ["second", "read"]
    step_aside()  # nobody's
    assert turns.working == 0


@aio
async def test_how_many_wait_for_their_turn_is_told(tmp_path: Path) -> None:
    async with house("embedded", tmp_path / "gw") as gateway:
        turns, go_on = gateway.opened.rooms.turns, asyncio.Event()

        def told() -> float | None:
            gateway.opened.refresh_gauges()
            return gateway.opened.rooms.metrics.registry.get_sample_value("kvgw_turns_waiting")

        async def request() -> None:
            async with turns.of(LOUD):
                await go_on.wait()

        before = told()
        with mock.patch.object(module, "PATIENCE_SECONDS", 60):
            tasks = [asyncio.create_task(request()) for _ in range(200)]
            await asyncio.sleep(0)
            working, waiting = turns.working, told()
            go_on.set()
            await asyncio.gather(*tasks)
        assert 0 < working < 200
        assert (before, waiting, told()) == (0, 200 - working, 0)


def order_of(jobs: Iterable[tuple[Hashable, str]]) -> list[str]:
    """In which order one thread does what was asked of it while it was busy."""
    order: list[str] = []

    async def asked() -> None:
        workers, go_on = ThreadWorkers(1), threading.Event()

        async def ask(who: Hashable, name: str) -> None:
            payer.set(who)
            await workers.run(lambda: order.append(name))

        busy = asyncio.create_task(workers.run(lambda: go_on.wait(20)))
        await asyncio.sleep(0)
        tasks = [asyncio.create_task(ask(who, name)) for who, name in jobs]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(busy, *tasks)
        workers.close()

    asyncio.run(asked())
    return order


def test_I16_a_thread_serves_payers_in_turns_and_each_in_its_order() -> None:
    jobs = [("loud", f"loud {at}") for at in range(20)] + [("quiet", "quiet 0"), ("quiet", "quiet 1")]
    order = order_of(jobs)
    assert set(order[:4]) == {"loud 0", "loud 1", "quiet 0", "quiet 1"}, order
    assert [name for name in order if name.startswith("loud")] == [f"loud {at}" for at in range(20)]


@aio
async def test_I16_who_had_long_pieces_of_a_threads_time_waits_for_those_with_short_ones() -> None:
    workers, order = ThreadWorkers(1), []
    waits = threading.Event()

    async def ask(who: str) -> None:
        payer.set(who)
        await workers.run(lambda: order.append(who))

    async def long_ago() -> None:
        payer.set("loud")
        await workers.run(lambda: time.sleep(0.03))

    await asyncio.create_task(long_ago())
    busy = asyncio.create_task(workers.run(lambda: waits.wait(20)))
    await asyncio.sleep(0)
    tasks = [asyncio.create_task(ask("loud")), *(asyncio.create_task(ask("quiet")) for _ in range(10))]
    await asyncio.sleep(0)
    waits.set()
    await asyncio.gather(busy, *tasks)
    workers.close()
    assert order == ["quiet"] * 10 + ["loud"], "ten milliseconds are less than thirty"


def test_an_idle_owner_saves_nothing_up_and_is_forgotten() -> None:
    queue: FairQueue[str] = FairQueue()
    for at in range(5000):
        queue.push(at, "once", 1.0)
        assert queue.pop() == "once"
    assert len(queue._ends) <= 1025, "law 9"
    for _ in range(100):
        queue.push("busy", "busy", 1.0)
    for _ in range(50):
        queue.pop()
    for _ in range(50):
        queue.push("late", "late", 1.0)
    assert Counter(queue.pop() for _ in range(20)) == {"busy": 10, "late": 10}, "not twenty of the late one's"
    with pytest.raises(IndexError):
        FairQueue[str]().pop()


@aio
async def test_I16_who_was_alone_for_long_owes_nobody_anything() -> None:
    turns, alone, comer = Turns(1), QUIET, LOUD
    for _ in range(1000):
        async with turns.of(alone):
            pass
    order: list[UUID] = []

    async def work(tenant: UUID) -> None:
        async with turns.of(tenant):
            order.append(tenant)

    async with turns.of(alone), turns.of(comer):  # its own place, and the one beyond
        tasks = [asyncio.create_task(work(tenant)) for tenant in [comer] * 6 + [alone] * 6]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order[:6].count(alone) >= 2, "an idle tenant saves up nothing"


@aio
async def test_a_place_is_lost_at_the_very_moment_for_which_the_timer_was_set() -> None:
    """Found by the simulation: where the sum is rounded, the timer was due and nobody late, again and again."""
    patience = module.PATIENCE_SECONDS
    since = next(at for at in (step / 10 for step in range(10_000)) if (at + patience) - patience < at)
    crowd = Crowd(1)
    await crowd.come(LOUD)
    crowd.turns._working = dict.fromkeys(crowd.turns._working, since)
    with mock.patch.object(asyncio.get_running_loop(), "time", lambda: since + patience):
        crowd.turns._tire()
    assert crowd.turns.working == 0
    await crowd.end_all()
