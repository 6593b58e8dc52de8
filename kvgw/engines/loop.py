"""A thread with an event loop, for engines that are not asynchronous: the client lives there and nowhere else."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from kvgw.errors import Code, Outage

Result = TypeVar("Result")

_CLOSE_S: Final = 5.0


class LoopThread:
    """Runs coroutines of any thread's callers in one daemon thread, which starts with the first of them.

    The thread does not survive a fork: open it in the process that uses it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, make: Callable[[], Coroutine[Any, Any, Result]]) -> concurrent.futures.Future[Result]:
        """Start the coroutine that `make` returns; never blocks. Raises `Outage` after `close`."""
        with self._lock:
            if self._closed:
                raise Outage("the adapter is shut down")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(make(), self._loop)

    def call(self, make: Callable[[], Coroutine[Any, Any, Result]], limit_s: float) -> Result:
        """Run a coroutine and wait for its result, `limit_s` seconds at most.

        Raises `Outage` when the time is over. The coroutine is then cancelled, but may still be running: memory that
        it uses belongs to it until its future is done.
        """
        future = self.submit(make)
        try:
            return future.result(limit_s)
        except concurrent.futures.TimeoutError as error:
            if future.done():  # the coroutine's own TimeoutError
                raise
            future.cancel()
            raise Outage(f"no answer within {limit_s:g} s", Code.DEADLINE) from error

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None, *, limit_s: float = _CLOSE_S) -> bool:
        """Cancel what runs, run `last`, and end the thread; whether it has ended within `limit_s`.

        A second call does nothing.
        """
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive():
            return True
        asyncio.run_coroutine_threadsafe(_end(last), loop).add_done_callback(
            lambda _: loop.call_soon_threadsafe(loop.stop)
        )
        thread.join(limit_s)
        return not thread.is_alive()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _end(last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
    """Cancel every other task of this loop, wait until all have ended, and run what is left to do."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    if last is not None:
        await last()
