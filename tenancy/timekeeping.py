"""The catalog's time: Unix milliseconds that never run backward, so that what expired stays expired, and never stand.

Where the clock that it follows was set back, time goes on at half its pace until that clock has caught up: retries,
leases and lifetimes last twice as long meanwhile, and nothing waits for an hour because a clock was an hour wrong.
"""

from __future__ import annotations

from typing import Final, Protocol

PACE: Final = 0.5
"""Of the time told while it is ahead of the clock that it follows. Below 1, or it would never be caught up with."""


FURTHEST_MS: Final = 900_000
"""No retry, lease of a write or reservation that is written down ends later than so far ahead (law 9).

What does was written by a process that ended while its clock was ahead, before it could say how late it was: it is due.
"""


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
        self._latest_at = clock.monotonic()
        """When it was that late (monotonic seconds), if the clock that is followed has not been as late since."""
        self.found_ms = high_water_ms
        """The latest time that the catalog knew when it was opened."""
        self.began_ms = clock.now_ms()
        """When it was opened, by the machine's clock."""
        self._offset_ms: float | None = None

    def now_ms(self) -> int:
        at = self._clock.monotonic()  # every request asks several times: one look is enough
        followed_ms, least_ms = self._unclamped_ms(at), self._least_ms(at)
        if followed_ms < least_ms:
            return least_ms
        self._latest_ms, self._latest_at = followed_ms, at
        return followed_ms

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
        at = self._clock.monotonic()
        return max(0, self._least_ms(at) - self._unclamped_ms(at))

    @property
    def skew_ms(self) -> int:
        """The machine's wall clock minus the database's; 0 where there is no database server."""
        return 0 if self._offset_ms is None else self._clock.now_ms() - self._unclamped_ms(self._clock.monotonic())

    def _least_ms(self, at: float) -> int:
        """As late as it is (`at`: monotonic seconds), whatever the clock that is followed shows."""
        return self._latest_ms + int(PACE * 1000 * (at - self._latest_at))

    def _unclamped_ms(self, at: float) -> int:
        if self._offset_ms is None:
            return self._clock.now_ms()
        return int(at * 1000 + self._offset_ms)
