"""An event loop on a virtual clock: no sockets, no threads. When nothing is ready, time jumps to the next timer.

A callback belongs to the process in whose context it was scheduled. When that process has died, its callbacks are not
run and none is taken any more: its tasks stand still wherever they were, as those of a killed process do.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import sys
import warnings
from asyncio import events
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, Protocol, TypeVar

Result = TypeVar("Result")

RESOLUTION_S: Final = 1e-6


class Mortal(Protocol):
    """What may die, or stand still for a while: a process."""

    dead: bool
    frozen: bool
    held: list[asyncio.Handle]
    """What would have run while it is frozen, in its order."""
    tasks: list[SimTask]


OWNER: ContextVar[Mortal | None] = ContextVar("owner", default=None)
"""The process that what runs now belongs to; None for the world outside of all gateways."""


class Deadlock(Exception):
    """Somebody waits, and nothing will ever happen."""


class SimTask(asyncio.Task[Any]):
    """A task whose place in a set follows from when it was made, not from where it lies in memory."""

    def __init__(self, number: int, coroutine: Coroutine[Any, Any, Any], loop: VirtualLoop, context: Context) -> None:
        self.number = number
        super().__init__(coroutine, loop=loop, name=f"task-{number}", context=context)

    def __hash__(self) -> int:
        return self.number


class _Handle(asyncio.Handle):
    """A callback that is skipped when its process has died meanwhile."""

    __slots__ = ("_owner",)

    def __init__(self, callback: Callable[..., Any], args: tuple[Any, ...], loop: VirtualLoop, context: Context):
        super().__init__(callback, args, loop, context)
        self._owner = context.get(OWNER)

    def _run(self) -> None:
        if _may_run(self, self._owner):
            super()._run()


class _Timer(asyncio.TimerHandle):
    """The same for a moment to come."""

    __slots__ = ("_owner",)

    def __init__(
        self, when: float, callback: Callable[..., Any], args: tuple[Any, ...], loop: VirtualLoop, context: Context
    ):
        super().__init__(when, callback, args, loop, context)
        self._owner = context.get(OWNER)

    def _run(self) -> None:
        if _may_run(self, self._owner):
            super()._run()


def _may_run(handle: asyncio.Handle, owner: Mortal | None) -> bool:
    if owner is not None and owner.frozen and not owner.dead:
        owner.held.append(handle)
        return False
    return owner is None or not owner.dead


class _NoFiles:
    """In the place of a selector: nothing to wait for but time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Deadlock("every task waits for another")
        if timeout > 0:
            self._loop.now_s += timeout
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """One thread, one order of events for one seed."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.steps = 0
        """Callbacks that were scheduled to run at once."""
        self._numbers = itertools.count(1)
        self._selector = _NoFiles(self)
        self._clock_resolution = RESOLUTION_S

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:
        context = copy_context() if context is None else context  # an empty one is false
        handle = _Handle(callback, args, self, context)
        owner = context.get(OWNER)
        if owner is None or not owner.dead:
            self.steps += 1
            self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        context = copy_context() if context is None else context  # an empty one is false
        timer = _Timer(when, callback, args, self, context)
        owner = context.get(OWNER)
        if owner is None or not owner.dead:
            heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
            timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: object = None, context: Context | None = None
    ) -> SimTask:
        context = copy_context() if context is None else context
        task = SimTask(next(self._numbers), coro, self, context)
        owner = context.get(OWNER)
        if owner is not None:
            owner.tasks.append(task)
        return task

    def thaw(self, owner: Mortal) -> None:
        """Let a frozen process go on where it stood still."""
        owner.frozen = False
        held, owner.held = owner.held, []
        for handle in held:
            if not handle.cancelled():
                self._ready.append(handle)  # type: ignore[attr-defined]

    def run_outside(self, delay: float, callback: Callable[..., Any], *args: Any) -> None:
        """Call back after `delay`, whoever dies meanwhile: what servers do with a request that has left its client."""
        self.call_later(delay, callback, *args, context=Context())

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.unhandled.append(str(context.get("exception") or context.get("message")))

    unhandled: list[str]

    def _process_events(self, event_list: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...


def context_of(owner: Mortal) -> Context:
    """A context in which everything belongs to `owner`."""
    context = copy_context()
    context.run(OWNER.set, owner)
    return context


def simulate(main: Callable[[], Coroutine[Any, Any, Result]], loop: VirtualLoop) -> Result:
    """Run to its end, then take apart what stands still; exceptions of `main` go on."""
    loop.unhandled = []
    try:
        events.set_event_loop(loop)
        return loop.run_until_complete(main())
    finally:
        events.set_event_loop(None)
        loop.close()


def bury(tasks: list[SimTask]) -> None:
    """Take dead tasks apart after the loop was closed: their `finally` blocks find nothing that they could still do."""
    complains, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for task in tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coroutine = task.get_coro()
                with suppress(BaseException):  # whatever a dead process still tried
                    coroutine.close()  # type: ignore[union-attr]
            tasks.clear()
            gc.collect()
    finally:
        sys.unraisablehook = complains
