"""The residents of a zone: their states, who is charged for them, and their slots. Synchronous, no I/O.

Each public method is one transition; after it the books are right: bytes by state, the tenants' charges, the
candidates for eviction. `storage.pool` decides who may have one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from uuid import UUID

from storage.arena import Zone
from storage.eviction import Eviction
from storage.policy import EvictionPolicy
from storage.resident import Grip, Part, Resident, State
from storage.shares import Ledger


class Residents:
    """All residents, found by name or not."""

    def __init__(self, zone: Zone, policy: EvictionPolicy, used: Ledger, unclean: Ledger) -> None:
        """`used` is charged for all that cannot be evicted, `unclean` for drafts and dirty residents."""
        self.bytes_in: Counter[State] = Counter()
        """Reserved bytes by state."""
        self.changes = 0
        """How often one changed its state: as long as it is the same, the same ones are whole."""
        self.eviction = Eviction(zone, policy, self.forget)
        self._zone = zone
        self._policy = policy
        self._used = used
        self._unclean = unclean
        self._found: dict[str, Resident] = {}
        self._dirty: dict[str, None] = {}
        self._alive: dict[Resident, None] = {}

    def __len__(self) -> int:
        """How many can be found by name."""
        return len(self._found)

    def find(self, name: str) -> Resident | None:
        """The resident of this name that is filling, clean or dirty."""
        return self._found.get(name)

    def names(self) -> list[str]:
        """Names of all that have a slot, found or not."""
        return [resident.name for resident in self._alive]

    def dirty_names(self) -> list[str]:
        """Names of dirty residents, those dirty for longest first."""
        return list(self._dirty)

    def add(self, name: str, owner: UUID, nbytes: int, state: State) -> Resident | None:
        """A new draft, or a filling one, which can be found at once; None without room. It needs a grip next."""
        slot = self.eviction.make_room(nbytes)
        if slot is None:
            return None
        resident = Resident(name, owner, slot, state)
        self.bytes_in[state] += slot.reserved_bytes
        self.eviction.born(resident)
        self._alive[resident] = None
        if state is State.DRAFT:
            self._unclean.charge(owner, slot.reserved_bytes)
        else:
            self._found[name] = resident
        return resident

    def draft(self, names: Sequence[str], owner: UUID, nbytes: int) -> list[Grip]:
        """New drafts with a grip on each, for as many of `names` as have room."""
        grips: list[Grip] = []
        for name in names:
            slot = self.eviction.make_room(nbytes)
            if slot is None:
                break
            resident = Resident(name, owner, slot, State.DRAFT)
            self.eviction.born(resident)
            self._alive[resident] = None
            grip = Grip(resident, owner, Part.READY, was_resident=False)
            resident.grips[grip] = None
            resident.uses[owner] = 1
            grips.append(grip)
        reserved = sum(grip.resident.slot.reserved_bytes for grip in grips)
        if reserved:
            self.bytes_in[State.DRAFT] += reserved
            self._unclean.charge(owner, reserved)
            self._used.charge(owner, reserved)
        return grips

    def grip(self, resident: Resident, tenant: UUID, part: Part) -> Grip:
        """A bracket begins."""
        grip = Grip(resident, tenant, part, was_resident=resident.is_whole)
        resident.grips[grip] = None
        self._use(resident, tenant)
        self._note_use(resident)
        return grip

    def ungrip(self, grip: Grip) -> None:
        """A bracket ends; with the last one of a resident that is gone, its slot is free."""
        del grip.resident.grips[grip]
        self._unuse(grip.resident, grip.tenant)

    def hold(self, residents: Sequence[Resident], tenant: UUID) -> None:
        """A bracket over several whole residents begins: as a grip on each, in one go."""
        fresh = 0
        # Two keys of a batch may have the same content: then one resident is in the run twice.
        self.eviction.withdraw(list(dict.fromkeys(one for one in residents if not one.uses)))
        for resident in residents:
            self._note_use(resident)
            before = resident.uses.get(tenant, 0) if resident.uses else 0
            resident.uses[tenant] = before + 1
            if not before:
                fresh += resident.slot.reserved_bytes
        if fresh:
            self._used.charge(tenant, fresh)

    def let_go(self, residents: Iterable[Resident], tenant: UUID) -> None:
        """A bracket over several ends, or over some of them."""
        unused: list[Resident] = []
        stale = 0
        for resident in residents:
            after = resident.uses.pop(tenant) - 1
            if after:
                resident.uses[tenant] = after
                continue
            stale += resident.slot.reserved_bytes
            if not resident.uses:
                unused.append(resident)
        if stale:
            self._used.discharge(tenant, stale)
        self._abandon(unused)

    def publish(self, draft: Resident, *, dirty: bool) -> None:
        """A draft can be found from now on. Raises `ValueError` when its name is taken."""
        assert draft.state is State.DRAFT, f"{draft.name} is {draft.state.value}, not a draft"
        if draft.name in self._found:
            raise ValueError(f"{draft.name} is in staging already: the name of a blob is used once")
        self._found[draft.name] = draft
        if dirty:
            self._become_dirty(draft)
        else:
            self._unclean.discharge(draft.owner, draft.slot.reserved_bytes)
            self._become_clean(draft)

    def complete(self, resident: Resident) -> None:
        """A filling one is whole. One that was dropped meanwhile stays gone: good only for those who have a grip."""
        if resident.state is State.FILLING:
            self._become_clean(resident)

    def settle(self, resident: Resident) -> None:
        """A dirty one becomes clean."""
        assert resident.state is State.DIRTY, f"{resident.name} is {resident.state.value}, not dirty"
        self._become_clean(resident)
        self._no_longer_dirty(resident)

    def soil(self, resident: Resident) -> None:
        """A clean one becomes dirty."""
        assert resident.state is State.CLEAN, f"{resident.name} is {resident.state.value}, not clean"
        self._policy.remove(resident.name)
        self._unclean.charge(resident.owner, resident.slot.reserved_bytes)
        self._become_dirty(resident)

    def forget(self, resident: Resident) -> None:
        """Nobody finds it from now on; its slot is free as soon as nobody has a grip. Gone already is no error."""
        was = resident.state
        if was is State.GONE:
            return
        if was is State.DRAFT:
            self._unclean.discharge(resident.owner, resident.slot.reserved_bytes)
        else:
            del self._found[resident.name]
        if was is State.CLEAN:
            self._policy.remove(resident.name)
            if not resident.uses:
                self.eviction.withdraw((resident,))
        self._move(resident, State.GONE)
        if was is State.DIRTY:
            self._no_longer_dirty(resident)
        elif not resident.uses:
            self._free(resident)

    def _become_clean(self, resident: Resident) -> None:
        self._move(resident, State.CLEAN)
        self._policy.admit(resident.name, resident.owner)

    def _become_dirty(self, resident: Resident) -> None:
        self._use(resident, resident.owner)
        self._move(resident, State.DIRTY)
        self._dirty[resident.name] = None

    def _no_longer_dirty(self, resident: Resident) -> None:
        del self._dirty[resident.name]
        self._unclean.discharge(resident.owner, resident.slot.reserved_bytes)
        self._unuse(resident, resident.owner)

    def _move(self, resident: Resident, state: State) -> None:
        self.bytes_in[resident.state] -= resident.slot.reserved_bytes
        self.bytes_in[state] += resident.slot.reserved_bytes
        resident.state = state
        self.changes += 1

    def _note_use(self, resident: Resident) -> None:
        if resident.expected:
            resident.expected = False
        elif resident.state is State.CLEAN:
            self._policy.touch(resident.name)

    def _use(self, resident: Resident, tenant: UUID) -> None:
        if resident.state is State.CLEAN and not resident.uses:
            self.eviction.withdraw((resident,))
        before = resident.uses.get(tenant, 0)
        resident.uses[tenant] = before + 1
        if not before:
            self._used.charge(tenant, resident.slot.reserved_bytes)

    def _unuse(self, resident: Resident, tenant: UUID) -> None:
        self.let_go((resident,), tenant)

    def _abandon(self, unused: Sequence[Resident]) -> None:
        """Nobody uses these any more."""
        clean = []
        for resident in unused:
            if resident.state is State.GONE:
                self._free(resident)
            else:
                assert resident.state is State.CLEAN, f"{resident.name} is {resident.state.value} and nobody's"
                clean.append(resident)
        self.eviction.offer(clean)

    def _free(self, resident: Resident) -> None:
        self.bytes_in[State.GONE] -= resident.slot.reserved_bytes
        self.eviction.died(resident)
        del self._alive[resident]
        self._zone.free(resident.slot)
