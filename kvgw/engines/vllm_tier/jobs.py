"""Jobs on their way, and what became of those that ended. A job's memory is the job's until it has ended (law 7)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvgw.engines.counters import Counters
from kvgw.engines.loop import LoopThread
from kvgw.engines.vllm_tier.lookups import Whose
from kvgw.errors import Outage
from kvgw.runtime import Clock


@dataclass(frozen=True, slots=True)
class Job:
    """A transfer between rows of the primary tier and the gateway, as vLLM asked for it."""

    number: int
    load: bool
    whose: Whose
    keys: tuple[bytes, ...]
    """vLLM's names of the chunks."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a job. `done`: keys of the chunks that were read, or that the gateway has now."""

    job: Job
    done: frozenset[bytes]
    seconds: float

    @property
    def success(self) -> bool:
        return len(self.done) == len(self.job.keys)


class Allowance:
    """How many chunks may be on their way at once. Any thread may call it."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._left = count

    def take(self, count: int) -> int:
        """As many of `count` as are left; they are taken until `give`."""
        with self._lock:
            taken = min(count, self._left)
            self._left -= taken
        return taken

    def give(self, count: int) -> None:
        with self._lock:
            self._left += count


class Jobs:
    """Runs jobs in the adapter's thread. Any thread may call it."""

    def __init__(self, loop: LoopThread, counters: Counters, clock: Clock) -> None:
        self._loop = loop
        self._counters = counters
        self._clock = clock
        self._changed = threading.Condition()
        self._running = 0
        self._ended: list[Ended] = []

    def start(self, job: Job, work: Callable[[], Coroutine[Any, Any, frozenset[bytes]]]) -> None:
        """Begin a job; never blocks. `work` ends by its own deadline, and touches no memory when it has ended."""
        started = self._clock.monotonic()
        with self._changed:
            self._running += 1
        try:
            future = self._loop.submit(work)
        except Outage:  # closed: it was never started
            self._end(job, frozenset(), started)
            return
        future.add_done_callback(partial(self._finished, job, started))

    def refuse(self, job: Job) -> None:
        """The job ends without having been begun."""
        with self._changed:
            self._ended.append(Ended(job, frozenset(), 0.0))

    def take(self) -> list[Ended]:
        """The jobs that ended since the last call."""
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Wait until every job has ended; each does by its own deadline."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running)

    def _finished(self, job: Job, started: float, future: Future[frozenset[bytes]]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._counters.reason("loads_failed" if job.load else "store_outages", repr(error))
        self._end(job, frozenset() if future.cancelled() or error is not None else future.result(), started)

    def _end(self, job: Job, done: frozenset[bytes], started: float) -> None:
        with self._changed:
            self._running -= 1
            self._ended.append(Ended(job, done, self._clock.monotonic() - started))
            self._changed.notify_all()
