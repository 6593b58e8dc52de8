"""The catalog's time: never backward, and never standing still however wrong the clock that it follows was."""

from __future__ import annotations

from tenancy.timekeeping import CatalogTime

START_MS = 1_700_000_000_000
HOUR_MS = 3_600_000


class WrongClock:
    """A wall clock that can be set, beside a monotonic one that cannot."""

    def __init__(self) -> None:
        self.elapsed_s = 100.0
        self.wrong_ms = 0

    def monotonic(self) -> float:
        return self.elapsed_s

    def now_ms(self) -> int:
        return START_MS + round(self.elapsed_s * 1000) + self.wrong_ms

    async def sleep(self, seconds: float) -> None:
        self.elapsed_s += seconds


def test_R59_a_clock_set_back_lets_time_go_on_until_it_has_caught_up() -> None:
    clock = WrongClock()
    time = CatalogTime(clock, 0)
    before_ms = time.now_ms()
    clock.wrong_ms = -HOUR_MS
    assert time.now_ms() == before_ms, "not backward: what has expired stays so"
    assert time.behind_ms == HOUR_MS
    clock.elapsed_s += 60
    assert time.now_ms() == before_ms + 30_000, "a retry that is due in a minute is not due in an hour"
    for _ in range(1000):
        clock.elapsed_s += 0.0001
        time.now_ms()
    assert time.now_ms() >= before_ms + 30_050, "however often it is asked"
    clock.elapsed_s += 2 * HOUR_MS / 1000
    assert time.behind_ms == 0
    assert time.now_ms() == clock.now_ms(), "an hour's error is over after two"


def test_R59_a_time_that_was_written_down_far_ahead_does_not_stop_a_new_process() -> None:
    clock = WrongClock()
    time = CatalogTime(clock, clock.now_ms() + HOUR_MS)
    began_ms = time.now_ms()
    assert began_ms == clock.now_ms() + HOUR_MS
    clock.elapsed_s += 10
    assert time.now_ms() == began_ms + 5_000


def test_a_right_clock_is_followed_exactly() -> None:
    clock = WrongClock()
    time = CatalogTime(clock, 0)
    for step_s in (0.0, 0.001, 5.0, 3600.0):
        clock.elapsed_s += step_s
        assert time.now_ms() == clock.now_ms()
    clock.wrong_ms = HOUR_MS
    assert time.now_ms() == clock.now_ms(), "forward at once"
