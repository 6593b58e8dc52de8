"""Rate limits: exact, shared by gateways, open when they fail, and told with the time to come again (Q10–Q12)."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace as replace_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvgw.errors import Code, Outage
from kvgw.gateway.core import Gateway
from kvgw.gateway.limiter import ASKING_PART, READING_PART, WRITING_PART, Allowance, Cell, Limiter
from kvgw.metrics import Metrics
from kvgw.model import PutRequest
from kvgw.settings import LimitSettings
from kvgw.wire import Kind
from tenancy.model import Namespace, Scope
from tests.support.admin import Admin
from tests.support.aio import aio
from tests.support.gateways import SMALL, buffers_for, format_of, house, keys_of, payloads_of
from tests.support.manual_clock import ManualClock
from tests.support.raw_peer import RawPeer


def namespace(number: int = 1, **limits: int) -> Namespace:
    values: dict[str, Any] = {
        "state": "active", "durability": "nvme", "default_ttl_ms": 1, "max_ttl_ms": 1, "sliding_ttl": True, "epoch": 1,
        "min_decrypt_epoch": 1, "min_encrypt_epoch": 1, "deletion_allowed": True, "visibility": "private",
        "readers": "", "over_quota": "reject", "hold_bytes": 0, "nvme_bytes": 0, "requests_per_second": 0,
        "bytes_per_second": 0, "concurrent_requests": 0,
    }  # fmt: skip
    return Namespace(Scope(UUID(int=9), UUID(int=number)), "n", **{**values, **limits})


def admits(limiter: Limiter, one: Namespace, moved: int = 0, part: float = READING_PART) -> bool:
    try:
        with limiter.admitted(one, part) as admission:
            admission.moved_bytes = moved
    except Outage as error:
        assert error.code is Code.BUSY
        assert error.retry_after_s > 0
        return False
    return True


def came_in(rate: int, pauses: int, pause_s: float) -> int:
    """How many of those who try without end, and pause when one is turned away, are let in."""
    clock = ManualClock()
    limiter = Limiter(clock, Metrics(), Allowance())
    one = namespace(requests_per_second=rate)
    came = 0
    for _ in range(pauses):
        while admits(limiter, one):
            came += 1
        clock.advance(pause_s)
    return came


# Below a rate of four, pauses of this length find a bucket that is full: the next test is about that.
@given(rate=st.integers(4, 500), seconds=st.integers(1, 20), pause_ms=st.integers(1, 700))
@settings(max_examples=40, deadline=None)
def test_Q10_a_rate_admits_its_burst_and_its_rate_exactly(rate: int, seconds: int, pause_ms: int) -> None:
    pauses = -(-1000 * seconds // pause_ms)
    most = rate + rate * (pauses - 1) * pause_ms / 1000  # the last pause passed after the last try
    assert abs(came_in(rate, pauses, pause_ms / 1000) - most) <= 1 + 1e-6 * most, f"Q10: b + r·t = {most}"


@given(power=st.integers(0, 9), pauses=st.integers(1, 40), pause=st.integers(1, 4096))
@settings(max_examples=40, deadline=None)
def test_Q10_what_finds_the_burst_saved_up_is_lost(power: int, pauses: int, pause: int) -> None:
    """A bucket of `rate` units into which as many flow in a second. Powers of two: floats and fractions agree."""
    rate = 2**power
    level, expected = Fraction(rate), 0
    for _ in range(pauses):
        expected += int(level)
        level = min(Fraction(rate), level - int(level) + Fraction(rate * pause, 1024))
    assert came_in(rate, pauses, pause / 1024) == expected


def test_the_time_to_come_again_is_the_earliest_that_works() -> None:
    clock = ManualClock()
    cell = Cell(rate=10.0)
    for _ in range(10):
        assert cell.wait(clock.monotonic(), 10.0) == 0
        cell.take(clock.monotonic(), 1)
    wait = cell.wait(clock.monotonic(), 10.0)
    assert 0 < wait <= 0.1 + 1e-9
    clock.advance(wait * 0.99)
    assert cell.wait(clock.monotonic(), 10.0) > 0
    clock.advance(wait * 0.01 + 1e-9)
    assert cell.wait(clock.monotonic(), 10.0) <= 1e-9


def test_bytes_are_paid_after_they_moved_and_debt_ends_by_itself() -> None:
    clock = ManualClock()
    limiter = Limiter(clock, Metrics(), Allowance())
    one = namespace(bytes_per_second=1000)
    assert admits(limiter, one, moved=5000), "nobody knows before how much it will be"
    assert not admits(limiter, one)
    clock.advance(3.9)
    assert not admits(limiter, one)
    clock.advance(0.2)
    assert admits(limiter, one)


def test_what_is_owed_under_a_rate_that_was_a_mistake_is_paid_at_the_one_that_corrects_it() -> None:
    clock = ManualClock()
    limiter = Limiter(clock, Metrics(), Allowance())
    assert admits(limiter, namespace(bytes_per_second=1), moved=2**30)
    assert not admits(limiter, namespace(bytes_per_second=1))
    assert not admits(limiter, namespace(bytes_per_second=2**30))
    clock.advance(0.1)
    assert admits(limiter, namespace(bytes_per_second=2**30)), "not in 34 years"
    assert admits(limiter, namespace(bytes_per_second=2**30), moved=3 * 2**30)
    assert not admits(limiter, namespace(bytes_per_second=2**30))
    clock.advance(1.5)
    assert not admits(limiter, namespace(bytes_per_second=2**29)), "a lower rate pays the same debt more slowly"


def test_a_tenants_limit_holds_for_all_of_its_namespaces_together_and_for_no_other() -> None:
    clock = ManualClock()
    limiter = Limiter(clock, Metrics(), Allowance(requests_per_second=4))
    assert [admits(limiter, namespace(number)) for number in (1, 2, 1, 2, 1)] == [True] * 4 + [False]
    elsewhere = Namespace(Scope(UUID(int=8), UUID(int=1)), *[getattr(namespace(), name) for name in
                          ("name", *list(Namespace.__slots__)[2:])])  # fmt: skip
    assert admits(limiter, elsewhere), "law 6: another tenant is not held up"
    clock.advance(1.0)
    limiter.gateways = 4
    assert admits(limiter, namespace(1))
    assert not admits(limiter, namespace(2)), "four gateways grant a quarter each"


def test_a_gateway_that_comes_or_goes_changes_what_each_grants_at_once() -> None:
    clock = ManualClock()
    limiter = Limiter(clock, Metrics(), Allowance())
    one = namespace(requests_per_second=4)
    for gateways, granted in ((1, 4), (4, 1), (2, 2)):
        clock.advance(10.0)
        limiter.gateways = gateways
        assert sum(admits(limiter, one) for _ in range(6)) == granted


def test_at_once_and_leaving_makes_room() -> None:
    limiter = Limiter(ManualClock(), Metrics(), Allowance())
    one = namespace(concurrent_requests=2)
    with ExitStack() as stack:
        stack.enter_context(limiter.admitted(one))
        stack.enter_context(limiter.admitted(one))
        assert not admits(limiter, one)
    assert admits(limiter, one), "law 7: left is left, whatever happened inside"


def test_L03_in_a_crowd_small_questions_go_first_then_puts_and_gets_last() -> None:
    limiter = Limiter(ManualClock(), Metrics(), Allowance())
    one = namespace(concurrent_requests=8)

    def let_in() -> list[float]:
        return [part for part in (ASKING_PART, WRITING_PART, READING_PART) if admits(limiter, one, part=part)]

    turned_away = []
    with ExitStack() as stack:
        for _ in range(9):
            turned_away.append(3 - len(let_in()))
            if turned_away[-1] < 3:
                stack.enter_context(limiter.admitted(one))
    assert turned_away == [0, 0, 0, 0, 1, 1, 2, 2, 3], "at a half, at three quarters, and when all is taken"
    with limiter.admitted(namespace(concurrent_requests=1), ASKING_PART):
        assert not admits(limiter, namespace(concurrent_requests=1)), "one at least, whatever its kind"


@aio
async def test_L03_in_a_crowd_a_request_is_turned_away_before_anything_is_done_for_it(tmp_path: Path) -> None:
    """Law 6 too: who may not name a namespace does not hear that it is full."""
    async with house(
        "unix", tmp_path / "gw", settings=replace(SMALL, limits=LimitSettings(concurrent_requests=1))
    ) as made:
        client, key = made.client(), keys_of(1)
        registered = await client.register(format_of())
        assert made.endpoint is not None
        peers = [await RawPeer.connect(made.endpoint) for _ in range(2)]
        for peer in peers:
            await peer.hello()
        request = PutRequest(registered.fingerprint, key, deadline_ms=60_000)
        await peers[0].send(Kind.REQUEST, 1, request)
        answer = await peers[0].receive()
        assert answer is not None
        assert answer[0].kind is Kind.WANTED, "it is inside, and its payload does not come"
        with mock.patch.object(Gateway, "put", side_effect=AssertionError("it was begun")) as put:
            await peers[1].send(Kind.REQUEST, 1, request)
            refused = await peers[1].failure()
            assert (refused.code, refused.retry_after_ms > 0, put.called) == (Code.BUSY, True, False)
        with pytest.raises(Outage, match="requests are being served"):
            await client.get(registered, key, buffers_for(registered, 1), on_error="raise")
        samples = made.opened.rooms.metrics.registry
        assert samples.get_sample_value("kvgw_limited_total", {"limit": "concurrency"}) == 2
        assert samples.get_sample_value("kvgw_requests_total", {"op": "put", "code": "busy"}) == 1
        stranger = replace_dataclass(made.owner, namespaces=("other-*",))
        assert made.opened.gateway.turned_away(made.owner, request) is not None
        assert made.opened.gateway.turned_away(stranger, request) is None
        for peer in peers:
            peer.close()


def test_Q11_a_limiter_that_fails_lets_requests_pass(caplog: pytest.LogCaptureFixture) -> None:
    limiter = Limiter(ManualClock(), Metrics(), Allowance(requests_per_second=1))
    with mock.patch.object(Limiter, "_accounts_of", side_effect=RuntimeError("a bug")):
        assert all(admits(limiter, namespace()) for _ in range(10))
    assert caplog.text.count("the rate limiter failed") == 1, "said once"


@aio
async def test_Q12_who_is_turned_away_hears_when_to_come_again(tmp_path: Path) -> None:
    limited = replace(SMALL, limits=LimitSettings(requests_per_second=3))
    clock = ManualClock()
    async with house("unix", tmp_path / "gw", clock=clock, settings=limited) as made:
        client = made.client()
        registered = await client.register(format_of())
        await client.put(registered, keys_of(2), payloads_of(registered, 2))
        await client.match(registered, keys_of(2))
        with pytest.raises(Outage, match="limit of 3 requests a second") as refused:
            await client.match(registered, keys_of(2), on_error="raise")
        assert (refused.value.code, refused.value.retry_after_s > 0) == (Code.BUSY, True)
        report = await client.get(registered, keys_of(2), buffers_for(registered, 2))
        assert (len(report.hits), "limit" in report.reason) == (0, True), "reads fail open"
        clock.advance(1.0)
        assert (await client.match(registered, keys_of(2))).count == 2
        assert made.opened.rooms.metrics.registry.get_sample_value("kvgw_limited_total", {"limit": "requests"}) == 2


@aio
async def test_a_namespaces_limit_is_set_while_the_gateway_serves(tmp_path: Path) -> None:
    clock = ManualClock()
    async with house("embedded", tmp_path / "gw", clock=clock) as made:
        client = made.client()
        registered = await client.register(format_of())
        admin = Admin(made.opened)
        path = "/tenants/-/namespaces/default"
        await admin.own("PATCH", path, {"requests_per_second": 1})
        clock.advance(3.0)
        assert [bool((await client.match(registered, keys_of(1))).reason) for _ in range(3)] == [False, True, True]
        await admin.own("PATCH", path, {"requests_per_second": 0})
        clock.advance(3.0)
        assert not (await client.match(registered, keys_of(1))).reason
        for wrong in (-1, 1e9, "10", 10**30, 1.5, True):
            answer = await admin.ask("PATCH", f"/v1{path}", {"requests_per_second": wrong}, peer=os.geteuid())
            assert answer.status_code == 422, wrong
