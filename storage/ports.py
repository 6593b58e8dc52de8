"""What the data plane asks of the world: worker threads and time, injected so that a test can own both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

Result = TypeVar("Result")


class Workers(Protocol):
    """Runs blocking or CPU-heavy work off the event loop."""

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` in a worker thread and return its result.

        When the awaiting task is cancelled, this waits for `work` to finish before it raises `CancelledError`:
        memory that `work` uses is never given out again while a thread still touches it (law 7).
        """
        ...


class Clock(Protocol):
    """Time as the data plane sees it."""

    def monotonic(self) -> float:
        """Seconds that never go backward, for deadlines."""
        ...

    def now_ms(self) -> int:
        """Wall-clock time in milliseconds since 1970, for ages of blobs."""
        ...
