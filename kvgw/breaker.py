"""A circuit breaker: after repeated outages it answers for the gateway, and provably closes again.

closed → (failures in a row reach the threshold) → open → (its period is over) → half-open: exactly one caller tries →
success closes it, failure opens it for another, longer period.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvgw.runtime import Clock, Rng


class BreakerState(StrEnum):
    """Where a breaker is."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """When a breaker opens, and for how long (seconds)."""

    failures: int = 3
    period_s: float = 1.0
    period_max_s: float = 30.0


class Breaker:
    """Decides whether a call may go to the gateway. Not thread-safe: one event loop owns it."""

    def __init__(self, options: BreakerOptions, clock: Clock, rng: Rng) -> None:
        self._options = options
        self._clock = clock
        self._rng = rng
        self._failures = 0
        self._period_s = options.period_s
        self._retry_at = 0.0
        self._probing = False
        self._open = False

    @property
    def state(self) -> BreakerState:
        if not self._open:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if self._clock.monotonic() >= self._retry_at else BreakerState.OPEN

    def admit(self) -> bool:
        """May this call go through? While half-open, only the first one may: it must then report how it ended."""
        if not self._open:
            return True
        if self._probing or self._clock.monotonic() < self._retry_at:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        """A call that was admitted got an answer, whatever it was."""
        self._failures = 0
        self._period_s = self._options.period_s
        self._probing = False
        self._open = False

    def failed(self) -> None:
        """A call that was admitted got none."""
        self._failures += 1
        if self._probing:
            self._period_s = min(2 * self._period_s, self._options.period_max_s)
        if self._probing or self._failures >= self._options.failures:
            self._probing = False
            self._open = True
            # Clients that lost one gateway must not all come back in the same instant.
            self._retry_at = self._clock.monotonic() + self._period_s * (0.75 + 0.5 * self._rng.jitter())

    def abandoned(self) -> None:
        """A call that was admitted was cancelled: it says nothing about the gateway."""
        self._probing = False
