"""The pool as a state machine, without I/O: books, visibility and eviction against a model."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from storage.arena import Arena, Slot, size_class
from storage.errors import BlobMissing
from storage.host_memory import PAGE
from storage.line import Ask
from storage.policy import SegmentedLru
from storage.pool import Pool
from storage.resident import Grip, Part, Resident, State
from storage.shares import Shares

A, B, C = (UUID(int=number) for number in range(1, 4))
TENANTS = st.sampled_from([A, B, C])
NAMES = st.sampled_from([f"blob-{number}" for number in range(6)])
SHARES = Shares(
    window_bytes=4 * PAGE,
    tenants=2,
    guaranteed_window_bytes=PAGE,
    guaranteed_resident_bytes=4 * PAGE,
    read_bytes=4 * PAGE,
)


def make_pool(resident_pages: int = 16, shares: Shares = SHARES) -> Pool:
    windows, residents = Arena(shares.window_bytes + resident_pages * PAGE).split(shares.window_bytes)
    return Pool(windows, residents, SegmentedLru(), shares)


def ask_window(pool: Pool, tenant: UUID, pages: int) -> Ask[Slot]:
    ask: Ask[Slot] = Ask(tenant, pages * PAGE, "", 0.0)
    pool.windows.join(ask)
    pool.advance()
    return ask


def ask_draft(pool: Pool, tenant: UUID, name: str, pages: int = 1) -> Ask[Grip]:
    ask: Ask[Grip] = Ask(tenant, pages * PAGE, name, 0.0)
    pool.drafts.join(ask)
    pool.advance()
    return ask


def ask_read(pool: Pool, tenant: UUID, name: str, pages: int = 1) -> Ask[Grip]:
    ask: Ask[Grip] = Ask(tenant, pages * PAGE, name, 0.0)
    pool.reads.join(ask)
    pool.advance()
    return ask


def granted(ask: Ask[Grip]) -> Grip:
    assert ask.grant is not None
    return ask.grant


def stored(pool: Pool, tenant: UUID, name: str, pages: int = 1, *, dirty: bool = False) -> None:
    grip = granted(ask_draft(pool, tenant, name, pages))
    pool.publish(grip, dirty=dirty)
    pool.leave(grip)


def whole(pool: Pool, name: str) -> bool:
    resident = pool.residents.find(name)
    return resident is not None and resident.is_whole


class Model(RuleBasedStateMachine):
    """What a reader of the laws would keep on paper."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.windows: list[tuple[UUID, Slot]] = []
        self.drafts: list[Grip] = []
        self.readers: list[Grip] = []
        self.waiting: list[Ask[Grip]] = []
        self.dirty: set[str] = set()
        self.dropped: set[Resident] = set()

    def collect(self) -> None:
        for ask in list(self.waiting):
            if ask.grant is not None:
                self.waiting.remove(ask)
                assert ask.grant.resident not in self.dropped
                (self.drafts if ask.grant.resident.state is State.DRAFT else self.readers).append(ask.grant)

    def after(self) -> None:
        self.pool.advance()
        self.collect()

    @rule(tenant=TENANTS, pages=st.integers(1, 3))
    def window(self, tenant: UUID, pages: int) -> None:
        ask = ask_window(self.pool, tenant, pages)
        self.collect()
        if ask.grant is None:
            self.pool.windows.leave(ask)
        else:
            self.windows.append((tenant, ask.grant))

    @precondition(lambda self: self.windows)
    @rule(pick=st.integers(0, 99))
    def window_ends(self, pick: int) -> None:
        self.pool.release_window(*self.windows.pop(pick % len(self.windows)))
        self.after()

    @rule(tenant=TENANTS, name=NAMES, pages=st.integers(1, 5))
    def draft(self, tenant: UUID, name: str, pages: int) -> None:
        self.waiting.append(ask_draft(self.pool, tenant, name, pages))
        self.collect()

    @rule(tenant=TENANTS, name=NAMES, pages=st.integers(1, 5))
    def read(self, tenant: UUID, name: str, pages: int) -> None:
        self.waiting.append(ask_read(self.pool, tenant, name, pages))
        self.collect()

    @precondition(lambda self: self.waiting)
    @rule(pick=st.integers(0, 99))
    def give_up(self, pick: int) -> None:
        ask = self.waiting.pop(pick % len(self.waiting))
        self.pool.drafts.leave(ask)
        self.pool.reads.leave(ask)
        self.after()

    @precondition(lambda self: self.drafts)
    @rule(pick=st.integers(0, 99), dirty=st.booleans())
    def publish(self, pick: int, dirty: bool) -> None:
        grip = self.drafts.pop(pick % len(self.drafts))
        name = grip.resident.name
        if self.pool.residents.find(name) is not None:
            with pytest.raises(ValueError, match=name):
                self.pool.publish(grip, dirty=dirty)
            self.pool.leave(grip)
        else:
            self.pool.publish(grip, dirty=dirty)
            if dirty:
                self.dirty.add(name)
            self.readers.append(grip)
        self.after()

    @precondition(lambda self: self.drafts)
    @rule(pick=st.integers(0, 99))
    def abandon(self, pick: int) -> None:
        self.pool.leave(self.drafts.pop(pick % len(self.drafts)))
        self.after()

    @precondition(lambda self: self.readers)
    @rule(pick=st.integers(0, 99))
    def reader_leaves(self, pick: int) -> None:
        grip = self.readers.pop(pick % len(self.readers))
        waits = any(other.part is Part.WAIT for other in grip.resident.grips)
        heirs = self.pool.leave(grip)
        assert len(heirs) == (grip.part is Part.FILL and waits)
        self.after()

    @precondition(lambda self: any(grip.part is Part.FILL for grip in self.readers))
    @rule(pick=st.integers(0, 99), succeeds=st.booleans())
    def fill_ends(self, pick: int, succeeds: bool) -> None:
        fillers = [grip for grip in self.readers if grip.part is Part.FILL]
        grip = fillers[pick % len(fillers)]
        woken = self.pool.filled(grip) if succeeds else self.pool.fill_failed(grip, BlobMissing("gone"))
        assert all(other.part is (Part.READY if succeeds else Part.FAILED) for other in [grip, *woken])
        self.after()

    @rule(name=NAMES)
    def settle(self, name: str) -> None:
        self.pool.settle(name)
        self.dirty.discard(name)
        self.after()

    @rule(name=NAMES)
    def soil(self, name: str) -> None:
        was_whole = whole(self.pool, name)
        assert self.pool.soil(name) == was_whole
        if was_whole:
            self.dirty.add(name)
        self.after()

    @rule(name=NAMES)
    def drop(self, name: str) -> None:
        resident = self.pool.residents.find(name)
        if resident is not None:
            self.dropped.add(resident)
        self.pool.drop(name)
        self.dirty.discard(name)
        assert self.pool.residents.find(name) is None
        self.after()

    @invariant()
    def dirty_residents_are_never_evicted(self) -> None:
        assert set(self.pool.residents.dirty_names()) == self.dirty
        assert all(whole(self.pool, name) for name in self.dirty)

    @invariant()
    def drafts_and_dropped_blobs_are_not_found(self) -> None:
        for grip in self.drafts:
            assert self.pool.residents.find(grip.resident.name) is not grip.resident
        for resident in self.dropped:
            assert self.pool.residents.find(resident.name) is not resident

    @invariant()
    def every_slot_is_somebodys(self) -> None:
        gripped = {grip.slot for grip in [*self.drafts, *self.readers]}
        found = {resident.slot for resident in self.pool.residents._found.values()}
        assert set(self.pool.resident_zone.slots()) == gripped | found
        assert set(self.pool.window_zone.slots()) == {slot for _, slot in self.windows}

    @invariant()
    def the_books_are_right(self) -> None:
        pool = self.pool
        used = sum(slot.reserved_bytes for slot in pool.resident_zone.slots())
        assert pool.resident_zone.statistics().used_bytes == used == pool.residents.bytes_in.total()
        held: dict[tuple[UUID, int], int] = {}
        for grip in [*self.drafts, *self.readers]:
            held[grip.tenant, grip.slot.offset] = grip.slot.reserved_bytes
        unclean = sum(grip.slot.reserved_bytes for grip in self.drafts)
        for name in self.dirty:
            resident = pool.residents.find(name)
            assert resident is not None
            held[resident.owner, resident.slot.offset] = resident.slot.reserved_bytes
            unclean += resident.slot.reserved_bytes
        for tenant in (A, B, C):
            assert pool.used_ledger.held(tenant) == sum(n for (who, _), n in held.items() if who == tenant)
            windows = sum(slot.reserved_bytes for who, slot in self.windows if who == tenant)
            assert pool.window_ledger.held(tenant) == windows
        assert pool.unclean_ledger.total == unclean
        kept = {offset for _, offset in held}
        free_to_go = sum(slot.reserved_bytes for slot in pool.resident_zone.slots() if slot.offset not in kept)
        assert pool.residents.eviction.candidate_bytes == free_to_go

    @invariant()
    def nobody_waits_for_what_is_free(self) -> None:
        assert self.pool.advance() == []

    def teardown(self) -> None:
        for tenant, slot in self.windows:
            self.pool.release_window(tenant, slot)
        for ask in self.waiting:
            self.pool.drafts.leave(ask)
            self.pool.reads.leave(ask)
        for grip in [*self.drafts, *self.readers]:
            self.pool.leave(grip)
        for number in range(6):
            self.pool.drop(f"blob-{number}")
        for zone in (self.pool.window_zone, self.pool.resident_zone):
            assert zone.statistics().largest_free_bytes == zone.capacity_bytes, "a slot has leaked"
        for ledger in (self.pool.window_ledger, self.pool.used_ledger, self.pool.unclean_ledger):
            assert ledger.holders() == {}
            assert ledger._borrowed == 0
        eviction = self.pool.residents.eviction
        assert not eviction._walls
        assert not eviction._owned_bytes
        assert not eviction._candidates


