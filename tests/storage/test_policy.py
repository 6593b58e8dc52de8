"""Eviction order: segmented LRU within each owner."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.policy import EvictionPolicy, SegmentedLru

ALICE, BOB = UUID(int=1), UUID(int=2)


def admit(policy: EvictionPolicy, *names: str, owner: UUID = ALICE) -> None:
    for name in names:
        policy.admit(name, owner)


def test_unused_residents_leave_in_the_order_of_their_arrival() -> None:
    policy = SegmentedLru()
    admit(policy, "a", "b", "c")
    assert list(policy.victims(ALICE)) == ["a", "b", "c"]


def test_a_scan_does_not_push_out_what_was_used_again() -> None:
    policy = SegmentedLru()
    admit(policy, "hot", "cold")
    admit(policy, *(f"scan-{i}" for i in range(100)))
    policy.touch("hot")
    admit(policy, *(f"more-{i}" for i in range(100)))
    assert list(policy.victims(ALICE))[-1] == "hot"


def test_protected_residents_beyond_their_part_return_to_probation() -> None:
    policy = SegmentedLru(protected_part=0.5)
    admit(policy, "a", "b", "c", "d")
    for name in ("a", "b", "c"):
        policy.touch(name)
    assert list(policy.victims(ALICE)) == ["d", "a", "b", "c"]


def test_owners_do_not_change_each_others_order() -> None:
    policy = SegmentedLru()
    admit(policy, "a1", "a2", owner=ALICE)
    before = list(policy.victims(ALICE))
    admit(policy, "b1", "b2", owner=BOB)
    policy.touch("b1")
    policy.remove("b2")
    assert list(policy.victims(ALICE)) == before
    assert list(policy.victims(BOB)) == ["b1"]


def test_unknown_names_are_nobodys_victims() -> None:
    policy = SegmentedLru()
    policy.touch("never seen")
    assert list(policy.victims(ALICE)) == []
    admit(policy, "a")
    policy.remove("a")
    assert list(policy.victims(ALICE)) == []
    assert policy._segments == {}, "an owner without residents is forgotten"
    with pytest.raises(KeyError):
        policy.remove("a")


def test_a_name_is_admitted_once() -> None:
    policy = SegmentedLru()
    admit(policy, "a")
    with pytest.raises(AssertionError, match="already"):
        admit(policy, "a")


@pytest.mark.parametrize("part", [-0.1, 1.0])
def test_the_protected_part_is_a_fraction(part: float) -> None:
    with pytest.raises(ValueError, match=str(part)):
        SegmentedLru(part)


@given(st.lists(st.tuples(st.sampled_from(["admit", "touch", "remove"]), st.sampled_from("abcdefgh")), max_size=100))
def test_victims_are_exactly_the_admitted(steps: list[tuple[str, str]]) -> None:
    policy = SegmentedLru()
    known: set[str] = set()
    for verb, name in steps:
        if verb == "touch":
            policy.touch(name)
        elif verb == "admit" and name not in known:
            policy.admit(name, ALICE)
            known.add(name)
        elif verb == "remove" and name in known:
            policy.remove(name)
            known.discard(name)
        victims = list(policy.victims(ALICE))
        assert len(victims) == len(set(victims))
        assert set(victims) == known
