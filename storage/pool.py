"""Staging as a state machine: who may have which memory now. Synchronous, no I/O, no time.

Every method is one transition, called from the event loop's thread. What is left to do comes back: `advance` returns
the requests that were granted; `filled`, `fill_failed` and `leave` the grips whose part changed. `storage.staging`
wakes those who wait for them; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID

from storage.arena import Slot, Zone, size_class
from storage.errors import StorageError
from storage.line import Ask, Line
from storage.policy import EvictionPolicy
from storage.resident import Grip, Part, Resident, State
from storage.residents import Residents
from storage.shares import Ledger, Shares

AnyAsk = Ask[Slot] | Ask[Grip]


@dataclass(slots=True)
class Counts:
    """Events since the start."""

    hits: int = 0
    """Reads that found the blob whole."""
    fills: int = 0
    """Reads that began to fill."""
    joins: int = 0
    """Reads that waited for the fill of another."""


class Pool:
    """Windows in one zone, residents in another."""

    def __init__(self, windows: Zone, residents: Zone, policy: EvictionPolicy, shares: Shares) -> None:
        """Raises `ValueError` when the shares do not fit into the zones."""
        self.window_zone = windows
        self.resident_zone = residents
        self.counts = Counts()
        room, guarantee, tenants = residents.capacity_bytes, shares.guaranteed_resident_bytes, shares.tenants
        self.window_ledger = Ledger(
            "windows", windows.capacity_bytes, guarantee=shares.guaranteed_window_bytes, tenants=tenants
        )
        self.used_ledger = Ledger("residents", room, guarantee=guarantee, tenants=tenants)
        self.unclean_ledger = Ledger(
            "drafts and dirty residents", room - shares.read_bytes, guarantee=guarantee, tenants=tenants
        )
        self.residents = Residents(residents, policy, self.used_ledger, self.unclean_ledger)
        self.windows: Line[Slot] = Line(
            "a window",
            [self.window_ledger],
            waiters=shares.waiters,
            price=_full_price,
            give=self._give_window,
        )
        self.reads: Line[Grip] = Line(
            "a read", [self.used_ledger], waiters=shares.waiters, price=self._read_price, give=self._give_read
        )
        self.drafts: Line[Grip] = Line(
            "a draft",
            [self.used_ledger, self.unclean_ledger],
            waiters=shares.waiters,
            price=_full_price,
            give=self._give_draft,
        )

    def advance(self) -> list[AnyAsk]:
        """Grant what can be granted. Reads come before drafts: under pressure a PUT is shed before a GET."""
        granted: list[AnyAsk] = []
        if not self.windows.waiting and not self.reads.waiting and not self.drafts.waiting:
            return granted  # as nearly always
        while True:  # again after each grant: a tenant that came into a guarantee by it may have ceased to borrow
            served: list[AnyAsk] = [*self.windows.serve(), *self.reads.serve(), *self.drafts.serve()]
            if not served:
                return granted
            granted += served

    def hold_now(self, tenant: UUID, blobs: Iterable[tuple[str, int]]) -> list[Resident]:
        """The leading run of `blobs`, by name and length, that is whole and can be had at once; until `let_go`.

        Nothing is taken from one who waits. A blob of another length than it is said to have ends the run.
        """
        run: list[Resident] = []
        if self.reads.busy:
            return run
        price = 0
        for name, nbytes in blobs:
            resident = self.residents.find(name)
            if resident is None or not resident.is_whole or resident.slot.nbytes != nbytes:
                break
            run.append(resident)
            price += _join_price(resident, tenant)
        while run and not self.used_ledger.fits(tenant, price):
            price -= _join_price(run.pop(), tenant)
        self.counts.hits += sum(not resident.expected for resident in run)
        self.residents.hold(run, tenant)
        return run

    def let_go(self, tenant: UUID, residents: Iterable[Resident]) -> None:
        """The bracket over these has ended."""
        self.residents.let_go(residents, tenant)

    def drafts_now(self, tenant: UUID, names: Sequence[str], nbytes: int) -> list[Grip]:
        """Drafts for the first of `names`, as many as can be had at once, likewise."""
        if self.reads.busy or self.drafts.busy:
            return []
        ledgers = self.unclean_ledger, self.used_ledger
        count, each = len(names), size_class(nbytes)
        while count and not all(ledger.fits(tenant, count * each) for ledger in ledgers):
            count -= 1
        return self.residents.draft(names[:count], tenant, nbytes)

    def close(self, reason: str) -> list[AnyAsk]:
        """Refuse all requests, waiting and to come; returns those that waited. What is held stays usable."""
        return [*self.windows.close(reason), *self.reads.close(reason), *self.drafts.close(reason)]

    def release_window(self, tenant: UUID, slot: Slot) -> None:
        """A window's bracket has ended. Its bytes must be zero: the next window gets them as they are."""
        reserved = slot.reserved_bytes
        self.window_zone.free(slot)
        self.window_ledger.discharge(tenant, reserved)

    def leave(self, grip: Grip) -> list[Grip]:
        """The bracket of a draft or a read has ended, however it did.

        Returns the grip that fills from now on, if this one should have filled and did not: the slot stays with those
        who wait.
        """
        resident = grip.resident
        heirs: list[Grip] = []
        if grip.part is Part.FILL:
            heirs = [other for other in resident.grips if other.part is Part.WAIT][:1]
            for heir in heirs:
                heir.part = Part.FILL
            if not heirs:
                self.residents.forget(resident)
        elif resident.state is State.DRAFT:
            self.residents.forget(resident)
        self.residents.ungrip(grip)
        return heirs

    def publish(self, grip: Grip, *, dirty: bool) -> None:
        """A draft becomes a resident under its name, whole from the first moment that it can be found.

        Raises `ValueError` when the name is taken: the name of a blob is never used again.
        """
        self.residents.publish(grip.resident, dirty=dirty)

    def filled(self, grip: Grip) -> list[Grip]:
        """The slot holds the whole blob. Returns the grips that waited for it."""
        assert grip.part is Part.FILL, f"this grip is to {grip.part.value}, it cannot have filled"
        self.residents.complete(grip.resident)
        return _tell(grip.resident, Part.READY, None)

    def fill_failed(self, grip: Grip, error: StorageError) -> list[Grip]:
        """The blob cannot be had. Returns the grips that waited for it and fail with it."""
        assert grip.part is Part.FILL, f"this grip is to {grip.part.value}, it cannot have failed"
        self.residents.forget(grip.resident)
        return _tell(grip.resident, Part.FAILED, error)

    def settle(self, name: str) -> None:
        """All tiers that shall have the blob have it: dirty becomes clean. Any other name or state is no error."""
        resident = self.residents.find(name)
        if resident is not None and resident.state is State.DIRTY:
            self.residents.settle(resident)

    def soil(self, name: str) -> bool:
        """A tier shall get the blob: clean becomes dirty. False when no whole blob of this name is here.

        The owner is charged even beyond its share; within a read of its own it has paid already.
        """
        resident = self.residents.find(name)
        if resident is None or not resident.is_whole:
            return False
        if resident.state is State.CLEAN:
            self.residents.soil(resident)
        return True

    def expect(self, name: str) -> None:
        """Whoever uses the resident next is the first to do so. An unknown name is no error."""
        resident = self.residents.find(name)
        if resident is not None:
            resident.expected = True

    def drop(self, name: str) -> None:
        """Nobody finds the blob from now on; its slot is free with the last grip. An unknown name is no error."""
        resident = self.residents.find(name)
        if resident is not None:
            self.residents.forget(resident)

    def _give_window(self, ask: Ask[Slot]) -> Slot | None:
        if not self.window_ledger.fits(ask.tenant, size_class(ask.nbytes)):
            return None
        slot = self.window_zone.allocate(ask.nbytes)
        if slot is not None:
            self.window_ledger.charge(ask.tenant, slot.reserved_bytes)
        return slot

    def _give_draft(self, ask: Ask[Grip]) -> Grip | None:
        if not self.unclean_ledger.fits(ask.tenant, size_class(ask.nbytes)):
            return None
        return self._give_new(ask, State.DRAFT, Part.READY)

    def _give_read(self, ask: Ask[Grip]) -> Grip | None:
        resident = self.residents.find(ask.name)
        if resident is None:
            grip = self._give_new(ask, State.FILLING, Part.FILL)
            self.counts.fills += grip is not None
            return grip
        if not self.used_ledger.fits(ask.tenant, _join_price(resident, ask.tenant)):
            return None
        if resident.is_whole:
            self.counts.hits += not resident.expected
            return self.residents.grip(resident, ask.tenant, Part.READY)
        self.counts.joins += 1
        return self.residents.grip(resident, ask.tenant, Part.WAIT)

    def _give_new(self, ask: Ask[Grip], state: State, part: Part) -> Grip | None:
        if not self.used_ledger.fits(ask.tenant, size_class(ask.nbytes)):
            return None
        resident = self.residents.add(ask.name, ask.tenant, ask.nbytes, state)
        return None if resident is None else self.residents.grip(resident, ask.tenant, part)

    def _read_price(self, ask: Ask[Grip]) -> int:
        resident = self.residents.find(ask.name)
        return size_class(ask.nbytes) if resident is None else _join_price(resident, ask.tenant)


def _full_price(ask: AnyAsk) -> int:
    return size_class(ask.nbytes)


def _join_price(resident: Resident, tenant: UUID) -> int:
    """Each tenant pays once for a resident, however many grips it has."""
    return 0 if resident.uses and tenant in resident.uses else resident.slot.reserved_bytes


def _tell(resident: Resident, part: Part, error: StorageError | None) -> list[Grip]:
    """Give all who filled or waited their new part; returns those who waited."""
    waited: list[Grip] = []
    for grip in resident.grips:
        if grip.part is Part.WAIT:
            waited.append(grip)
        if grip.part in (Part.WAIT, Part.FILL):
            grip.part, grip.error = part, error
    return waited
