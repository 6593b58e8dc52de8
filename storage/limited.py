"""A tier with bounded concurrency: so many operations and bytes at once, the others wait in order of arrival."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from storage.tier import BlobInfo, Tier


@dataclass(frozen=True, slots=True)
class LimitedStatistics:
    """What runs and what waits, now."""

    operations: int
    bytes_in_flight: int
    waiting: int


class LimitedTier:
    """`inner` with at most `operations` puts, gets, stats and deletes at once, and optionally `bytes_max` in flight.

    Strictly first come, first served: a large transfer is not overtaken by small ones. A transfer larger than
    `bytes_max` runs when no other transfer does. A scan is not counted: it is one request at a time by nature.
    A deadline is the caller's: cancelling a waiting call takes it out of the queue.
    """

    def __init__(self, inner: Tier, operations: int, *, bytes_max: int | None = None) -> None:
        if operations < 1:
            raise ValueError(f"a tier needs at least 1 operation at once, not {operations}")
        if bytes_max is not None and bytes_max < 1:
            raise ValueError(f"a tier needs at least 1 byte in flight, not {bytes_max}")
        self.label = inner.label
        self._inner = inner
        self._gate = _Gate(operations, bytes_max)

    @property
    def statistics(self) -> LimitedStatistics:
        return self._gate.statistics()

    async def put(self, name: str, sealed: memoryview) -> None:
        async with self._gate.enter(len(sealed)):
            await self._inner.put(name, sealed)

    async def get_into(self, name: str, target: memoryview) -> None:
        async with self._gate.enter(len(target)):
            await self._inner.get_into(name, target)

    async def stat(self, names: Sequence[str]) -> dict[str, int]:
        async with self._gate.enter(0):
            return await self._inner.stat(names)

    async def delete(self, names: Sequence[str]) -> None:
        async with self._gate.enter(0):
            await self._inner.delete(names)

    def scan(self) -> AsyncIterator[BlobInfo]:
        return self._inner.scan()

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Gate:
    """Counts who is inside. All changes are synchronous; only waiting is not."""

    def __init__(self, operations_max: int, bytes_max: int | None) -> None:
        self._operations_max = operations_max
        self._bytes_max = bytes_max
        self._operations = 0
        self._bytes = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    def statistics(self) -> LimitedStatistics:
        return LimitedStatistics(self._operations, self._bytes, len(self._queue))

    @asynccontextmanager
    async def enter(self, size: int) -> AsyncIterator[None]:
        if self._queue or not self._fits(size):
            await self._wait(size)
        else:
            self._admit(size)
        try:
            yield
        finally:
            self._leave(size)

    async def _wait(self, size: int) -> None:
        ticket = (size, asyncio.get_running_loop().create_future())
        self._queue.append(ticket)
        try:
            await ticket[1]
        except asyncio.CancelledError:
            if ticket[1].cancelled():
                self._queue.remove(ticket)
                self._admit_waiting()  # a large ticket at the head may have held back small ones
            else:
                self._leave(size)  # admitted in the same turn of the loop in which it was cancelled
            raise

    def _fits(self, size: int) -> bool:
        if self._operations >= self._operations_max:
            return False
        if self._bytes_max is None or size == 0 or self._bytes == 0:
            return True
        return self._bytes + size <= self._bytes_max

    def _admit(self, size: int) -> None:
        self._operations += 1
        self._bytes += size

    def _leave(self, size: int) -> None:
        self._operations -= 1
        self._bytes -= size
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Let in from the head of the queue what fits. Cancelled tickets leave by themselves, in `_wait`."""
        while self._queue:
            size, future = self._queue[0]
            if future.cancelled() or not self._fits(size):
                return
            self._queue.popleft()
            self._admit(size)
            future.set_result(None)
