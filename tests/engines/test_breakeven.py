"""Hits that do not pay: decided from measured speeds, never blindly, never for ever."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgw.engines.breakeven import MARGIN, PROBE_HITS, PROBE_S, SAMPLES_MIN, BreakEven

TOKENS, BYTES = 256, 32 * 2**20
"""One chunk of a model with 128 KiB a token."""

tokens = st.integers(1, 100_000)
sizes = st.integers(1, 2**36)
seconds = st.floats(1e-4, 240)
load_samples = st.lists(st.tuples(sizes, seconds), max_size=30)
prefill_samples = st.lists(st.tuples(tokens, seconds), max_size=30)


def guard(*, load_s: float = 1.0, prefill_s: float = 1.0, samples: int = SAMPLES_MIN) -> BreakEven:
    """One that has seen chunks loaded and computed in so many seconds each."""
    made = BreakEven()
    for _ in range(samples):
        made.loaded(BYTES, load_s)
        made.computed(TOKENS, prefill_s)
    return made


@given(load_samples, prefill_samples, tokens, sizes)
def test_nothing_is_declined_before_there_are_samples_of_both(
    loads: list[tuple[int, float]], prefills: list[tuple[int, float]], count: int, size: int
) -> None:
    few = SAMPLES_MIN - 1
    for some_loads, some_prefills in ((loads, prefills[:few]), (loads[:few], prefills)):
        made = BreakEven()
        for sample in some_loads:
            made.loaded(*sample)
        for sample in some_prefills:
            made.computed(*sample)
        assert all(made.pays(count, size, now) for now in range(20))


@given(load_samples, prefill_samples, st.lists(st.tuples(tokens, sizes, st.floats(0, 20)), max_size=30))
def test_a_store_that_is_fast_again_is_used_again(
    loads: list[tuple[int, float]], prefills: list[tuple[int, float]], hits: list[tuple[int, int, float]]
) -> None:
    """Whatever was before: probes go on, and a bounded number of fast ones ends it."""
    made = BreakEven(prefill_tokens_per_s=1000.0)
    now = 0.0
    for sample in loads:
        made.loaded(*sample)
    for sample in prefills:
        made.computed(*sample)
    for count, size, later in hits:
        now += later
        made.pays(count, size, now)
    probes = 0
    for _ in range(200 * PROBE_HITS):
        now += PROBE_S
        if made.pays(TOKENS, BYTES, now):
            probes += 1
            made.loaded(BYTES, 0.01)  # 25 times faster than computing
    assert probes >= 200
    assert all(made.pays(TOKENS, BYTES, now) for _ in range(10))


@given(load_samples, prefill_samples, tokens, sizes, st.integers(0, 100_000), st.floats(0, 1))
def test_more_tokens_or_fewer_bytes_never_turn_a_yes_into_a_no(
    loads: list[tuple[int, float]], prefills: list[tuple[int, float]], count: int, size: int, more: int, part: float
) -> None:
    made = BreakEven()
    for sample in loads:
        made.loaded(*sample)
    for sample in prefills:
        made.computed(*sample)
    if copy_of(made).pays(count, size, 0.0):
        assert copy_of(made).pays(count + more, size, 0.0)
        assert copy_of(made).pays(count, max(1, int(size * part)), 0.0)
        assert copy_of(made).pays(count * 2, size * 2, 0.0), "as much again is no slower"


@given(
    st.lists(st.tuples(sizes, seconds, st.floats(0.01, 1)), min_size=SAMPLES_MIN, max_size=30),
    st.floats(1, 1e6),
    tokens,
    sizes,
)
def test_a_faster_store_or_a_slower_engine_never_turns_a_yes_into_a_no(
    loads: list[tuple[int, float, float]], rate: float, count: int, size: int
) -> None:
    slow, fast, lazy = (BreakEven(prefill_tokens_per_s=one) for one in (rate, rate, rate / 2))
    for nbytes, took, faster in loads:
        slow.loaded(nbytes, took)
        lazy.loaded(nbytes, took)
        fast.loaded(nbytes, took * faster)
    if slow.pays(count, size, 0.0):
        assert fast.pays(count, size, 0.0)
        assert lazy.pays(count, size, 0.0)


def copy_of(made: BreakEven) -> BreakEven:
    """Another with the same samples and decisions; a lock cannot be copied."""
    other = BreakEven()
    other.__dict__.update({name: copy.deepcopy(value) for name, value in made.__dict__.items() if name != "_lock"})
    return other


@pytest.mark.parametrize(("load_s", "pays"), [(0.5, True), (1.0, True), (1.2, True), (1.3, False), (10.0, False)])
def test_a_load_that_is_slower_than_computing_is_declined(load_s: float, pays: bool) -> None:
    made = guard(load_s=load_s)
    assert made.load_bytes_per_s == pytest.approx(BYTES / load_s)
    assert made.prefill_tokens_per_s == pytest.approx(TOKENS)
    assert made.pays(TOKENS, BYTES, 0.0) is pays


def test_between_the_two_thresholds_it_stays_as_it_is() -> None:
    made = guard(load_s=(1 + MARGIN) / 2)
    assert made.pays(TOKENS, BYTES, 0.0)
    for _ in range(40):
        made.loaded(BYTES, 2.0)
    assert not made.pays(TOKENS, BYTES, 0.0)
    for _ in range(40):
        made.loaded(BYTES, (1 + MARGIN) / 2)
    assert not made.pays(TOKENS, BYTES, 0.0), "no back and forth at the border"
    for _ in range(40):
        made.loaded(BYTES, 0.9)
    assert made.pays(TOKENS, BYTES, 0.0)


def test_a_probe_now_and_then_and_never_more() -> None:
    made = guard(load_s=10.0)
    assert not made.pays(TOKENS, BYTES, 0.0)
    taken = [now for now in range(1, 101) if made.pays(TOKENS, BYTES, float(now))]
    assert taken == list(range(PROBE_HITS - 1, 101, int(PROBE_S)))
    rare = guard(load_s=10.0)
    assert [rare.pays(TOKENS, BYTES, now * 60.0) for now in range(8)] == [False, False, False, True] * 2


def test_one_hiccup_among_fast_loads_changes_nothing() -> None:
    made = guard(load_s=0.1)
    made.loaded(BYTES, 10.0)
    assert made.pays(TOKENS, BYTES, 0.0)


def test_what_arrives_by_nobody_is_no_sample() -> None:
    """A gateway that is away is the breaker's business."""
    made = guard(load_s=0.1)
    for _ in range(100):
        made.loaded(0, 240.0)
    assert made.pays(TOKENS, BYTES, 0.0)


def test_it_can_be_switched_off_and_be_told_the_engines_speed() -> None:
    off = BreakEven(on=False, prefill_tokens_per_s=1e9)
    told = BreakEven(prefill_tokens_per_s=TOKENS)
    for _ in range(SAMPLES_MIN):
        off.loaded(BYTES, 100.0)
        told.loaded(BYTES, 2.0)
    assert off.pays(TOKENS, BYTES, 0.0)
    assert not told.pays(TOKENS, BYTES, 0.0)
    told.computed(1, 1e-6)
    assert told.prefill_tokens_per_s == TOKENS, "what is given is not measured"
