"""vLLM's own tiered offloading, from the released package and without a GPU: what its scheduler does with a tier."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from tests.engines.bench import DEADLINES_S, Gateway, content

SAMPLE: Final = Path(__file__).resolve().parents[2] / "docs" / "engines" / "vllm-tier.json"
BLOCK: Final = 16
TOKENS: Final = 256
"""Of a chunk: the sample's ``block_size``."""
ROW: Final = 8192
"""Bytes of a chunk: two workers with 256 bytes in each of sixteen blocks."""
SLOTS: Final = 8
"""Chunks that the primary tier of most tests holds."""
NO_STEP: Final = ScheduleEndContext((), ())


def tier_settings(served: Gateway, **changes: Any) -> dict[str, Any]:
    """The documentation's sample, for this gateway."""
    extra = json.loads(SAMPLE.read_text(encoding="utf-8"))["kv_connector_extra_config"]
    extra["secondary_tiers"][0].update({**served.options, **changes})
    return extra


def offloading_config(extra: dict[str, Any], slots: int = SLOTS, **changes: Any) -> OffloadingConfig:
    """What vLLM makes of its configuration. `changes`: of it, or of its parts."""
    parts: dict[str, Any] = {
        "model": OffloadingModelConfig("/models/Qwen3-8B", "bfloat16", 40960),
        "cache": OffloadingCacheConfig(tokens_per_hash=BLOCK, blocks_per_chunk=TOKENS // BLOCK),
        "parallel": OffloadingParallelConfig(0, 2, 2, 1, 1, 1, 0, 1, None, False),
    }
    parts = {name: replace(part, **changes.pop(name, {})) for name, part in parts.items()}
    layers = tuple(f"model.layers.{index}.self_attn.attn" for index in range(2))
    return OffloadingConfig(
        **{
            "groups": (OffloadingGroupConfig(BLOCK, layers, 0),),
            "worker_kv_bytes_per_block": ROW // 2 // (TOKENS // BLOCK),
            "enable_kv_cache_events": False,
            "extra_config": {**extra, "cpu_bytes_to_use": slots * ROW},
            "engine_id": uuid.uuid4().hex,
            "kv_cache_layout": "LBHNC",
            **parts,
            **changes,
        }
    )


@contextmanager
def manager_of(config: OffloadingConfig) -> Iterator[Any]:
    """As vLLM's connector makes a manager, with its primary tier and those behind it."""
    manager = OffloadingSpecFactory.create_spec(config).get_manager()
    try:
        yield manager
    finally:
        manager.shutdown()


def keys_of(prompt: int, chunks: int) -> list[bytes]:
    """A chain of block hashes, as vLLM names the chunks of a prompt."""
    made, last = [], f"prompt {prompt}".encode()
    for _ in range(chunks):
        last = hashlib.sha256(last).digest()
        made.append(make_offload_key(last, 0))
    return made


_REQUESTS = itertools.count()


def request(keys: Sequence[bytes] = (), params: dict[str, Any] | None = None) -> ReqContext:
    """A request of the scheduler, which has named its chunks."""
    context = ReqContext(f"request-{next(_REQUESTS)}", params)
    for index, key in enumerate(keys, 1):
        context.set_offload_key_position(key, index * TOKENS)
    return context


class Scheduler:
    """What vLLM's scheduler and workers do with a manager, one prompt after the other."""

    def __init__(self, manager: Any, params: dict[str, Any] | None = None) -> None:
        self.manager = manager
        self.tier = manager.secondary_tiers[0]
        self.memory = manager.primary_tier.get_kv_memoryview().cast("B")
        self.params = params

    def close(self) -> None:
        self.memory.release()

    def step(self) -> None:
        self.manager.on_schedule_end(NO_STEP)

    def settle(self, limit_s: float = 20.0) -> None:
        """Step until no job is on its way."""
        until = time.monotonic() + limit_s
        while self.manager.has_pending_work():
            assert time.monotonic() < until, "a job does not end"
            self.step()
            time.sleep(0.002)

    def row(self, chunk_id: int) -> memoryview:
        return self.memory[chunk_id * ROW : (chunk_id + 1) * ROW]

    def compute(self, prompt: int, first: int, last: int) -> None:
        """Chunks `first` to `last` leave the GPU for the primary tier."""
        keys = keys_of(prompt, last)
        context = request(keys, self.params)
        self.manager.on_new_request(context)
        prepared = self.manager.prepare_store(keys[first:], context)
        assert prepared is not None, "the primary tier is full"
        for key, chunk_id in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
            self.row(chunk_id)[:] = content(prompt, keys.index(key), ROW)
        self.manager.complete_store(set(prepared.keys_to_store), context)  # in no order, as vLLM does
        self.manager.on_request_finished(context)

    def asked(self, context: ReqContext, keys: Sequence[bytes], limit_s: float = 20.0) -> int:
        """Leading chunks that the primary tier has in the end, as vLLM looks a prefix up."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            count, wait = 0, False
            for key in keys:
                result = self.manager.lookup(key, context)
                if result is LookupResult.MISS:
                    break
                count += result is not LookupResult.RETRY
                wait |= result is not LookupResult.HIT
            self.step()
            if not wait:
                return count
            time.sleep(0.002)
        raise AssertionError("the lookup does not end")

    def reused(self, prompt: int, chunks: int) -> int:
        """Leading chunks of a prompt that go to the GPU; their bytes are compared."""
        keys = keys_of(prompt, chunks)
        context = request(keys, self.params)
        self.manager.on_new_request(context)
        count = self.asked(context, keys)
        if count:
            spec = self.manager.prepare_load(keys[:count], context)
            for index, chunk_id in enumerate(spec.chunk_ids):
                assert self.row(chunk_id) == content(prompt, index, ROW), (prompt, index)
            self.manager.complete_load(keys[:count], context)
        self.manager.on_request_finished(context)
        return count


class TierAlone:
    """A tier without the manager's decisions; each call takes other rows. `kvgw.engines.testing.Adapter`."""

    def __init__(self, manager: Any, params: dict[str, Any] | None = None) -> None:
        self.tier = manager.secondary_tiers[0]
        self.memory = manager.primary_tier.get_kv_memoryview().cast("B")
        self.slots = len(self.memory) // ROW
        self.params = params
        self.deadlines_s = DEADLINES_S
        self._lock = threading.Lock()  # vLLM never enters a tier twice at once
        self._numbers = itertools.count()
        self._ended: dict[int, JobResult] = {}

    def close(self) -> None:
        self.memory.release()

    def row(self, chunk_id: int) -> memoryview:
        return self.memory[chunk_id * ROW : (chunk_id + 1) * ROW]

    def job(self, keys: Sequence[bytes], *, load: bool, fill: int) -> TransferJob:
        """A job for `keys`, whose rows hold the bytes of the prompt `fill`. Not submitted yet."""
        with self._lock:
            number = next(self._numbers)
        rows = [(number * len(keys) + index) % self.slots for index in range(len(keys))]
        for index, row in enumerate(rows):
            self.row(row)[:] = content(fill, index, ROW)
        context = request(keys, self.params)
        return TransferJob(number, list(keys), np.array(rows, dtype=np.int32), load, context)

    def submit(self, job: TransferJob) -> TransferJob:
        with self._lock:
            (self.tier.submit_load if job.is_promotion else self.tier.submit_store)(job)
        return job

    def ended(self, job: TransferJob, limit_s: float) -> JobResult:
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            with self._lock:
                self._ended.update({one.job_id: one for one in self.tier.get_finished_jobs()})
                if job.job_id in self._ended:
                    return self._ended.pop(job.job_id)
            time.sleep(0.002)
        raise AssertionError("the job does not end")

    def store(self, prompt: int, chunks: int) -> int:
        job = self.submit(self.job(keys_of(prompt, chunks), load=False, fill=prompt))
        return chunks if self.ended(job, DEADLINES_S[2] + 2).success else 0

    def found(self, prompt: int, chunks: int) -> int:
        keys = keys_of(prompt, chunks)
        context = request(keys, self.params)
        until = time.monotonic() + DEADLINES_S[0] + 2
        while time.monotonic() < until:
            with self._lock:
                results = [self.tier.lookup(key, context) for key in keys]
                self.tier.on_schedule_end(NO_STEP)
            if LookupResult.RETRY not in results:
                with self._lock:
                    self.tier.on_request_finished(context)
                hits = [result is LookupResult.HIT for result in results]
                return hits.index(False) if False in hits else chunks
            time.sleep(0.002)
        raise AssertionError("the lookup does not end")

    def load(self, prompt: int, chunks: int) -> Sequence[bool]:
        keys = keys_of(prompt, chunks)
        job = self.submit(self.job(keys, load=True, fill=-prompt))
        result = self.ended(job, DEADLINES_S[1] + 2)
        there = set(keys) if result.success else set(result.successful_keys or ())
        for index, (key, row) in enumerate(zip(keys, job.chunk_ids, strict=True)):
            assert key not in there or self.row(row) == content(prompt, index, ROW), index
        return [key in there for key in keys]
