"""The fence: a gateway that cannot tell the others that it lives stops announcing chunks.

Others take a gateway for dead when its heartbeat is older than the lease, and then for lost what only its staging held.
It stops at two thirds of the lease by its own monotonic clock, so that it always stops first.
"""

from __future__ import annotations

from typing import Final

from kvgw.errors import Code, Outage
from kvgw.runtime import Clock
from tenancy.processes import PROCESS_LEASE_MS

LEASE_SECONDS: Final = PROCESS_LEASE_MS / 1000
FENCED_AFTER_SECONDS: Final = LEASE_SECONDS * 2 / 3


class Fence:
    """Whether this process may announce chunks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard_at = clock.monotonic()

    def heard(self, asked_at: float) -> None:
        """A heartbeat that was sent at `asked_at` (monotonic) was written down."""
        self._heard_at = max(self._heard_at, asked_at)

    @property
    def closed(self) -> bool:
        return self._clock.monotonic() - self._heard_at > FENCED_AFTER_SECONDS

    def check(self) -> None:
        """Raises `Outage` when this gateway may not announce chunks now."""
        if self.closed:
            raise Outage(
                f"this gateway could not reach its catalog for {FENCED_AFTER_SECONDS:g} s and announces nothing until "
                "it can",
                Code.UNAVAILABLE,
            )
