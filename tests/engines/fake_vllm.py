"""vLLM's half of the conversation with the connector's halves: requests, blocks, steps, over a tiny paged cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from kvgw.engines.blocks import Paged
from kvgw.engines.counters import Counters
from kvgw.engines.options import EngineOptions
from kvgw.engines.vllm.format import format_of
from kvgw.engines.vllm.plan import Plan
from kvgw.engines.vllm.scheduler import SchedulerHalf
from kvgw.engines.vllm.worker import WorkerHalf
from kvgw.kvformat import KVFormat, LayerGroup
from kvgw.runtime import SystemClock
from tests.engines.test_vllm_format import FACTS
from tests.support.manual_clock import ManualClock

BLOCK = 4
CHUNK = 16
LAYERS, HEADS, SIZE = 2, 2, 8
"""Of the tiny cache: layers, heads, elements of keys and values of one head."""


def kv_of(tokens: Sequence[int], rank: int) -> torch.Tensor:
    """KV of every token, which depends on all tokens before it: [tokens, LAYERS, HEADS, SIZE]."""
    sums = torch.tensor(tokens, dtype=torch.float64).cumsum(0).remainder(9973)
    layer = torch.arange(LAYERS * HEADS * SIZE, dtype=torch.float64).view(LAYERS, HEADS, SIZE)
    return (sums.view(-1, 1, 1, 1) * 100 + layer + rank * 0.5).to(torch.float32)


def formats(ranks: int, **changes: Any) -> list[KVFormat]:
    facts = replace(
        FACTS,
        group=LayerGroup("mha", LAYERS, kv_heads=HEADS, head_dim=SIZE // 2),
        block_tokens=BLOCK,
        block_shape=(HEADS, BLOCK, SIZE),
        **changes,
    )
    return [format_of(replace(facts, parallel=(ranks, rank, 1, 0, 1, 0)), CHUNK) for rank in range(ranks)]


@dataclass
class Served:
    """How a request went."""

    loaded: int
    """Tokens that the engine did not compute and did not have."""
    waited: int
    """How often the scheduler was told to ask again."""
    slowest_s: float
    """The longest call on the scheduler's thread."""
    bad: set[int] = field(default_factory=set)


