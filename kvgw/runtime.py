"""Clock, randomness and worker threads: the seams through which time and chance enter.

Everything above and below takes these as parameters, so that a whole gateway can run on a virtual clock in one
thread. `System*` are the real ones; tests bring their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import time
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Final, Protocol, TypeVar

from kvgw.fairqueue import FairQueue

Result = TypeVar("Result")

payer: Final[ContextVar[Hashable]] = ContextVar("payer", default=None)
"""Whose work this is: threads take turns between payers. None: the gateway's own."""

USUAL_SECONDS: Final = 0.001
"""What a piece of work is thought to take before it was done."""


class Clock(Protocol):
    """Time: `monotonic` seconds for deadlines, `now_ms` for what is written down."""

    def monotonic(self) -> float: ...

    def now_ms(self) -> int: ...

    async def sleep(self, seconds: float) -> None: ...


class Rng(Protocol):
    """Chance: `token` for keys and names, `jitter` to spread retries."""

    def token(self, size: int) -> bytes: ...

    def jitter(self) -> float: ...


class Workers(Protocol):
    """Worker threads; see `storage.ports.Workers` for the promise on cancellation."""

    async def run(self, work: Callable[[], Result]) -> Result: ...

    def wanted(self) -> bool:
        """Whether work waits for a thread: what could go on for long may end here instead. For any thread to ask."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SystemRng:
    """The operating system's generator for secrets; an ordinary one for jitter."""

    def token(self, size: int) -> bytes:
        return secrets.token_bytes(size)

    def jitter(self) -> float:
        """A number in [0, 1), not for secrets."""
        return random.random()  # noqa: S311  # jitter is no secret


class ThreadWorkers:
    """A fixed pool of threads, sized to the CPUs that this process may use; each is started when it may be of use.

    A visit to a thread is what most requests wait for: an executor's, with its two futures, costs more. Whose payer had
    least of the threads' time is next, so that nobody waits for more than the pieces in hand because others want much.
    """

    def __init__(self, threads: int | None = None, name: str = "kvgw-worker") -> None:
        self.count = threads if threads is not None else max(2, usable_cpus())
        """How many threads there are at most."""
        self._name = name
        self._jobs: FairQueue[_Job] = FairQueue()
        self._lock = Lock()
        """Of `_jobs`; never held for long."""
        self._calls: SimpleQueue[bool] = SimpleQueue()
        """One for each job, so that a thread waits for nothing but this; False: there will be none any more."""
        self._threads: list[Thread] = []
        self._closed = False

    async def run(self, work: Callable[[], Result]) -> Result:
        if self._closed:
            raise RuntimeError(f"the threads {self._name} have ended: nothing can be run in them any more")
        job = _Job(work, asyncio.get_running_loop(), payer.get())
        del work
        if len(self._threads) < self.count:
            thread = Thread(target=self._serve, name=f"{self._name}_{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        with self._lock:
            self._jobs.push(job.payer, job, USUAL_SECONDS)
        self._calls.put(True)
        result: Result = await job.end()
        return result

    def wanted(self) -> bool:
        return len(self._jobs) > 0

    def _serve(self) -> None:
        """What each thread does until it is told to end."""
        while self._calls.get():
            with self._lock:
                job = self._jobs.pop()
            began = time.monotonic()
            job.run()
            more = time.monotonic() - began - USUAL_SECONDS
            if more > 0:
                with self._lock:
                    self._jobs.charge(job.payer, more)
            job.report()
            del job  # its result is whoever's waits for it, not this thread's until the next one comes

    def close(self) -> None:
        """Wait for the work that was handed over, and end the threads."""
        self._closed = True
        for _ in self._threads:
            self._calls.put(False)
        for thread in self._threads:
            thread.join()


class _Job:
    """Work for a thread, and whoever waits for it in an event loop."""

    __slots__ = ("_error", "_loop", "_over", "_result", "_waiter", "_work", "payer")

    def __init__(self, work: Callable[[], Any], loop: asyncio.AbstractEventLoop, payer: Hashable) -> None:
        self.payer = payer
        self._work: Callable[[], Any] | None = work
        self._loop = loop
        self._waiter: asyncio.Future[None] = loop.create_future()
        self._over = False
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """In a thread. It lets go of the work, and of the memory that it closes over."""
        work, self._work = self._work, None
        assert work is not None, "a job runs once"
        try:
            self._result = work()
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            self._error = error

    def report(self) -> None:
        """In the thread, when it has run."""
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._over = True
        if not self._waiter.done():
            self._waiter.set_result(None)

    async def end(self) -> Any:
        """Its result, when the thread has finished; a cancellation goes on only then (law 7)."""
        cancelled: asyncio.CancelledError | None = None
        while not self._over:
            try:
                await self._waiter
            except asyncio.CancelledError as error:  # it has cancelled what was waited for, too
                cancelled, self._waiter = error, self._loop.create_future()
        failure = cancelled or self._error  # the work's own failure, if any, gives way to the cancellation
        self._error = None
        if failure is None:
            return self._result
        try:
            raise failure
        finally:
            del cancelled, failure  # a failure that knows a frame that knows it would keep the work's memory in use


async def finish(future: asyncio.Future[Result]) -> Result:
    """Await `future` to its end even if this task is cancelled; then the cancellation goes on (law 7)."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # its own failure, if any, gives way to the cancellation
        raise cancelled
    return future.result()


def release_frames(error: BaseException) -> None:
    """Let go of what the frames that an error and its causes came through still hold, such as views of memory.

    Whoever goes on after an error wants that: where a frame knows the error, both live until garbage is collected.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__


def runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether it is what runs here: one that has ended is deaf, and a forked child leaves it to its parent."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def usable_cpus() -> int:
    """CPUs that this process may run on: its affinity, bounded by a cgroup's CPU quota where one is set."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, _cgroup_cpus() or affinity))


def _cgroup_cpus() -> int | None:
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else -(-int(quota) // int(period))
