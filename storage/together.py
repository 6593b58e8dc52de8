"""Tasks that run together and end together: `asyncio.TaskGroup`, with one error, under deadlines, without garbage."""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType
from typing import Final

GIVES_NOTHING_BACK: Final = sys.version_info < (3, 13)


class Together(asyncio.TaskGroup):
    """A task group that raises the first error of its tasks as it is, and leaves its parent as it found it.

    Where a task fails while the group waits at its end, Python 3.11's and 3.12's own group cancels the parent and never
    takes that back. The parent goes on with the error, but a later deadline of it counts somebody else's cancellation
    and ends in `asyncio.CancelledError` in place of `TimeoutError`.

    Python's own also leaves its errors in cycles with the frames that they came through, and with those the memory that
    the frames had views of, until garbage is collected.
    """

    _parent: asyncio.Task[object] | None = None
    _parent_cancel_requested: bool
    """Python's own: the group has cancelled its parent."""

    async def __aenter__(self) -> Together:
        await super().__aenter__()
        self._parent = asyncio.current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._end(kind, error, trace)
        finally:
            # Errors know this frame, it knows the group, and that knows tasks which know their errors.
            del error, trace
            if not self._tasks:
                self._parent = self._parent_task = None

    async def _end(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._parent is not None
        before = self._parent.cancelling()
        try:
            await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            # What the group asked for while it waited; what it asked for before, it has taken back itself.
            asked = GIVES_NOTHING_BACK and kind is None and self._parent_cancel_requested
            if asked and self._parent.cancelling() > before:
                self._parent.uncancel()
            group.__traceback__ = None  # the frame that made the group knows it
            cause = _first_cause(group)
        except asyncio.CancelledError as cancelled:
            raise cancelled.with_traceback(None)  # noqa: B904  # as above
        else:
            return
        finally:
            del error, trace
        try:
            _raise(cause)
        finally:
            del cause


def _raise(cause: BaseException) -> None:
    """Raise an error without adding to its context whatever ended the block."""
    context = cause.__context__
    try:
        raise cause
    finally:
        cause.__context__ = context
        del cause, context


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group; the other tasks were merely cancelled for it."""
    error = group.exceptions[0]
    return _first_cause(error) if isinstance(error, BaseExceptionGroup) else error
