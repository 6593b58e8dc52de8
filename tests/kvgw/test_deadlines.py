"""Deadlines kept by one timer end a block as `asyncio.timeout` would, and take nothing else for their own end."""

from __future__ import annotations

import asyncio

import pytest

from kvgw.deadlines import Deadlines
from tests.support.aio import aio, run


@aio
async def test_what_takes_longer_ends_and_the_task_goes_on() -> None:
    deadlines = Deadlines()
    for _ in range(2):
        with pytest.raises(TimeoutError), deadlines.within(0.001):
            await asyncio.Event().wait()
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0
    with deadlines.within(5):
        await asyncio.sleep(0)


@aio
async def test_a_cancellation_stays_one_even_when_the_time_is_over_too() -> None:
    deadlines = Deadlines()

    async def wait(seconds: float) -> None:
        with deadlines.within(seconds):
            await asyncio.Event().wait()

    other = asyncio.create_task(wait(60))
    await asyncio.sleep(0)
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await other
    both = asyncio.create_task(wait(0))
    await asyncio.sleep(0)
    (block,) = deadlines._running
    block.expire()
    both.cancel()
    with pytest.raises(asyncio.CancelledError):
        await both
    assert not deadlines._running


@pytest.mark.parametrize("shared", [False, True])
@aio
async def test_the_outer_deadline_ends_the_inner_block_and_only_as_its_own(shared: bool) -> None:
    outer = Deadlines()
    inner = outer if shared else Deadlines()
    with pytest.raises(TimeoutError), outer.within(0.001):
        try:
            with inner.within(60):
                await asyncio.Event().wait()
        except TimeoutError:
            pytest.fail("the inner block had time")
    with outer.within(60):
        with pytest.raises(TimeoutError), inner.within(0.001):
            await asyncio.Event().wait()
        await asyncio.sleep(0)


@aio
async def test_law9_there_is_one_timer_however_many_there_are() -> None:
    deadlines = Deadlines()
    loop = asyncio.get_running_loop()
    set_at: list[float] = []
    call_at = loop.call_at
    loop.call_at = lambda when, *rest, **named: (set_at.append(when), call_at(when, *rest, **named))[1]  # type: ignore[method-assign]  # counts
    for _ in range(100):
        with deadlines.within(60):
            pass
    assert len(set_at) == 1
    ended: list[int] = []

    async def wait(number: int, seconds: float) -> None:
        with pytest.raises(TimeoutError), deadlines.within(seconds):
            await asyncio.Event().wait()
        ended.append(number)

    await asyncio.gather(*(wait(number, 0.002 * number) for number in (3, 1, 2, 5, 4)))
    assert sorted(ended) == [1, 2, 3, 4, 5]
    assert len(set_at) < 9, "one for each end at most, and those that a sooner one replaced"
    deadlines.close()
    assert deadlines._timer is None and not deadlines._running


def test_another_event_loop_may_go_on_with_it() -> None:
    deadlines = Deadlines()

    async def leave_a_timer() -> None:
        with deadlines.within(0.001):
            await asyncio.sleep(0)

    async def wait() -> None:
        with pytest.raises(TimeoutError), deadlines.within(0.01):
            await asyncio.Event().wait()

    run(leave_a_timer())
    run(wait())


@aio
async def test_closing_takes_no_deadline_from_what_still_runs() -> None:
    deadlines = Deadlines()
    with pytest.raises(TimeoutError), deadlines.within(0.001):
        deadlines.close()
        await asyncio.Event().wait()


@aio
async def test_a_block_that_is_renewed_has_all_of_its_time_once_more() -> None:
    deadlines, loop = Deadlines(), asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(TimeoutError), deadlines.within(0.2) as block:
        await asyncio.sleep(0.15)
        block.renew()
        await asyncio.Event().wait()
    assert loop.time() - began >= 0.35
