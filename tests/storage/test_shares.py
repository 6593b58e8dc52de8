"""Shares and waiting lines: guarantees hold, borrowing is fair, nobody blocks others with its own limit."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.arena import size_class
from storage.errors import StagingBusy
from storage.host_memory import PAGE
from storage.line import Ask, Line
from storage.shares import Ledger, Shares

A, B, C, D = (UUID(int=number) for number in range(1, 5))


def ledger(capacity: int = 10, *, guarantee: int = 2, tenants: int = 3) -> Ledger:
    return Ledger("pages", capacity * PAGE, guarantee=guarantee * PAGE, tenants=tenants)


class Counter:
    """A line over one ledger whose memory is never scattered."""

    def __init__(self, books: Ledger, waiters: int = 100) -> None:
        self.books = books
        self.blocked: set[UUID] = set()  # tenants that find no contiguous room
        self.line: Line[int] = Line("a page", [books], waiters=waiters, price=self.price, give=self.give)

    def price(self, ask: Ask[int]) -> int:
        return size_class(ask.nbytes)

    def give(self, ask: Ask[int]) -> int | None:
        if ask.tenant in self.blocked or not self.books.fits(ask.tenant, self.price(ask)):
            return None
        self.books.charge(ask.tenant, self.price(ask))
        return self.price(ask)

    def ask(self, tenant: UUID, pages: int) -> Ask[int]:
        ask: Ask[int] = Ask(tenant, pages * PAGE, "", 0.0)
        self.line.join(ask)
        self.line.serve()
        return ask


def test_a_tenant_borrows_the_common_rest_but_never_anothers_guarantee() -> None:
    books = ledger()
    assert books.limit == 6 * PAGE
    books.charge(A, 6 * PAGE)
    assert books.borrowed(A) == 4 * PAGE
    assert not books.fits(A, PAGE)
    for tenant in (B, C):
        assert books.fits(tenant, 2 * PAGE)
        books.charge(tenant, 2 * PAGE)
        assert not books.fits(tenant, PAGE)
    assert books.total == 10 * PAGE


def test_a_tenant_beyond_the_guaranteed_ones_borrows_all_until_one_leaves() -> None:
    books = ledger()
    for tenant in (A, B, C, D):
        books.charge(tenant, PAGE)
    assert [books.borrowed(tenant) for tenant in (A, B, C, D)] == [0, 0, 0, PAGE]
    books.discharge(A, PAGE)
    assert books.guarantees(D, PAGE), "the guarantee has moved on"
    books.charge(D, PAGE)
    assert books.borrowed(D) == 0
    assert books.holders() == {B: PAGE, C: PAGE, D: 2 * PAGE}


def test_giving_back_more_than_is_held_asserts() -> None:
    books = ledger()
    books.charge(A, PAGE)
    with pytest.raises(AssertionError, match="cannot give back"):
        books.discharge(A, 2 * PAGE)


@given(st.lists(st.tuples(st.sampled_from([A, B, C, D]), st.integers(1, 6), st.booleans()), max_size=60))
def test_guaranteed_bytes_are_always_there(steps: list[tuple[UUID, int, bool]]) -> None:
    books = ledger()
    held: list[tuple[UUID, int]] = []
    for tenant, pages, gives_back in steps:
        if gives_back and held:
            books.discharge(*held.pop(pages % len(held)))
        elif books.fits(tenant, pages * PAGE):
            books.charge(tenant, pages * PAGE)
            held.append((tenant, pages * PAGE))
        assert books.total == sum(nbytes for _, nbytes in held) <= 10 * PAGE
        assert books.common - sum(books.borrowed(each) for each in (A, B, C, D)) >= 0
        active = list(books.holders())[:3]
        if len(active) == 3:
            missing = sum(
                max(0, 2 * PAGE - books.held(each)) for each in active if books.borrowed(each) < books.held(each)
            )
            assert books.total + missing <= 10 * PAGE, "a guarantee is not backed by memory"


def test_shares_that_do_not_fit_name_the_numbers() -> None:
    with pytest.raises(ValueError, match="3 tenants with 8192 guaranteed bytes of pages"):
        ledger(5)
    good = Shares.of(64 << 20)
    assert good.window_bytes == 16 << 20
    with pytest.raises(ValueError, match="multiple of 4096, not 100"):
        Shares(window_bytes=100, tenants=1, guaranteed_window_bytes=0, guaranteed_resident_bytes=0, read_bytes=0)
    with pytest.raises(ValueError, match="read_bytes is not negative: -1"):
        Shares(window_bytes=PAGE, tenants=1, guaranteed_window_bytes=0, guaranteed_resident_bytes=0, read_bytes=-1)


def test_what_can_never_be_granted_is_refused_with_both_numbers() -> None:
    counter = Counter(ledger())
    with pytest.raises(StagingBusy, match=rf"of {7 * PAGE} bytes takes {7 * PAGE} .* at most {6 * PAGE}"):
        counter.ask(A, 7)
    assert counter.ask(A, 6).grant == 6 * PAGE


def test_a_tenants_requests_keep_their_order() -> None:
    counter = Counter(ledger())
    counter.ask(B, 6)
    large, small = counter.ask(A, 3), counter.ask(A, 1)
    assert large.grant is None
    assert small.grant is None, "the small one would starve the large one"
    counter.line.leave(large)
    counter.line.serve()
    assert small.grant


def test_a_tenant_at_its_limit_blocks_nobody_else() -> None:
    counter = Counter(ledger())
    counter.ask(A, 5)
    more = counter.ask(A, 2)
    assert more.grant is None, "3 + 2 borrowed pages are more than 4"
    assert counter.ask(B, 2).grant, "within its guarantee"
    assert counter.ask(B, 1).grant, "borrows less than the one that waits"
    assert more.grant is None


def test_among_tenants_that_borrow_equally_the_first_is_first() -> None:
    counter = Counter(ledger())
    hog = counter.ask(D, 5)
    first, second = counter.ask(A, 4), counter.ask(B, 3)
    assert hog.grant
    assert first.grant is None
    assert second.grant is None, "would take the one page that the first waits for"
    counter.books.discharge(D, 5 * PAGE)
    assert counter.line.serve() == [first, second]


def test_who_has_borrowed_cannot_overtake_who_has_not() -> None:
    counter = Counter(ledger())
    counter.ask(D, 4)
    patient = counter.ask(A, 5)
    greedy = counter.ask(D, 1)
    assert patient.grant is None
    assert greedy.grant is None
    counter.books.discharge(D, PAGE)
    assert counter.line.serve() == [patient]


def test_a_guaranteed_request_without_contiguous_room_holds_back_borrowers_only() -> None:
    counter = Counter(ledger())
    counter.blocked.add(A)
    owed = counter.ask(A, 1)
    assert counter.ask(B, 3).grant is None
    assert counter.ask(C, 2).grant
    counter.blocked.clear()
    assert counter.line.serve()[0] is owed


def test_waiting_requests_are_bounded_per_tenant() -> None:
    counter = Counter(ledger(), waiters=2)
    counter.ask(A, 6)
    waiting = [counter.ask(A, 1), counter.ask(A, 1)]
    with pytest.raises(StagingBusy, match="2 requests waiting for a page, the most allowed"):
        counter.ask(A, 1)
    counter.ask(B, 2)
    counter.line.leave(waiting[0])
    counter.line.leave(waiting[0])
    assert len(counter.line) == 1
    counter.ask(A, 1)


def test_a_closed_line_refuses_the_waiting_and_the_coming() -> None:
    counter = Counter(ledger())
    counter.ask(A, 6)
    waiting = counter.ask(A, 1)
    assert counter.line.close("closing") == [waiting]
    assert waiting.refusal == "closing"
    with pytest.raises(StagingBusy, match="closing"):
        counter.ask(B, 1)
    assert counter.line.oldest is None