Model.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
test_pool_agrees_with_the_model = Model.TestCase


def test_the_owner_of_most_bytes_gives_first() -> None:
    pool = make_pool()
    stored(pool, B, "b1", 2)
    for number in range(7):
        stored(pool, A, f"a{number}", 2)
    granted(ask_read(pool, A, "new", 2))
    assert whole(pool, "b1"), "within its share, though least recently used of all"
    assert not whole(pool, "a0")
    assert whole(pool, "a1")
    assert pool.residents.eviction.evicted == 1


def test_a_guarantee_is_satisfied_by_evicting_clean_residents_of_anybody() -> None:
    pool = make_pool()
    for number in range(8):
        stored(pool, A, f"a{number}", 2)
    assert granted(ask_draft(pool, B, "b", 4))
    assert granted(ask_read(pool, C, "c", 4))


def test_dirty_residents_leave_room_for_reads() -> None:
    pool = make_pool()
    drafted = 0
    while (ask := ask_draft(pool, A, f"a{drafted}")).grant is not None:
        pool.publish(granted(ask), dirty=True)
        pool.leave(granted(ask))
        drafted += 1
    assert drafted == 4 + 4, "its guarantee and the common rest less what is kept for reads"
    assert granted(ask_read(pool, A, "fresh", 4)).part is Part.FILL
    assert granted(ask_draft(pool, B, "b", 4)), "a guarantee is not touched by the dirty ones of others"
    pool.settle("a0")
    assert pool.advance() == [ask]


