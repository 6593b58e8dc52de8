"""Match leases: what a client was told it can have is not evicted from NVMe before it had time to get it.

In memory only, for a minute at most, and bounded per tenant: asking again and again neither stretches a lease for ever
nor shields more than a share. A lease defers neither deletion nor expiry.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final
from uuid import UUID

from kvgw.runtime import Clock

BLOBS_PER_TENANT_MAX: Final = 8192
RENEWALS_MAX: Final = 10
"""How often a lease that is still held may be stretched by asking again; then it has to end first."""


class MatchLeases:
    """Blobs that are not to be evicted yet, by tenant."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: defaultdict[UUID, dict[bytes, tuple[float, int]]] = defaultdict(dict)

    def take(self, tenant: UUID, blob_ids: Iterable[bytes], lease_ms: int) -> None:
        """Shield blobs for `lease_ms`; beyond the tenant's share, nothing is shielded."""
        held = self._live(tenant)
        until = self._clock.monotonic() + lease_ms / 1000
        for blob_id in blob_ids:
            ends, renewals = held.get(blob_id, (0.0, -1))
            if renewals >= RENEWALS_MAX or (renewals < 0 and len(held) >= BLOBS_PER_TENANT_MAX):
                continue
            held[blob_id] = (max(ends, until), renewals + 1)

    def end(self, tenant: UUID, blob_id: bytes) -> None:
        """The chunk was read: its lease has served."""
        self.end_all(tenant, (blob_id,))

    def end_all(self, tenant: UUID, blob_ids: Iterable[bytes]) -> None:
        """The chunks were read."""
        held = self._held.get(tenant)
        if held:
            for blob_id in blob_ids:
                held.pop(blob_id, None)

    def shielded(self, tenant: UUID) -> frozenset[bytes]:
        """The tenant's blobs that are not to be evicted now."""
        return frozenset(self._live(tenant))

    def count(self) -> int:
        """Blobs under a lease."""
        counts = {tenant: len(self._live(tenant)) for tenant in list(self._held)}
        for tenant in [tenant for tenant, count in counts.items() if not count]:
            del self._held[tenant]
        return sum(counts.values())

    def _live(self, tenant: UUID) -> dict[bytes, tuple[float, int]]:
        """The tenant's leases without those that have ended."""
        now = self._clock.monotonic()
        held = {blob: lease for blob, lease in self._held[tenant].items() if lease[0] > now}
        self._held[tenant] = held
        return held
