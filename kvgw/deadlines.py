"""Deadlines of much that mostly ends in time, kept by one timer: entering and leaving costs the event loop nothing."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType


class Deadlines:
    """Bounds blocks of code as `asyncio.timeout` does. Belongs to whatever event loop uses it, one at a time."""

    def __init__(self) -> None:
        self._running: dict[Within, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def within(self, seconds: float) -> Within:
        """A block that takes at most so long: ``with deadlines.within(5): ...``. Raises `TimeoutError` at its end."""
        return Within(self, seconds)

    def close(self) -> None:
        """Leave no timer behind, unless something runs; whatever begins later sets one again."""
        if self._timer is not None and not self._running:
            self._timer.cancel()
            self._timer = None

    def enter(self, one: Within, seconds: float) -> None:
        """Only for `Within`."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # whatever ran in another loop has ended with it
            self._loop, self._timer = loop, None
            self._running.clear()
        one.due = loop.time() + seconds
        self._running[one] = None
        # A timer that is set for what has ended since is left alone: it costs less to ring once for nothing.
        if self._timer is None or one.due < self._timer.when():
            self._set(loop, one.due)

    def now(self) -> float:
        """Only for `Within`, while it runs: the event loop's time."""
        assert self._loop is not None, "something runs in it"
        return self._loop.time()

    def leave(self, one: Within) -> None:
        """Only for `Within`."""
        self._running.pop(one, None)

    def _set(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(due, self._ring, loop, due)

    def _ring(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._timer = None
        now = max(loop.time(), due)
        for one in [one for one in self._running if one.due <= now]:
            del self._running[one]
            one.expire()
        soonest = min((one.due for one in self._running), default=math.inf)
        if soonest < math.inf:
            self._set(loop, soonest)


class Within:
    """One block under a deadline; see `Deadlines.within`."""

    __slots__ = ("_before", "_deadlines", "_expired", "_seconds", "_task", "due")

    def __init__(self, deadlines: Deadlines, seconds: float) -> None:
        self._deadlines = deadlines
        self._seconds = seconds
        self._expired = False
        self.due = math.inf

    def __enter__(self) -> Within:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline bounds a task; there is none here")
        self._task = task
        self._before = task.cancelling()
        self._deadlines.enter(self, self._seconds)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadlines.leave(self)
        # A task that somebody else cancelled too ends as cancelled.
        if self._expired and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def renew(self) -> None:
        """While the block runs: it has all of its time once more."""
        self.due = self._deadlines.now() + self._seconds

    def expire(self) -> None:
        """The time is over."""
        self._expired = True
        self._task.cancel()
