"""Match leases: bounded shields against eviction."""

from __future__ import annotations

from uuid import UUID

from kvgw.gateway.leases import BLOBS_PER_TENANT_MAX, RENEWALS_MAX, REST_S, MatchLeases
from tests.support.manual_clock import ManualClock

A, B = UUID(int=1), UUID(int=2)
BLOB = b"b" * 16


def test_a_lease_shields_until_it_ends() -> None:
    clock = ManualClock()
    leases = MatchLeases(clock)
    leases.take(A, [BLOB], 1000)
    assert leases.shielded(A) == {BLOB}
    assert leases.shielded(B) == frozenset(), "law 6: another tenant's leases shield nothing of mine"
    clock.advance(1.001)
    assert leases.shielded(A) == frozenset()
    assert leases.count() == 0


def test_a_get_ends_the_lease() -> None:
    leases = MatchLeases(ManualClock())
    leases.take(A, [BLOB], 1000)
    leases.end(A, BLOB)
    leases.end(A, b"never leased")
    assert leases.shielded(A) == frozenset()


def test_R01_asking_again_does_not_stretch_a_lease_for_ever() -> None:
    clock = ManualClock()
    leases = MatchLeases(clock)
    for _ in range(10 * RENEWALS_MAX):
        leases.take(A, [BLOB], 1000)
        clock.advance(0.9)
        if not leases.shielded(A):
            return
    raise AssertionError("matching in a loop shields the chunk for ever")


def test_R01_after_a_lease_that_was_stretched_to_its_end_eviction_has_its_turns() -> None:
    clock = ManualClock()
    leases = MatchLeases(clock)
    shielded, turns = 0, 0
    for _ in range(20_000):  # a thousand seconds of a client that asks every 50 ms
        leases.take(A, [BLOB], 60_000)
        if leases.shielded(A):
            shielded, turns = shielded + 1, 0
        else:
            turns += 1
            assert turns * 0.05 <= REST_S + 0.05, "and then the client is believed again"
        clock.advance(0.05)
    assert shielded <= 20_000 * 0.87, "of each lease and its rest, the rest is eviction's: 10 s of 71"
    assert shielded >= 20_000 * 0.80


def test_a_lease_that_was_not_stretched_so_often_leaves_no_rest() -> None:
    clock = ManualClock()
    leases = MatchLeases(clock)
    for _ in range(RENEWALS_MAX):
        leases.take(A, [BLOB], 1000)
    clock.advance(1.001)
    leases.take(A, [BLOB], 1000)
    assert leases.shielded(A) == {BLOB}


def test_a_tenant_shields_no_more_than_its_share() -> None:
    leases = MatchLeases(ManualClock())
    leases.take(A, (index.to_bytes(16, "big") for index in range(BLOBS_PER_TENANT_MAX + 10)), 1000)
    assert len(leases.shielded(A)) == BLOBS_PER_TENANT_MAX, "law 9"
    leases.take(B, [BLOB], 1000)
    assert leases.shielded(B) == {BLOB}, "law 6: one tenant's leases take no room from another's"
