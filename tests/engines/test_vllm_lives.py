"""R09: requests that are cancelled half way or preempted, and come again under the same name with fewer blocks."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'kvgw[torch]'")

from tests.engines.fake_vllm import BLOCK, CHUNK, FakeVllm, Served, _step
from tests.engines.test_vllm_halves import engine, options_for
from tests.support.aio import run
from tests.support.gateways import house

POOL = 64


class Life:
    """One life of a request: what vLLM's scheduler does for it between its admission and its end."""

    def __init__(self, one: FakeVllm, request: SimpleNamespace, blocks: list[int], *, resumed: bool) -> None:
        self.one, self.request, self.blocks, self.resumed = one, request, blocks, resumed
        self.tokens: list[int] = request.prompt_token_ids
        self.loaded = 0
        self.begun = False

    def admit(self) -> None:
        """Look up, and load what can be loaded; the engine goes on behind what has arrived."""
        tokens, _ = self.one.ask(self.request, 0, Served(0, 0, 0.0))
        self.one.scheduler.allocated(self.request, self.blocks, tokens)
        if not tokens:
            return
        plan = self.one.scheduler.plan(_step())
        (worker,) = self.one.workers
        assert [load.request for load in plan.loads] == [self.request.request_id], "one load for one life"
        assert set(plan.loads[0].blocks) <= set(self.blocks), "into blocks of this life"
        worker.start_loads(plan)
        until = time.monotonic() + 10
        while worker.finished_loads() != {self.request.request_id}:
            assert time.monotonic() < until
            time.sleep(0.001)
        bad = worker.take_bad_blocks()
        self.one.scheduler.lost(bad)
        self.loaded = self.one._computed(self.blocks, bad, tokens)
        self.one._check(self.tokens, self.blocks, self.loaded)

    def compute(self, start: int, end: int) -> None:
        """One step of the engine."""
        if self.resumed and not self.begun:
            running = SimpleNamespace(
                req_ids=[self.request.request_id],
                new_block_ids=[(self.blocks,)],
                resumed_req_ids={self.request.request_id},
                num_computed_tokens=[start],
            )
            plan = self.one.scheduler.plan(_step(running=running, scheduled={self.request.request_id: end - start}))
        else:
            plan = self.one._plan(self.request, self.blocks, start, end - start, not self.begun)
        self.begun = True
        self.one._compute(self.tokens, self.blocks, start, end)
        self.one._start(plan)

    def whole(self) -> None:
        self.admit()
        at = self.loaded
        while at < len(self.tokens):
            end = min(len(self.tokens), at + 3 * CHUNK)
            self.compute(at, end)
            at = end
        self.one._check(self.tokens, self.blocks, len(self.tokens))
        self.one.scheduler.finished(self.request.request_id)


def _need(tokens: list[int]) -> int:
    return -(-len(tokens) // BLOCK)


def sequence(one: FakeVllm, chance: random.Random) -> list[list[int]]:
    """X begins and stops half way, Y gets its blocks, X comes again; the prompts that were served whole."""
    prompt, other = ([chance.randrange(3, 9000) for _ in range(chance.randrange(2 * CHUNK, 5 * CHUNK))] for _ in "xy")
    pool = list(range(POOL))
    chance.shuffle(pool)
    blocks = pool[: _need(prompt)]
    x = Life(one, one.request(prompt, request_id="x"), blocks, resumed=False)
    x.admit()
    half = chance.randrange(x.loaded + 1, len(prompt))
    x.compute(x.loaded, half)
    preempted = chance.random() < 0.5
    if preempted:
        x.request.num_preemptions += 1
    else:
        one.scheduler.finished("x")
    # X's own blocks first, in another order, while its stores may still be on their way.
    mixed = [*chance.sample(blocks, len(blocks)), *pool[len(blocks) :]]
    y = Life(one, one.request(other, request_id="y"), mixed[: _need(other)], resumed=False)
    y.whole()
    again = prompt if preempted else prompt[: chance.randrange(CHUNK + 1, len(prompt) + 1)]
    request = x.request if preempted else one.request(again, request_id="x")
    free = mixed[_need(other) :]
    Life(one, request, chance.sample(free, _need(again)), resumed=preempted).whole()
    assert all(worker.drain(10) for worker in one.workers)
    return [other, again]


async def lives(folder: Path, count: int) -> None:
    async with house("unix", folder) as gateway, engine(options_for(gateway), blocks=POOL) as one:
        # In a thread, as in an engine: the gateway answers in this one.
        await asyncio.to_thread(all_lives, one, count)


def all_lives(one: FakeVllm, count: int) -> None:
    for seed in range(count):
        served = sequence(one, random.Random(seed))
        # Another engine's blocks, which hold nothing: what it loads is what it would have computed.
        for number, tokens in enumerate(served):
            reader = Life(one, one.request(tokens, request_id=f"r{seed}-{number}"), list(range(POOL)), resumed=False)
            for cache in one.caches[0]:
                cache.fill_(-1.0)
            reader.admit()
            assert reader.loaded == (len(tokens) - 1) // CHUNK * CHUNK, f"seed {seed}: all of it was stored"
            one.scheduler.finished(reader.request.request_id)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_R09_a_request_that_comes_again_never_meets_its_first_life(tmp_path: Path, count: int) -> None:
    run(lives(tmp_path, count), timeout=160)
