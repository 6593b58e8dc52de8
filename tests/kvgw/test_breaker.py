"""The circuit breaker: opens after outages, lets one caller try, and provably closes."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvgw.breaker import Breaker, BreakerOptions, BreakerState
from tests.support.manual_clock import ManualClock

OPTIONS = BreakerOptions(failures=3, period_s=1.0, period_max_s=8.0)


@dataclass
class Dice:
    """Chance that a test decides."""

    value: float = 0.0

    def jitter(self) -> float:
        return self.value

    def token(self, size: int) -> bytes:
        return bytes(size)


def opened(clock: ManualClock, jitter: float = 0.0) -> Breaker:
    breaker = Breaker(OPTIONS, clock, Dice(jitter))
    for _ in range(OPTIONS.failures):
        assert breaker.admit()
        breaker.failed()
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_does_not() -> None:
    breaker = Breaker(OPTIONS, ManualClock(), Dice())
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
        assert breaker.state is BreakerState.CLOSED
    for _ in range(3):
        breaker.failed()
    assert breaker.state is BreakerState.OPEN
    assert not breaker.admit()


def test_half_open_admits_exactly_one_and_its_success_closes() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(0.74)
    assert not breaker.admit()
    clock.advance(0.02)
    assert breaker.state is BreakerState.HALF_OPEN
    tries = [breaker.admit() for _ in range(5)]
    assert tries == [True, False, False, False, False], "law 9: an outage is bounded: when its time is over one tries"
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert all(breaker.admit() for _ in range(5))


def test_each_failed_try_doubles_the_period_up_to_its_limit() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    periods = []
    for _ in range(6):
        waited = 0.0
        while not breaker.admit():
            clock.advance(0.25)
            waited += 0.25
        periods.append(waited)
        breaker.failed()
    assert periods == [0.75, 1.5, 3.0, 6.0, 6.0, 6.0]
    clock.advance(6.0)
    assert breaker.admit()
    breaker.succeeded()
    for _ in range(3):
        breaker.failed()
    clock.advance(0.75)
    assert breaker.admit(), "after a success the first period counts again"


def test_clients_do_not_come_back_in_the_same_instant() -> None:
    clock = ManualClock()
    early, late = opened(clock, 0.0), opened(clock, 0.999)
    clock.advance(0.8)
    assert early.admit()
    assert not late.admit()
    clock.advance(0.5)
    assert late.admit()


def test_a_try_that_was_cancelled_leaves_the_next_one_its_turn() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(1)
    assert breaker.admit()
    breaker.abandoned()
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.admit(), "a cancelled try does not lock the breaker for ever"


class AnyHistory(RuleBasedStateMachine):
    """Calls begin and end in any order; whatever happened, a gateway that answers again is found again."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.breaker = Breaker(OPTIONS, self.clock, Dice(0.5))
        self.running = 0

    @rule()
    def begin(self) -> None:
        before = self.breaker.state
        if self.breaker.admit():
            self.running += 1
            assert before is not BreakerState.OPEN

    @precondition(lambda self: self.running)
    @rule(how=st.sampled_from(["succeeded", "failed", "abandoned"]))
    def end(self, how: str) -> None:
        self.running -= 1
        getattr(self.breaker, how)()

    @rule(seconds=st.floats(0.0, 10.0))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def it_stays_possible_to_close_it(self) -> None:
        if self.running == 0 and self.breaker.state is BreakerState.HALF_OPEN:
            assert self.breaker.admit(), "nobody tries, and nobody may"
            self.breaker.abandoned()

    def teardown(self) -> None:
        while self.running:
            self.end("failed")
        self.clock.advance(1.25 * OPTIONS.period_max_s)
        assert self.breaker.admit()
        self.breaker.succeeded()
        assert self.breaker.state is BreakerState.CLOSED


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
