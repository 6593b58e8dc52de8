"""Several residents or drafts in one go keep the same books as one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from storage.host_memory import PAGE
from storage.line import Ask
from storage.pool import Pool
from storage.resident import Grip, Resident, State
from tests.storage.test_pool import A, B, ask_draft, ask_read, granted, make_pool, stored

NAMES = [f"blob-{number}" for number in range(6)]
Step = tuple[str, UUID, list[str]]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["hold", "end", "drop", "settle", "store"]),
        st.sampled_from([A, B]),
        st.lists(st.sampled_from(NAMES), min_size=1, max_size=5),
    ),
    max_size=25,
)


def books(pool: Pool) -> object:
    eviction = pool.residents.eviction
    return (
        [(ledger.holders(), ledger.total, ledger._borrowed) for ledger in (pool.used_ledger, pool.unclean_ledger)],
        {state: pool.residents.bytes_in[state] for state in State},
        (eviction.candidate_bytes, dict(eviction._candidate_bytes), dict(eviction._owned_bytes), dict(eviction._walls)),
        pool.resident_zone.statistics(),
        [list(pool.residents._policy.victims(tenant)) for tenant in (A, B)],
        pool.counts.hits,
    )


def hold_one_by_one(pool: Pool, tenant: UUID, names: Sequence[str]) -> list[Grip]:
    grips = []
    for name in names:
        resident = pool.residents.find(name)
        if resident is None or not resident.is_whole:
            break
        grips.append(granted(ask_read(pool, tenant, name)))
    return grips


@given(STEPS)
@settings(max_examples=120, deadline=None)
def test_a_group_keeps_the_books_of_its_parts(steps: list[Step]) -> None:
    together, apart = make_pool(), make_pool()
    held: list[tuple[UUID, list[Resident], list[Grip]]] = []
    for pool in (together, apart):
        for number, name in enumerate(NAMES):
            stored(pool, (A, B)[number % 2], name, dirty=number == 3)
    for what, tenant, names in steps:
        if what == "hold":
            residents = together.hold_now(tenant, [(name, PAGE) for name in names])
            grips = hold_one_by_one(apart, tenant, names)
            assert [one.name for one in residents] == [grip.resident.name for grip in grips]
            held.append((tenant, residents, grips))
        elif what == "end" and held:
            _end(together, apart, *held.pop(0))
        for pool in (together, apart):
            if what == "drop":
                pool.drop(names[0])
            elif what == "settle":
                pool.settle(names[0])
            elif what == "store" and pool.residents.find(names[0]) is None:
                stored(pool, tenant, names[0])
            pool.advance()
        assert books(together) == books(apart)
    while held:
        _end(together, apart, *held.pop())
        assert books(together) == books(apart)


def _end(together: Pool, apart: Pool, tenant: UUID, residents: list[Resident], grips: list[Grip]) -> None:
    together.let_go(tenant, residents)
    for grip in grips:
        apart.leave(grip)


def test_a_group_is_what_fits_into_the_share() -> None:
    pool = make_pool()
    for number in range(6):
        stored(pool, A, f"a{number}", 2)
    taken = granted(ask_read(pool, A, "large", 3))  # with its guarantee of 4 and the common 8, nine pages are left
    run = pool.hold_now(A, [(f"a{number}", 2 * PAGE) for number in range(6)])
    assert [one.name for one in run] == ["a0", "a1", "a2", "a3"]
    assert pool.used_ledger.held(A) == 11 * PAGE
    pool.let_go(A, run)
    pool.leave(taken)
    assert pool.used_ledger.holders() == {}


def test_drafts_in_one_go_keep_the_books_of_drafts_one_by_one() -> None:
    together, apart = make_pool(), make_pool()
    at_once = together.drafts_now(A, ["a", "b", "c"], PAGE)
    singly = [granted(ask_draft(apart, A, name)) for name in "abc"]
    assert books(together) == books(apart)
    for pool, grips in ((together, at_once), (apart, singly)):
        pool.publish(grips[0], dirty=True)
        pool.publish(grips[1], dirty=False)
        for grip in grips:
            pool.leave(grip)
    assert books(together) == books(apart)
    more = together.drafts_now(A, [f"d{number}" for number in range(16)], PAGE)
    assert len(more) == 7, "its guarantee of 4, the common 8 less 4 that are kept for reads, less the dirty one"


def test_nothing_is_taken_at_once_while_somebody_waits_or_when_it_is_closed() -> None:
    pool = make_pool()
    stored(pool, A, "here")
    first = granted(ask_draft(pool, A, "first", 8))
    waiting: Ask[Grip] = ask_draft(pool, A, "second", 8)
    assert waiting.grant is None
    assert pool.drafts_now(A, ["third"], PAGE) == []
    pool.drafts.leave(waiting)
    pool.leave(first)
    pool.close("over")
    assert pool.drafts_now(A, ["third"], PAGE) == []
    assert pool.hold_now(A, [("here", PAGE)]) == []
