"""Clock, randomness and worker threads: the seams through which time and chance enter.

Everything above and below takes these as parameters, so that a whole gateway can run on a virtual clock in one
thread. `System*` are the real ones; tests bring their own.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

Result = TypeVar("Result")


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
    """A fixed pool of threads, sized to the CPUs that this process may use."""

    def __init__(self, threads: int | None = None, name: str = "kvgw-worker") -> None:
        count = threads if threads is not None else max(2, usable_cpus())
        self._pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix=name)

    async def run(self, work: Callable[[], Result]) -> Result:
        handed_over = [work]
        del work
        # The thread lets go of `work`, and of the memory that it closes over, before its result can be seen here.
        future = asyncio.get_running_loop().run_in_executor(self._pool, lambda: handed_over.pop()())  # noqa: PLW0108  # popped when it runs
        return await finish(future)

    def close(self) -> None:
        """Wait for running work and end the threads."""
        self._pool.shutdown(wait=True)


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


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first real error of a task group, whose other tasks were merely cancelled for it."""
    for error in group.exceptions:
        return first_cause(error) if isinstance(error, BaseExceptionGroup) else error
    return group


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
