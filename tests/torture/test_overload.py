"""L03: five times the capacity: what is turned away, in which order, at what price; see `tests/torture/overload.py`."""

from __future__ import annotations

import pytest

from tests.torture.overload import measure

RUNS = 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_L03_five_times_the_capacity_is_turned_away_in_order_and_leaves_nothing_behind() -> None:
    """Goodput and p99 hang on what else the machine does meanwhile: one of three runs has to reach them."""
    quick = []
    for _ in range(RUNS):
        report = measure(5.0, 3.0, print)
        print(f"L03: goodput {report['goodput_of_peak']:.0%} of the peak's, p99 × {report['p99_of_peak']}")
        assert report["overload"]["served"], "something is served all the same"
        for goal in ("memory", "order", "told when to come again", "slow peers hold nothing"):
            assert report["goals"][goal], f"{goal}: {report}"
        quick.append(report["goals"]["goodput"] and report["goals"]["p99"])
        if quick[-1]:
            break
    assert any(quick), "goodput or p99 was missed in every run"
