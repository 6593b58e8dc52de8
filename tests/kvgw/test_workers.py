"""Worker threads: work ends before who waits for it goes on, whatever happens meanwhile (law 7)."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from kvgw.runtime import ThreadWorkers
from tests.support.aio import aio


class Memory:
    """Something that work closes over."""


@aio
async def test_law_7_cancelled_it_waits_for_the_thread_however_often_it_is_asked() -> None:
    workers, inside, go_on, ended = ThreadWorkers(1), threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        assert go_on.wait(20)
        ended.set()

    task = asyncio.create_task(workers.run(work))
    while not inside.is_set():
        await asyncio.sleep(0.001)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done(), "the thread still uses what is the operation's"
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    workers.close()


@aio
async def test_law_7_cancelled_before_a_thread_has_begun_it_waits_too() -> None:
    workers, go_on, done = ThreadWorkers(1), threading.Event(), []
    first = asyncio.create_task(workers.run(lambda: go_on.wait(20)))
    second = asyncio.create_task(workers.run(lambda: done.append(2)))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    assert not second.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert (await first, done) == (True, [2])
    workers.close()


@aio
async def test_a_failure_of_the_work_gives_way_to_the_cancellation() -> None:
    workers, go_on = ThreadWorkers(1), threading.Event()

    def work() -> None:
        assert go_on.wait(20)
        raise ZeroDivisionError

    task = asyncio.create_task(workers.run(work))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    workers.close()


@aio
async def test_what_was_worked_with_is_let_go_with_the_answer_also_when_it_failed() -> None:
    workers = ThreadWorkers(1)
    gc.disable()  # nothing of it may wait for a search for cycles: it is a view of somebody's memory
    try:
        for fails in (False, True):
            memory = Memory()
            gone = weakref.ref(memory)

            def work(memory: Memory = memory, fails: bool = fails) -> int:
                if fails:
                    raise KeyError(id(memory))
                return id(memory)

            handed_over = [work]
            del work, memory
            try:
                await workers.run(handed_over.pop())
            except KeyError as error:
                error.__traceback__ = None
            assert gone() is None
    finally:
        gc.enable()
        workers.close()


@aio
async def test_work_is_done_by_so_many_threads_at_once_and_no_more() -> None:
    workers, lock = ThreadWorkers(3, "test"), threading.Lock()
    now, most, names = 0, 0, set[str]()
    meeting = threading.Barrier(3)

    def work() -> None:
        nonlocal now, most
        with lock:
            now, most = now + 1, max(most, now + 1)
            names.add(threading.current_thread().name)
        meeting.wait(20)
        with lock:
            now -= 1

    await asyncio.gather(*(workers.run(work) for _ in range(9)))
    assert (most, names) == (3, {"test_0", "test_1", "test_2"})
    workers.close()


@aio
async def test_closing_waits_for_what_was_handed_over_and_then_nothing_is_taken() -> None:
    workers, done = ThreadWorkers(1), []
    tasks = [asyncio.create_task(workers.run(lambda number=number: done.append(number))) for number in range(5)]  # type: ignore[misc]
    await asyncio.sleep(0)
    workers.close()
    assert done == [0, 1, 2, 3, 4]
    await asyncio.gather(*tasks)
    with pytest.raises(RuntimeError, match="have ended"):
        await workers.run(lambda: None)


def test_a_loop_that_is_gone_ends_no_thread() -> None:
    workers, go_on, ended = ThreadWorkers(1), threading.Event(), threading.Event()
    loop = asyncio.new_event_loop()

    def work() -> None:
        assert go_on.wait(20)
        ended.set()

    task = loop.create_task(workers.run(work))
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    go_on.set()
    assert ended.wait(20)
    assert asyncio.run(workers.run(lambda: 7)) == 7, "the thread went on"
    workers.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
