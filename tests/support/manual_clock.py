"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio


class ManualClock:
    """Satisfies the `Clock` of every package; `monotonic` and the wall clock move together."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._start_ms = now_ms
        self._elapsed_s = 0.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        return self._elapsed_s

    def now_ms(self) -> int:
        return self._start_ms + round(self._elapsed_s * 1000)

    async def sleep(self, seconds: float) -> None:
        """Return when the clock has been moved past that moment."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._elapsed_s + seconds, wake))
        await wake

    def advance(self, seconds: float) -> None:
        """Move the clock forward and wake those whose time has come, the earliest first."""
        self._elapsed_s += seconds
        due = sorted((each for each in self._sleepers if each[0] <= self._elapsed_s), key=lambda each: each[0])
        self._sleepers = [each for each in self._sleepers if each[0] > self._elapsed_s]
        for _, wake in due:
            if not wake.done():
                wake.set_result(None)
