"""Laws whose guards are small and far from where their loss would be seen: each by itself."""

from __future__ import annotations

import asyncio
import threading

from kvgw.runtime import ThreadWorkers
from tests.support.aio import run


def test_a_worker_threads_memory_is_its_own_until_it_has_finished() -> None:
    """Law 7: a coroutine that is cancelled goes on only when the thread that works for it has finished."""
    began, may_end = threading.Event(), threading.Event()
    finished: list[str] = []

    def work() -> None:
        began.set()
        may_end.wait(10)
        finished.append("thread")

    async def main() -> None:
        workers = ThreadWorkers(1)

        async def caller() -> None:
            try:
                await workers.run(work)
            finally:
                finished.append("caller")

        task = asyncio.create_task(caller())
        while not began.is_set():
            await asyncio.sleep(0.001)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        may_end.set()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        workers.close()

    run(main())
    assert finished == ["thread", "caller"], "law 7: memory was given back while a thread was using it"
