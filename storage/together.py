"""Tasks that run together and end together: `asyncio.TaskGroup`, whose parent can still be put under a deadline."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Together(asyncio.TaskGroup):
    """A task group that leaves its parent as it found it.

    Where a task fails while the group waits at its end, Python 3.11's and 3.12's own group cancels the parent and never
    takes that back. The parent goes on with the error, but a later deadline of it counts somebody else's cancellation
    and ends in `asyncio.CancelledError` in place of `TimeoutError`.
    """

    _parent: asyncio.Task[object] | None = None

    async def __aenter__(self) -> Together:
        await super().__aenter__()
        self._parent = asyncio.current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._parent is not None
        before = self._parent.cancelling()
        try:
            await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup:
            # The group asks for one cancellation at most; with an error in its block it has taken that back itself.
            if kind is None and self._parent.cancelling() > before:
                self._parent.uncancel()
            raise
