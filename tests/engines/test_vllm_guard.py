"""The halves of the vLLM connector decline what does not pay. The gateway is real, the engine and the time are not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'kvgw[torch]'")

from kvgw.engines.breakeven import PROBE_HITS, PROBE_S, SAMPLES_MIN, BreakEven
from kvgw.engines.vllm.prefill import PrefillTimer
from tests.engines.fake_vllm import CHUNK, FakeVllm
from tests.engines.test_vllm_halves import PROMPT, engine, options_for, serve
from tests.support.aio import aio
from tests.support.gateways import house
from tests.support.manual_clock import ManualClock

TOKEN_S = 0.001
"""A chunk is computed in 16 ms."""
WHOLE = 5 * CHUNK


def loads_take(one: FakeVllm, clock: ManualClock, chunk_s: float) -> None:
    """From now on a chunk takes `chunk_s` seconds to load."""
    for worker in one.workers:
        read = type(worker._remote).get

        async def get(*args: Any, read: Any = read, remote: Any = worker._remote, **options: Any) -> int:
            count: int = await read(remote, *args, **options)
            clock.advance(count * chunk_s)
            return count

        worker._remote.get = get  # type: ignore[method-assign]


async def warm(one: FakeVllm) -> None:
    """Enough prompts that are computed, and as many that are loaded, in that order."""
    for number in range(SAMPLES_MIN):
        await serve(one, [1000 + number, *PROMPT])
    for _ in range(SAMPLES_MIN):
        assert (await serve(one, PROMPT)).loaded == WHOLE, "nothing is declined before there are samples"


@aio
async def test_a_slow_gateways_hits_are_declined_and_a_fast_ones_taken(tmp_path: Path) -> None:
    clock = ManualClock()
    async with house("unix", tmp_path) as gateway:
        async with engine(options_for(gateway)) as first:
            await serve(first, PROMPT)
        options = options_for(gateway, break_even=True)
        async with engine(options, blocks=2000, clock=clock, token_s=TOKEN_S) as one:
            loads_take(one, clock, 0.160)
            await warm(one)
            stored = one.counters.total("tokens_stored")
            assert one.counters.gauges["prefill_tokens_per_second"] == pytest.approx(1 / TOKEN_S)
            chunk_bytes = one.formats[0].chunk_bytes
            assert one.counters.gauges["load_bytes_per_second"] == pytest.approx(chunk_bytes / 0.160)
            for declined in range(1, PROBE_HITS):
                assert (await serve(one, PROMPT)).loaded == 0
                assert one.counters.total("hits_declined") == declined
            assert one.counters.total("tokens_stored") == stored, "what is declined is there, and not stored again"
            assert one.counters.total("tokens_lost") == 0
            loads_take(one, clock, 0.001)
            for _ in range(20):
                clock.advance(PROBE_S)
                await serve(one, PROMPT)
            hits = [(await serve(one, PROMPT)).loaded for _ in range(5)]
            assert hits == [WHOLE] * 5, "the gateway is fast again"
            clock.advance(PROBE_S)


@pytest.mark.parametrize("changes", [{"break_even": False}, {"prefill_tokens_per_s": 100.0}])
def test_it_can_be_switched_off_and_be_told_the_engines_speed(tmp_path: Path, changes: dict[str, Any]) -> None:
    @aio
    async def run() -> None:
        clock = ManualClock()
        async with house("unix", tmp_path) as gateway:
            async with engine(options_for(gateway)) as first:
                await serve(first, PROMPT)
            options = options_for(gateway, **{"break_even": True, **changes})
            async with engine(options, blocks=2000, clock=clock, token_s=TOKEN_S) as one:
                loads_take(one, clock, 0.150)
                await warm(one)
                assert (await serve(one, PROMPT)).loaded == WHOLE
                assert one.counters.total("hits_declined") == 0

    run()


@aio
async def test_what_is_decided_for_a_request_stays_until_it_is_preempted(tmp_path: Path) -> None:
    """vLLM asks again whenever it finds no blocks, and must not be told otherwise each time."""
    clock = ManualClock()
    async with house("unix", tmp_path) as gateway:
        async with engine(options_for(gateway)) as first:
            await serve(first, PROMPT)
        options = options_for(gateway, break_even=True, prefill_tokens_per_s=1e6)
        async with engine(options, blocks=2000, clock=clock, token_s=TOKEN_S) as one:
            request = one.request(PROMPT)
            served: Any = SimpleNamespace(slowest_s=0.0, waited=0)
            assert await asyncio.to_thread(one.ask, request, 0, served) == (WHOLE, True)
            for _ in range(SAMPLES_MIN):
                one.scheduler._guard.loaded(1000, 10.0)
            assert await asyncio.to_thread(one.ask, request, 0, served) == (WHOLE, True)
            request.num_preemptions += 1
            assert await asyncio.to_thread(one.ask, request, 0, served) == (0, False)
            assert await asyncio.to_thread(one.ask, request, 0, served) == (0, False)
            assert one.counters.total("hits_declined") == 1, "one hit, asked for twice"


@aio
async def test_a_load_that_its_deadline_ends_says_how_slow_the_gateway_is(tmp_path: Path) -> None:
    """Otherwise a gateway that never delivers in time would never be declined."""
    clock = ManualClock()
    async with house("unix", tmp_path) as gateway:
        async with engine(options_for(gateway)) as first:
            await serve(first, PROMPT)
        async with engine(options_for(gateway), clock=clock) as one:
            (worker,) = one.workers

            async def never(*_: Any, public: bool = False) -> int:
                clock.advance(10.0)
                return 0

            worker._remote.get = never  # type: ignore[method-assign,assignment]
            told = []
            one.scheduler.measured = told.extend  # type: ignore[method-assign,assignment]
            assert (await serve(one, PROMPT)).loaded == 0
            assert [(each.nbytes, each.seconds) for each in told] == [(one.formats[0].chunk_bytes, 10.0)]


class Guard(BreakEven):
    def __init__(self) -> None:
        super().__init__()
        self.samples: list[tuple[int, float]] = []

    def computed(self, tokens: int, seconds: float) -> None:
        self.samples.append((tokens, seconds))


def asked(name: str) -> Any:
    return SimpleNamespace(request_id=name, num_preemptions=0, num_output_tokens=0)


def test_a_prefill_ends_with_the_first_token_and_not_with_the_next_step() -> None:
    """vLLM schedules steps ahead of those that run."""
    guard, request = Guard(), asked("a")
    timer = PrefillTimer(guard, 16)
    timer.begin(request, 100, 1.0)
    timer.look(1.001)
    assert guard.samples == []
    request.num_output_tokens = 1
    timer.look(3.0)
    timer.look(4.0)
    timer.finished("a", 5.0)
    assert guard.samples == [(100, 2.0)]


def test_what_says_nothing_of_the_engines_speed_is_no_sample() -> None:
    guard, short, preempted, aborted = Guard(), asked("short"), asked("preempted"), asked("aborted")
    timer = PrefillTimer(guard, 16)
    timer.begin(short, 15, 0.0)
    timer.begin(preempted, 100, 0.0)
    timer.begin(aborted, 100, 0.0)
    preempted.num_preemptions = short.num_output_tokens = preempted.num_output_tokens = 1
    timer.look(1.0)
    for name in ("short", "preempted", "aborted", "unknown"):
        timer.finished(name, 2.0)
    aborted.num_output_tokens = 1
    timer.look(3.0)
    assert guard.samples == []
