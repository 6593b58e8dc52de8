"""What the control plane asks of the world, injected so that a test can own it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias, TypeVar

Result = TypeVar("Result")

RandomBytes: TypeAlias = Callable[[int], bytes]
"""Gives as many unpredictable bytes as it is asked for: the operating system's generator, or a test's."""


class Workers(Protocol):
    """Runs blocking or CPU-heavy work off the event loop."""

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` in a worker thread and return its result; a cancelled caller still waits for its end."""
        ...