UNSHARED = Shares(window_bytes=PAGE, tenants=0, guaranteed_window_bytes=0, guaranteed_resident_bytes=0, read_bytes=0)


def test_nothing_is_evicted_for_what_cannot_be_had() -> None:
    pool = make_pool(shares=UNSHARED)
    for number in range(16):
        stored(pool, A, f"a{number}", dirty=number in (2, 7))
    nine = ask_read(pool, B, "nine", 9)
    assert nine.grant is None, "the longest run between dirty ones has eight pages"
    assert pool.residents.eviction.evicted == 0
    pool.reads.leave(nine)
    assert granted(ask_read(pool, C, "eight", 8)), "by eviction of the run, not of dirty ones"
    assert pool.residents.dirty_names() == ["a2", "a7"]


def test_scattered_victims_are_followed_by_one_run() -> None:
    pool = make_pool(shares=UNSHARED)
    names = [f"a{number}" for number in range(16)]
    for name in names:
        stored(pool, A, name)
    for name in names[1::2]:  # to the end of the order
        pool.soil(name)
        pool.settle(name)
    granted(ask_read(pool, B, "four", 4))
    assert [name for name in names if whole(pool, name)] == ["a5", "a7", "a9", "a11", "a13", "a15"]


def test_a_tenant_that_comes_into_a_guarantee_frees_what_it_borrowed_for_others() -> None:
    pool = make_pool()
    held = {tenant: granted(ask_read(pool, tenant, f"{tenant} 1", pages)) for tenant, pages in ((A, 7), (B, 1), (C, 4))}
    pool.leave(held[B])  # C could have its guarantee now, but does not ask
    blocked = ask_read(pool, A, "more", 2)
    assert blocked.grant is None, "A borrows 3 and C 4 of 8 pages"
    assert ask_read(pool, C, "one", 1).grant
    assert blocked.grant


