"""Making room: which clean, unused residents have to go, and in which order.

Between owners fairness decides, within an owner the policy: the owner of most bytes gives first, so that whoever is
over its share is evicted before anybody within it, and a tenant that churns cannot push out those that hold less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from uuid import UUID

from storage.arena import Slot, Zone, size_class
from storage.policy import EvictionPolicy
from storage.resident import Resident


class Eviction:
    """The candidates of one zone."""

    def __init__(self, zone: Zone, policy: EvictionPolicy, evict: Callable[[Resident], None]) -> None:
        """`evict` frees a candidate's slot, having withdrawn it here."""
        self.evicted = 0
        self.policy = policy
        self._zone = zone
        self._evict = evict
        self._candidates: dict[str, Resident] = {}
        self._candidate_bytes: Counter[UUID] = Counter()
        self._owned_bytes: Counter[UUID] = Counter()
        self._walls: dict[int, int] = {}  # offset → length of every slot that is not a candidate

    @property
    def candidate_bytes(self) -> int:
        """Bytes that could be evicted now."""
        return self._candidate_bytes.total()

    def born(self, resident: Resident) -> None:
        """A slot of `make_room` has become a resident, and is used."""
        _add(self._owned_bytes, resident.owner, resident.slot.reserved_bytes)
        self._walls[resident.slot.offset] = resident.slot.reserved_bytes

    def died(self, resident: Resident) -> None:
        """A resident that is no candidate has given its slot back."""
        _add(self._owned_bytes, resident.owner, -resident.slot.reserved_bytes)
        del self._walls[resident.slot.offset]

    def offer(self, residents: Sequence[Resident]) -> None:
        """Clean residents that are not used any more."""
        for resident in residents:
            self._candidates[resident.name] = resident
            del self._walls[resident.slot.offset]
        for owner, nbytes in _by_owner(residents):
            _add(self._candidate_bytes, owner, nbytes)

    def withdraw(self, residents: Sequence[Resident]) -> None:
        """Candidates that are used again, dirty, or gone."""
        for resident in residents:
            slot = resident.slot
            del self._candidates[resident.name]
            self._walls[slot.offset] = slot.reserved_bytes
        for owner, nbytes in _by_owner(residents):
            _add(self._candidate_bytes, owner, -nbytes)

    def make_room(self, nbytes: int) -> Slot | None:
        """A slot of `nbytes`, by as little eviction as gets it. None, and nothing evicted, when it cannot be had.

        Victims go in fair order until the slot fits. When twice the wanted bytes were not enough, the free ones are
        too scattered; then a run of the wanted length is cleared, whatever lies in it.
        """
        slot = self._zone.allocate(nbytes)
        wanted = size_class(nbytes)
        if slot is not None or self._zone.free_bytes + self.candidate_bytes < wanted:
            return slot
        victim = self._next_victim()
        # A victim at least as large makes room for certain; that is the common case, so no run is looked for.
        if victim is None or (victim.slot.reserved_bytes < wanted and self._clearable(wanted) is None):
            return None
        freed = 0
        while slot is None and victim is not None and freed < 2 * wanted:
            freed += victim.slot.reserved_bytes
            self._drop(victim)
            slot = self._zone.allocate(nbytes)
            victim = self._next_victim()
        if slot is None:
            self._clear(self._clearable(wanted))
            slot = self._zone.allocate(nbytes)
        assert slot is not None, f"a run of {wanted} free bytes vanished"
        return slot

    def _next_victim(self) -> Resident | None:
        if not self._candidates:
            return None
        owner = max(self._candidate_bytes, key=self._owned_bytes.__getitem__)
        names = (name for name in self.policy.victims(owner) if name in self._candidates)
        return self._candidates[next(names)]

    def _clearable(self, wanted: int) -> range | None:
        """`wanted` offsets without a slot that must stay, at the start of the shortest run of such that has room."""
        end = self._zone.offset + self._zone.capacity_bytes
        best: tuple[int, int] | None = None  # length, start
        start = self._zone.offset
        for offset, length in [*sorted(self._walls.items()), (end, 0)]:
            if offset - start >= wanted and (best is None or offset - start < best[0]):
                best = offset - start, start
            start = offset + length
        return None if best is None else range(best[1], best[1] + wanted)

    def _clear(self, offsets: range | None) -> None:
        assert offsets is not None, "eviction cannot shorten a run of free and evictable bytes"
        for resident in [resident for resident in self._candidates.values() if resident.slot.offset in offsets]:
            self._drop(resident)

    def _drop(self, resident: Resident) -> None:
        self.evicted += 1
        self._evict(resident)


def _by_owner(residents: Sequence[Resident]) -> Iterator[tuple[UUID, int]]:
    """Bytes of each run of one owner's: to look an owner up hashes a UUID, in Python."""
    for owner, run in groupby(residents, attrgetter("owner")):
        yield owner, sum(resident.slot.reserved_bytes for resident in run)


def _add(counter: Counter[UUID], tenant: UUID, nbytes: int) -> None:
    """Add, and forget a tenant at zero: counters are bounded by the tenants that have something."""
    there = counter.get(tenant, 0) + nbytes
    if there:
        counter[tenant] = there
    else:
        counter.pop(tenant, None)
