"""One exchange of windows with the gateway, awaited by an engine's thread that must not wait for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from typing import Any

from kvgw.engines.loop import LoopThread
from kvgw.engines.windows import Windows
from kvgw.errors import Code, Outage


class Transfer:
    """Windows on loan, of one caller. They go back when nobody uses them any more: a coroutine may outlive its caller.

    A context: leaving it gives the windows back, or leaves that to the coroutine where it still runs (law 7).
    """

    def __init__(self, pool: Windows, windows: list[memoryview]) -> None:
        self.windows = windows
        self._pool = pool
        self._lock = threading.Lock()
        self._running = False
        self._left = False

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._left = True
            if self._running:
                return
        self._pool.give(self.windows)

    def run(self, loop: LoopThread, work: Callable[[], Coroutine[Any, Any, int]], limit_s: float) -> int:
        """Run `work`, which uses the windows and ends by itself, and wait for it. Raises `Outage` after `limit_s`."""
        with self._lock:
            self._running = True
        try:
            future = loop.submit(lambda: self._run(work))
        except Outage:
            self._running = False  # it was never started
            raise
        try:
            return future.result(limit_s)
        except TimeoutError as error:
            raise Outage(f"no answer within {limit_s:g} s", Code.DEADLINE) from error

    async def _run(self, work: Callable[[], Coroutine[Any, Any, int]]) -> int:
        try:
            return await work()
        finally:
            with self._lock:
                self._running = False
                left = self._left
            if left:
                self._pool.give(self.windows)