class FakeVllm:
    """One engine with `ranks` workers. Blocking: call it in a thread."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        ranks: int = 1,
        blocks: int = 64,
        clock: ManualClock | None = None,
        token_s: float = 0.0,
        **changes: Any,
    ) -> None:
        """`clock`: a virtual one, on which a token takes `token_s` seconds to compute."""
        self.counters = Counters(logging.getLogger("test"))
        tenants = options.tenants()
        self._clock, self._token_s = clock, token_s
        now = clock or SystemClock()
        self.scheduler = SchedulerHalf(options, tenants, self.counters, now, block_tokens=BLOCK, digest_dir=None)
        self.formats = formats(ranks, **changes)
        self.caches = [[torch.full((blocks, HEADS, BLOCK, SIZE), -1.0) for _ in range(LAYERS)] for _ in range(ranks)]
        self.workers = [
            WorkerHalf(
                options,
                tenants,
                self.counters,
                now,
                kv_format=kv_format,
                caches=Paged(caches, blocks),
                blocks_per_chunk=CHUNK // BLOCK,
            )
            for kv_format, caches in zip(self.formats, self.caches, strict=True)
        ]
        self.scheduler.learn(self.formats)
        self._between: Any = None
        self._next = 0
        self._requests = 0

    def request(self, tokens: Sequence[int], **changes: Any) -> SimpleNamespace:
        self._requests += 1
        plain = {
            "request_id": f"r{self._requests}",
            "prompt_token_ids": list(tokens),
            "num_tokens": len(tokens),
            "num_preemptions": 0,
            "num_output_tokens": 0,
            "mm_features": [],
            "prompt_embeds": None,
            "pooling_params": None,
            "resumable": False,
            "skip_reading_prefix_cache": False,
            "cache_salt": None,
            "kv_transfer_params": None,
            "lora_request": None,
        }
        return SimpleNamespace(**{**plain, **changes})

    def serve(
        self,
        tokens: Sequence[int],
        *,
        local: int = 0,
        step: int = 1000,
        preempt: bool = False,
        between: Any = None,
        **changes: Any,
    ) -> Served:
        """Run one request to its end: the engine has `local` tokens itself and computes `step` tokens at a time.

        `between` is called after a lookup said what can be loaded, and before that is loaded.
        """
        self._between = between or (lambda: None)
        request = self.request(tokens, **changes)
        blocks = self._blocks(-(-len(tokens) // BLOCK))
        self._compute(tokens, blocks, 0, local)
        served = self._load(request, blocks, local)
        computed = self._computed(blocks, served.bad, local + served.loaded)
        served.loaded = computed - local if computed > local else 0
        if preempt:
            request.num_preemptions += 1
            blocks = self._blocks(len(blocks))
            served = self._load(request, blocks, 0)
            computed = served.loaded
        self._check(tokens, blocks, computed)
        new = True
        while computed < len(tokens):
            count = min(step, len(tokens) - computed)
            plan = self._plan(request, blocks, computed, count, new)
            self._compute(tokens, blocks, computed, computed + count)
            if self._clock is not None:
                self._clock.advance(count * self._token_s)
            self._start(plan)
            computed, new = computed + count, False
        request.num_output_tokens = 1
        self.scheduler.finished(request.request_id)
        assert all(worker.drain(10) for worker in self.workers)
        return served

    def close(self) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()

    def ask(self, request: SimpleNamespace, local: int, served: Served) -> tuple[int, bool]:
        """Ask until there is an answer, as vLLM does."""
        while True:
            started = time.perf_counter()
            tokens, later = self.scheduler.matched_tokens(request, local)
            served.slowest_s = max(served.slowest_s, time.perf_counter() - started)
            if tokens is not None:
                return tokens, later
            served.waited += 1
            time.sleep(0.001)

    def _load(self, request: SimpleNamespace, blocks: list[int], local: int) -> Served:
        served = Served(0, 0, 0.0)
        tokens, later = self.ask(request, local, served)
        assert later == (tokens > 0)
        self.scheduler.allocated(request, blocks, tokens)
        self._between()
        if not tokens:
            return served
        self._start(self.scheduler.plan(_step()))
        for worker in self.workers:
            while worker.finished_loads() != {request.request_id}:
                time.sleep(0.001)
            served.bad |= worker.take_bad_blocks()
            self.scheduler.measured(worker.take_loaded())
        served.loaded = tokens
        self.scheduler.lost(served.bad)
        if served.bad and self._computed(blocks, served.bad, local + tokens) == 0:
            assert self.ask(request, local, served) == (0, False), "a load that failed is not tried for ever"
        return served

    def _computed(self, blocks: list[int], bad: set[int], tokens: int) -> int:
        """Tokens before the first bad block."""
        return next((at * BLOCK for at, block in enumerate(blocks) if block in bad), tokens)

    def _plan(self, request: SimpleNamespace, blocks: list[int], computed: int, count: int, new: bool) -> Plan:
        name = request.request_id
        if new:
            data = SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
            return self.scheduler.plan(_step(new=[data], scheduled={name: count}))
        running = SimpleNamespace(
            req_ids=[name], new_block_ids=[None], resumed_req_ids=set(), num_computed_tokens=[computed]
        )
        return self.scheduler.plan(_step(running=running, scheduled={name: count}))

    def _start(self, plan: Plan) -> None:
        for worker in self.workers:
            worker.start_loads(plan)
            worker.start_stores(plan)

    def _blocks(self, count: int) -> list[int]:
        """Blocks in no order, that nobody has."""
        self._next += count
        return list(range(self._next - count, self._next))[::-1]

    def _compute(self, tokens: Sequence[int], blocks: list[int], start: int, end: int) -> None:
        for rank, caches in enumerate(self.caches):
            kv = kv_of(tokens, rank)
            for at in range(start, end):
                for layer, cache in enumerate(caches):
                    cache[blocks[at // BLOCK], :, at % BLOCK] = kv[at, layer]

    def _check(self, tokens: Sequence[int], blocks: list[int], end: int) -> None:
        """What the engine would go on from is what it would have computed."""
        for rank, caches in enumerate(self.caches):
            kv = kv_of(tokens, rank)
            for at in range(end):
                for layer, cache in enumerate(caches):
                    assert torch.equal(cache[blocks[at // BLOCK], :, at % BLOCK], kv[at, layer]), (rank, at, layer)


def _step(new: Sequence[Any] = (), running: Any = None, scheduled: dict[str, int] | None = None) -> SimpleNamespace:
    """What vLLM's scheduler says of a step, as far as the connector reads it."""
    nobody = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
    return SimpleNamespace(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=running or nobody,
        num_scheduled_tokens=scheduled or {},
        finished_req_ids=set(),
    )
