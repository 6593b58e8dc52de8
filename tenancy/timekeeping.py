"""The catalog's time: Unix milliseconds that never run backward, so that what expired stays expired."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """The machine's clocks."""

    def now_ms(self) -> int: ...

    def monotonic(self) -> float: ...


class CatalogTime:
    """One time for all gateways of a catalog: the database's where it has one, else the machine's; never backward.

    With a database server its time is sampled, and carried on by the machine's monotonic clock in between, so that a
    machine whose wall clock is wrong does not expire early or serve late. On SQLite it is the machine's wall clock, but
    never earlier than the latest time that was written down.
    """

    def __init__(self, clock: Clock, high_water_ms: int) -> None:
        self._clock = clock
        self._latest_ms = high_water_ms
        self.found_ms = high_water_ms
        """The latest time that the catalog knew when it was opened."""
        self.began_ms = clock.now_ms()
        """When it was opened, by the machine's clock."""
        self._offset_ms: float | None = None

    def now_ms(self) -> int:
        self._latest_ms = max(self._latest_ms, self._unclamped_ms())
        return self._latest_ms

    def adopt(self, database_ms: int, asked_at: float, answered_at: float) -> None:
        """Follow the database's clock, which showed `database_ms` between the two monotonic times (seconds).

        An answer that took long says little: it moves the time only as far as it proves it wrong.
        """
        least, most = database_ms - answered_at * 1000, database_ms + 1 - asked_at * 1000
        offset_ms = (least + most) / 2 if self._offset_ms is None else self._offset_ms
        self._offset_ms = min(max(offset_ms, least), most)

    @property
    def behind_ms(self) -> int:
        """By how much the time told is ahead of the clock that is followed; 0 when it is not."""
        return max(0, self._latest_ms - self._unclamped_ms())

    @property
    def skew_ms(self) -> int:
        """The machine's wall clock minus the database's; 0 where there is no database server."""
        return 0 if self._offset_ms is None else self._clock.now_ms() - self._unclamped_ms()

    def _unclamped_ms(self) -> int:
        if self._offset_ms is None:
            return self._clock.now_ms()
        return int(self._clock.monotonic() * 1000 + self._offset_ms)
