"""Match leases: what a client was told it can have is not evicted from NVMe before it had time to get it.

In memory only, for a minute at most, and bounded per tenant: asking again and again neither stretches a lease for ever
nor shields more than a share, and a blob whose lease was stretched as often as may be has a rest afterwards, in which
eviction has its turns. A lease defers neither deletion nor expiry.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final, NamedTuple
from uuid import UUID

from kvgw.runtime import Clock

BLOBS_PER_TENANT_MAX: Final = 8192
RENEWALS_MAX: Final = 10
"""How often a lease that is still held may be stretched by asking again; then it has to end first."""
REST_S: Final = 10.0
"""How long a blob is without a lease after one that was stretched so often: several turns of eviction."""


class Lease(NamedTuple):
    """A shield of one blob until `ends`, in seconds of the monotonic clock."""

    ends: float
    renewals: int

    @property
    def forgotten(self) -> float:
        """When nothing is left to be known of it."""
        return self.ends + (REST_S if self.renewals >= RENEWALS_MAX else 0.0)


class MatchLeases:
    """Blobs that are not to be evicted yet, by tenant."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: defaultdict[UUID, dict[bytes, Lease]] = defaultdict(dict)

    def take(self, tenant: UUID, blob_ids: Iterable[bytes], lease_ms: int) -> None:
        """Shield blobs for `lease_ms`; beyond the tenant's share, nothing is shielded."""
        held = self._known(tenant)
        until = self._clock.monotonic() + lease_ms / 1000
        for blob_id in blob_ids:
            lease = held.get(blob_id)
            if lease is None:
                if len(held) < BLOBS_PER_TENANT_MAX:
                    held[blob_id] = Lease(until, 0)
            elif lease.renewals < RENEWALS_MAX:
                held[blob_id] = Lease(max(lease.ends, until), lease.renewals + 1)

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
        now = self._clock.monotonic()
        return frozenset(blob for blob, lease in self._known(tenant).items() if lease.ends > now)

    def count(self) -> int:
        """Blobs under a lease."""
        for tenant in [tenant for tenant in list(self._held) if not self._known(tenant)]:
            del self._held[tenant]
        return sum(len(self.shielded(tenant)) for tenant in list(self._held))

    def _known(self, tenant: UUID) -> dict[bytes, Lease]:
        """The tenant's leases, and those that have ended but leave a rest."""
        now = self._clock.monotonic()
        known = {blob: lease for blob, lease in self._held[tenant].items() if lease.forgotten > now}
        self._held[tenant] = known
        return known
