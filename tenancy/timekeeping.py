"""The catalog's time: wall-clock milliseconds that never run backward, so that what expired stays expired."""

from __future__ import annotations

from typing import Protocol


class WallClock(Protocol):
    """Unix milliseconds as the machine has them."""

    def now_ms(self) -> int: ...


class CatalogTime:
    """The later of the machine's clock and the latest time that was ever told or written down."""

    def __init__(self, clock: WallClock, high_water_ms: int) -> None:
        self._clock = clock
        self._latest_ms = high_water_ms

    def now_ms(self) -> int:
        self._latest_ms = max(self._latest_ms, self._clock.now_ms())
        return self._latest_ms

    @property
    def behind_ms(self) -> int:
        """By how much the machine's clock is behind what was written down before; 0 when it is not."""
        return max(0, self._latest_ms - self._clock.now_ms())
