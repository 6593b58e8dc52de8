"""Who may hold how much of staging: guaranteed shares and a common rest (law 6).

Only bytes that cannot be evicted count: windows, drafts, dirty residents, and residents being read. What a tenant
holds beyond its guarantee is borrowed from the common rest, so that

    sum of all that is held  ≤  tenants × guarantee + common  =  capacity

and a tenant within its guarantee always finds its bytes, if need be by the eviction of clean residents.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from storage.host_memory import PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How staging is divided. All numbers are bytes unless said otherwise.

    Guarantees are given to the first `tenants` tenants that hold something, each until it holds nothing. A guarantee
    is worth nothing if it is smaller than a chunk.
    """

    window_bytes: int
    """The part of the arena that is for windows alone, whole pages: plaintext always has a place to go, however many
    residents wait for write-back."""
    tenants: int
    """How many tenants have a guarantee at once."""
    guaranteed_window_bytes: int
    """Of `window_bytes`, for each of them."""
    guaranteed_resident_bytes: int
    """Of the rest of the arena, for each of them."""
    read_bytes: int
    """Of the common rest for residents, the part that drafts and dirty residents may not borrow: reads go on when
    write-back stands still."""
    waiters: int = 256
    """How many requests of one kind one tenant may have waiting."""

    def __post_init__(self) -> None:
        if self.window_bytes % PAGE:
            raise ValueError(f"window_bytes is a multiple of {PAGE}, not {self.window_bytes}")
        for field in ("tenants", "guaranteed_window_bytes", "guaranteed_resident_bytes", "read_bytes", "waiters"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} is not negative: {getattr(self, field)}")

    @classmethod
    def of(cls, capacity_bytes: int, *, tenants: int = 8) -> Shares:
        """A quarter for windows; half of each part guaranteed, evenly; a quarter of the residents' kept for reads."""
        window_bytes = capacity_bytes // 4 // PAGE * PAGE
        resident_bytes = capacity_bytes - window_bytes
        return cls(
            window_bytes=window_bytes,
            tenants=tenants,
            guaranteed_window_bytes=window_bytes // (2 * max(1, tenants)),
            guaranteed_resident_bytes=resident_bytes // (2 * max(1, tenants)),
            read_bytes=resident_bytes // 4,
        )


class Ledger:
    """What each tenant holds of one kind of room, and what of it is borrowed. Pure bookkeeping, no memory."""

    def __init__(self, what: str, capacity_bytes: int, *, guarantee: int, tenants: int) -> None:
        """Raises `ValueError` when the guarantees exceed the capacity."""
        self.common = capacity_bytes - guarantee * tenants
        if self.common < 0:
            raise ValueError(
                f"{tenants} tenants with {guarantee} guaranteed bytes of {what} each do not fit into {capacity_bytes}: "
                "lower the guarantee or the number of tenants, or raise the capacity"
            )
        self.what = what
        self.total = 0
        self._guarantee = guarantee
        self._tenants = tenants
        self._borrowed = 0
        self._held: dict[UUID, int] = {}
        self._guaranteed: set[UUID] = set()

    @property
    def limit(self) -> int:
        """The most bytes that one tenant can ever hold."""
        return self.common + (self._guarantee if self._tenants else 0)

    @property
    def share(self) -> int:
        """What one of its operations should take at most, where less will do.

        A quarter of all that it can hold, and no more than is guaranteed: for that nobody waits for what others have
        borrowed.
        """
        guaranteed = self._guarantee if self._tenants else 0
        return min(self.limit // 4, guaranteed or self.limit)

    def held(self, tenant: UUID) -> int:
        """Bytes that the tenant holds."""
        return self._held.get(tenant, 0)

    def holders(self) -> dict[UUID, int]:
        """Bytes held, by tenant; tenants that hold nothing are absent."""
        return dict(self._held)

    def borrowed(self, tenant: UUID) -> int:
        """Bytes that the tenant has from the common rest."""
        held = self.held(tenant)
        return max(0, held - self._guarantee) if tenant in self._guaranteed else held

    def guarantees(self, tenant: UUID, nbytes: int) -> bool:
        """Whether the tenant could hold `nbytes` more without borrowing more."""
        return self._growth(tenant, nbytes) <= 0

    def fits(self, tenant: UUID, nbytes: int) -> bool:
        """Whether the tenant may hold `nbytes` more."""
        growth = self._growth(tenant, nbytes)
        return growth <= 0 or self._borrowed + growth <= self.common

    def charge(self, tenant: UUID, nbytes: int) -> None:
        """The tenant holds `nbytes` more. May exceed the common rest: those who ask first use `fits`."""
        self._borrowed += self._growth(tenant, nbytes)
        if self._has_guarantee(tenant):
            self._guaranteed.add(tenant)
        self._held[tenant] = self.held(tenant) + nbytes
        self.total += nbytes

    def discharge(self, tenant: UUID, nbytes: int) -> None:
        """The tenant holds `nbytes` less; with nothing left its guarantee goes to the next tenant that asks."""
        held = self._held[tenant]
        assert held >= nbytes, f"{tenant} holds {held} bytes of {self.what}, cannot give back {nbytes}"
        before = self.borrowed(tenant)
        self._held[tenant] = held - nbytes
        self._borrowed += self.borrowed(tenant) - before
        self.total -= nbytes
        if held == nbytes:
            del self._held[tenant]
            self._guaranteed.discard(tenant)

    def _has_guarantee(self, tenant: UUID) -> bool:
        return tenant in self._guaranteed or len(self._guaranteed) < self._tenants

    def _growth(self, tenant: UUID, nbytes: int) -> int:
        """By how much a charge changes what is borrowed; negative when the tenant comes into a guarantee."""
        held = self._held.get(tenant, 0)  # each look-up hashes a UUID, in Python: as few as can be
        has_guarantee = tenant in self._guaranteed
        borrowed = max(0, held - self._guarantee) if has_guarantee else held
        if has_guarantee or len(self._guaranteed) < self._tenants:
            return max(0, held + nbytes - self._guarantee) - borrowed
        return held + nbytes - borrowed