def test_a_dropped_blob_stays_readable_for_those_who_have_it() -> None:
    pool = make_pool()
    stored(pool, A, "a", dirty=True)
    reader = granted(ask_read(pool, A, "a"))
    pool.drop("a")
    assert not whole(pool, "a")
    assert not pool.soil("a")
    assert pool.resident_zone.statistics().slots == 1
    second = granted(ask_read(pool, A, "a"))
    assert second.part is Part.FILL, "a new reader does not find it"
    pool.leave(reader)
    pool.fill_failed(second, BlobMissing("a"))
    pool.leave(second)
    assert pool.resident_zone.statistics().slots == 0


def test_a_fill_that_was_dropped_serves_those_who_asked_before() -> None:
    pool = make_pool()
    filler, waiter = granted(ask_read(pool, A, "a")), granted(ask_read(pool, A, "a"))
    pool.drop("a")
    assert pool.filled(filler) == [waiter]
    assert waiter.part is Part.READY
    assert pool.residents.find("a") is None
    pool.leave(filler)
    pool.leave(waiter)
    assert pool.resident_zone.statistics().slots == 0


def test_a_cancelled_fill_is_handed_over_with_its_slot() -> None:
    pool = make_pool()
    filler, first, second = (granted(ask_read(pool, tenant, "a")) for tenant in (A, B, C))
    assert pool.leave(filler) == [first]
    assert first.part is Part.FILL
    assert second.part is Part.WAIT
    assert first.slot is second.slot
    assert pool.used_ledger.holders() == {B: PAGE, C: PAGE}


def test_each_tenant_pays_once_for_a_shared_resident() -> None:
    pool = make_pool()
    stored(pool, A, "public", 2)
    assert pool.used_ledger.holders() == {}
    readers = [granted(ask_read(pool, tenant, "public", 2)) for tenant in (B, B, C)]
    assert pool.used_ledger.holders() == {B: 2 * PAGE, C: 2 * PAGE}
    for reader in readers:
        pool.leave(reader)
    assert pool.used_ledger.holders() == {}
    assert size_class(2 * PAGE) == pool.residents.eviction.candidate_bytes
