"""vLLM's own tiered offloading and tier factory, from the released package, over a real gateway.

Needs an environment with vLLM 0.33: `make test-vllm-tier`. It runs without a GPU: the workers' copies between the
primary tier and the GPU are left out.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip(
    "vllm.v1.kv_offload.tiering.base", reason="vLLM 0.33 has an environment of its own: make test-vllm-tier"
)

from vllm.v1.kv_offload.base import LookupResult, OffloadingCounterMetadata  # after the skip
from vllm.v1.kv_offload.config import OffloadingGroupConfig
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvgw.engines.testing import CHUNKS, SCENARIOS
from kvgw.errors import FormatError
from tests.engines.bench import DEADLINES_S, Gateway, content, gateway
from tests.engines.vllm_tiering import (
    BLOCK,
    NO_STEP,
    ROW,
    SLOTS,
    Scheduler,
    TierAlone,
    keys_of,
    manager_of,
    offloading_config,
    request,
    tier_settings,
)

pytestmark = pytest.mark.engine


class TierBench:
    """`kvgw.engines.testing.Bench` for the tier of a real manager."""

    def __init__(self, served: Gateway, name: str) -> None:
        self.served = served
        self.name = name
        self.tenants = served.tenants
        self.stop, self.start, self.kill = served.stop, served.start, served.kill
        self.freeze, self.thaw, self.damage_one = served.freeze, served.thaw, served.damage_one

    @property
    def other_kinds(self) -> Iterator[Mapping[str, Any]]:
        for setting in ("weights", "tokenizer", "compatibility", "model"):
            yield {"settings": {setting: "another"}}
        yield {"config": {"model": {"name": "/models/other"}}}
        yield {"config": {"model": {"dtype": "float16"}}}
        yield {"config": {"model": {"max_model_len": 4096}}}
        yield {"config": {"parallel": {"tp_size": 1, "pp_size": 2}}}
        yield {"config": {"parallel": {"tp_size": 4, "world_size": 4}, "worker_kv_bytes_per_block": 128}}
        yield {"config": {"cache": {"blocks_per_chunk": 8}, "worker_kv_bytes_per_block": 512}}
        yield {"config": {"cache": {"tokens_per_hash": 8}}}
        yield {"config": {"kv_cache_layout": "BLHNC"}}
        yield {"config": {"canonical_layout": True}}
        yield {"config": {"groups": (OffloadingGroupConfig(BLOCK, ("another.layer",), 0),)}}

    @contextmanager
    def manager(self, changes: Mapping[str, Any] | None = None, slots: int = SLOTS) -> Iterator[Any]:
        changes = changes or {}
        entries = {f"{name}-secret": {"token_file": str(path)} for name, path in self.served.tokens.items()}
        tenants = self.served.folder.parent / "tenants.json"
        tenants.write_text(json.dumps({"by": "kv_transfer_params.tenant", "tenants": entries}))
        settings = {"compatibility": self.name, "tenants_file": str(tenants), **changes.get("settings", {})}
        extra = tier_settings(self.served, **settings)
        with manager_of(offloading_config(extra, slots, **changes.get("config", {}))) as manager:
            yield manager

    @contextmanager
    def adapter(self, changes: Mapping[str, Any] | None = None, *, tenant: str = "") -> Iterator[TierAlone]:
        with self.manager(changes, slots=64) as manager:
            alone = TierAlone(manager, {"tenant": f"{tenant}-secret"} if tenant else None)
            yield alone
            alone.close()

    @contextmanager
    def scheduler(self, changes: Mapping[str, Any] | None = None, **params: Any) -> Iterator[Scheduler]:
        with self.manager(changes) as manager:
            made = Scheduler(manager, params or None)
            yield made
            made.close()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        self.freeze()
        try:
            yield
        finally:
            self.thaw()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("tier") / "data") as made:
        yield made


@pytest.fixture
def bench(running: Gateway, request: pytest.FixtureRequest) -> TierBench:
    running.ensure()
    return TierBench(running, request.node.name)


@pytest.mark.parametrize("name", SCENARIOS)
def test_conformance(name: str, bench: TierBench) -> None:
    SCENARIOS[name](bench)


@pytest.mark.smoke
def test_chunks_that_the_primary_tier_evicted_come_back(bench: TierBench) -> None:
    """Twenty through eight slots: all are in the gateway, and any eight of them come back, byte by byte."""
    with bench.scheduler() as one:
        for first in range(0, 20, 4):
            one.compute(1, first, first + 4)
            one.settle()
        assert one.manager.lookup(keys_of(1, 1)[0], request()) is LookupResult.RETRY, "it was evicted"
        assert one.reused(1, SLOTS) == SLOTS
        one.settle()
        counts = one.manager.get_stats().reduce()
        assert counts["vllm:kvgw_tier_tokens_stored"] == 20 * 256
        assert counts["vllm:kvgw_tier_tokens_loaded"] == SLOTS * 256
    with bench.scheduler() as other:
        assert other.reused(1, SLOTS) == SLOTS
        assert other.reused(2, 1) == 0
        assert other.reused(1, SLOTS) == SLOTS, "from the primary tier now"


def test_a_promotion_is_pending_and_then_a_hit_from_storage(bench: TierBench) -> None:
    with bench.scheduler() as one:
        one.compute(1, 0, 2)
        one.settle()
    with bench.scheduler() as other:
        (key,) = keys_of(1, 1)
        context = request([key])
        other.manager.on_new_request(context)
        seen = []
        until = time.monotonic() + 10
        while time.monotonic() < until and (not seen or seen[-1] is not LookupResult.HIT):
            result = other.manager.lookup(key, context)
            other.step()
            if not seen or seen[-1] is not result:
                seen.append(result)
        assert seen == [LookupResult.RETRY, LookupResult.HIT_PENDING, LookupResult.HIT]
        assert other.manager.get_load_source(key, context) is CacheHitSource.DISK


def test_what_is_there_already_does_not_travel(bench: TierBench) -> None:
    with bench.adapter() as tier:
        assert tier.store(1, CHUNKS) == CHUNKS
        job = tier.submit(tier.job(keys_of(1, CHUNKS), load=False, fill=9))
        assert tier.ended(job, DEADLINES_S[2]).success
        assert all(tier.load(1, CHUNKS)), "the other bytes were not even sent"


def test_one_damaged_chunk_is_a_miss_and_the_others_are_used(bench: TierBench) -> None:
    """Laws 2 and 3. And no promotion is tried for ever."""
    with bench.scheduler() as one:
        one.compute(1, 0, CHUNKS)
        one.settle()
    bench.stop()
    bench.damage_one()
    bench.start()
    with bench.scheduler() as other:
        count = other.reused(1, CHUNKS)
        assert count < CHUNKS
        assert other.reused(1, CHUNKS) == count
        one_lost = other.manager.get_stats().reduce()
        assert one_lost["vllm:kvgw_tier_chunks_lost"] == 1
        there = [other.manager.primary_tier.lookup(key, request()) is LookupResult.HIT for key in keys_of(1, CHUNKS)]
        assert sorted(there) == [False, True, True, True], "those that arrived are kept"


def test_five_hundred_lookups_in_a_step_do_not_wait(bench: TierBench) -> None:
    """Not even for a gateway that hangs; and they are one question."""
    with bench.adapter() as alone, bench.frozen():
        tier, keys = alone.tier, keys_of(1, 500)
        context = request(keys)
        longest = 0.0
        started = time.monotonic()
        while True:
            step = time.monotonic()
            results = {tier.lookup(key, context) for key in keys}
            tier.on_schedule_end(NO_STEP)
            longest = max(longest, time.monotonic() - step)
            if LookupResult.RETRY not in results:
                break
            assert results == {LookupResult.RETRY}
            time.sleep(0.01)
        assert results == {LookupResult.MISS}
        assert longest < 0.2
        assert DEADLINES_S[0] * 0.8 < time.monotonic() - started < DEADLINES_S[0] + 1.5
        counts = tier.get_stats().reduce()
        assert counts["vllm:kvgw_tier_lookups"] == 1


@pytest.mark.parametrize("shared", [False, True])
def test_a_load_that_is_given_up_writes_nothing_afterwards(shared: bool, bench: TierBench) -> None:
    """Law 7: vLLM has given the rows to others by then."""
    with bench.adapter({"settings": {"shared_memory": shared}}) as alone:
        assert alone.store(1, CHUNKS) == CHUNKS
        assert all(alone.load(1, CHUNKS)), "it is connected"
        with bench.frozen():
            started = time.monotonic()
            job = alone.submit(alone.job(keys_of(1, CHUNKS), load=True, fill=5))
            assert list(alone.tier.get_finished_jobs()) == []
            result = alone.ended(job, DEADLINES_S[1] + 2)
            assert not result.success
            assert result.successful_keys is None
            assert time.monotonic() - started > DEADLINES_S[1] * 0.8
            for index, row in enumerate(job.chunk_ids):
                alone.row(row)[:] = content(77, index, ROW)
        assert all(_until(lambda: alone.load(1, CHUNKS))), "the gateway answers again"
        for index, row in enumerate(job.chunk_ids):
            assert alone.row(row) == content(77, index, ROW)


def test_a_promotion_in_flight_ends_when_the_gateway_hangs(bench: TierBench) -> None:
    """HIT_PENDING has no deadline of its own in vLLM: a job must end."""
    with bench.scheduler() as one:
        one.compute(1, 0, 2)
        one.settle()
    with bench.scheduler() as other:
        keys = keys_of(1, 2)
        context = request(keys)
        other.manager.on_new_request(context)
        until = time.monotonic() + 10
        while other.tier.lookup(keys[0], context) is not LookupResult.HIT:
            assert time.monotonic() < until
            other.step()
        with bench.frozen():
            started = time.monotonic()
            assert other.manager.lookup(keys[0], context) is LookupResult.HIT_PENDING
            assert other.asked(context, keys) == 0
            assert time.monotonic() - started < max(DEADLINES_S) + 1.5
        other.settle()


def test_beyond_the_bounds_jobs_fail_at_once(bench: TierBench) -> None:
    """Law 9."""
    with bench.adapter({"settings": {"store_bytes": 2 * ROW, "load_bytes": 3 * ROW}}) as alone:
        assert alone.store(1, 2) == 2
        with bench.frozen():
            first = alone.submit(alone.job(keys_of(2, 2), load=False, fill=2))
            second = alone.submit(alone.job(keys_of(3, 1), load=False, fill=3))
            assert alone.ended(second, 0.2).success is False
            loads = [alone.submit(alone.job(keys_of(1, 2), load=True, fill=9)) for _ in range(3)]
            assert alone.ended(loads[2], 0.2).success is False
            assert not alone.ended(first, DEADLINES_S[2] + 2).success
            for job in loads[:2]:
                assert not alone.ended(job, DEADLINES_S[1] + 2).success
        counts = alone.tier.get_stats().reduce()
        assert counts["vllm:kvgw_tier_chunks_dropped"] == 1
        assert _until(lambda: alone.store(4, 2) == 2), "what was taken is given back"
        assert alone.store(5, 4) == 0, "not all of it fits"
        assert alone.found(5, 4) == 2, "what fits is stored"


def test_vllms_own_back_pressure_sees_stores_that_fail(bench: TierBench) -> None:
    pressure = {"backpressure": {"backpressure_cls": "EMABackpressureDetector", "failure_threshold": 3}}
    with bench.scheduler({"settings": pressure}) as one:
        one.compute(1, 0, 1)
        one.settle()
        detector = one.tier.bp_detector
        assert not detector.is_under_pressure()
        bench.kill()
        for prompt in range(2, 6):
            one.compute(prompt, 0, 1)
            one.settle()
        assert detector.is_under_pressure()


def test_draining_waits_until_no_row_is_touched(bench: TierBench) -> None:
    """As vLLM's reset of the cache does; the results are there afterwards."""
    with bench.adapter() as alone:
        assert alone.store(1, CHUNKS) == CHUNKS
        assert all(alone.load(1, CHUNKS))
        bench.freeze()
        job = alone.submit(alone.job(keys_of(1, CHUNKS), load=True, fill=5))
        drained = threading.Event()
        thread = threading.Thread(target=lambda: (alone.tier.drain_jobs(), drained.set()))
        thread.start()
        assert not drained.wait(0.5), "the job is still on its way"
        bench.thaw()
        thread.join(DEADLINES_S[1] + 2)
        assert drained.is_set()
        (result,) = alone.tier.get_finished_jobs()
        assert (result.job_id, result.success) == (job.job_id, True)
        alone.tier.drain_jobs()


def test_the_cache_is_reset_while_jobs_are_on_their_way(bench: TierBench) -> None:
    with bench.scheduler() as one:
        one.compute(1, 0, CHUNKS)
        one.manager.reset_cache()
        one.manager.on_reset_flushed()
        assert not one.manager.has_pending_work()
        assert one.reused(1, CHUNKS) == CHUNKS, "the gateway keeps what it has"


def test_the_end_does_not_wait_for_the_gateway(bench: TierBench) -> None:
    """Law 7: vLLM unmaps the memory afterwards."""
    with bench.adapter() as alone:
        assert alone.store(1, CHUNKS) == CHUNKS
        with bench.frozen():
            job = alone.submit(alone.job(keys_of(1, CHUNKS), load=True, fill=5))
            started = time.monotonic()
            alone.tier.shutdown()
            assert time.monotonic() - started < DEADLINES_S[1] - 0.5
            assert not alone.ended(job, 0.5).success
        assert not [thread for thread in threading.enumerate() if thread.name == "kvgw-vllm-tier"]


def test_after_the_end_vllm_unmaps_its_memory(bench: TierBench) -> None:
    """Law 7: nothing holds on to a row."""
    with bench.scheduler() as one:
        one.compute(1, 0, 2)
        one.settle()
    assert one.manager.primary_tier._mmap_region.mmap_obj is None


def test_chunks_travel_from_vllms_memory_and_in_the_chain_of_their_prompt(
    bench: TierBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy, into the socket. And the gateway can delete by prefix: also the first of a job knows its parent."""
    puts = []
    with bench.scheduler() as one:
        put = one.tier._remote.put

        async def noted(tenant: str, form: Any, keys: Any, rows: Any, **where: Any) -> int:
            puts.append((keys, where["parent"], where["depth"]))
            assert all(row.obj is one.memory.obj and row.nbytes == ROW for row in rows)
            return await put(tenant, form, keys, rows, **where)

        monkeypatch.setattr(one.tier._remote, "put", noted)
        one.compute(1, 0, 2)
        one.settle()
        one.compute(1, 2, 4)
        one.settle()
    keys = keys_of(1, 4)
    assert puts == [(keys[:2], None, 0), (keys[2:], keys[1], 2)]


def test_hits_that_load_slower_than_they_are_computed_are_declined(bench: TierBench) -> None:
    with bench.adapter({"settings": {"prefill_tokens_per_s": 1e12}}) as tier:
        assert tier.store(1, CHUNKS) == CHUNKS
        assert tier.found(1, CHUNKS) == CHUNKS, "nothing was measured yet"
        for _ in range(8):
            assert all(tier.load(1, CHUNKS))
        assert tier.found(1, CHUNKS) == 0
        counts = tier.tier.get_stats().reduce()
        assert counts["vllm:kvgw_tier_hits_declined"] == 1
        assert counts["vllm:kvgw_tier_load_bytes_per_second"] > 0


def test_read_only(bench: TierBench) -> None:
    with bench.adapter({"settings": {"store": False}}) as reader:
        assert reader.store(1, CHUNKS) == 0
        with bench.adapter() as writer:
            assert writer.store(1, CHUNKS) == CHUNKS
        assert all(reader.load(1, CHUNKS))


def test_requests_leave_nothing_behind(bench: TierBench) -> None:
    with bench.scheduler(tenant="someone") as one:
        one.compute(1, 0, 2)
        one.settle()
        assert one.reused(1, 2) == 2
        one.settle()
        assert one.tier._lookups.requests == 0
        assert one.tier._whose == {}


def test_what_vllm_exports_was_announced(bench: TierBench) -> None:
    with bench.manager() as manager:
        scheduler = Scheduler(manager)
        scheduler.compute(1, 0, 1)
        scheduler.settle()
        extra = tier_settings(bench.served)
        definitions = TieringOffloadingSpec.build_metric_definitions(extra)
        assert isinstance(definitions["vllm:kvgw_tier_tokens_stored"], OffloadingCounterMetadata)
        types, _ = manager.get_stats().metric_sections()
        assert set(types) <= set(definitions)
        keys = TieringOffloadingSpec.config_info_keys(extra)
        (info,) = [one for one in manager.config_info() if one["tier"] == "1:KvgwTier"]
        assert set(info) <= set(keys)
        assert info["kvgw_chunk_bytes"] == ROW
        scheduler.close()


def test_wrong_settings_and_models_end_the_start(bench: TierBench) -> None:
    window = OffloadingGroupConfig(BLOCK, ("a",), 0, sliding_window_size_in_chunks=2)
    for changes, sentence in (
        ({"settings": {"weights": None}}, "'weights': /models/Qwen3-8B is no local folder"),
        ({"settings": {"compatibility": ""}}, "'compatibility'"),
        ({"settings": {"weigths": "x"}}, "weigths"),
        ({"settings": {"locality": "NEAR"}}, "NEAR"),
        ({"settings": {"tokens_per_chunk": 256}}, "'block_size'"),
        ({"config": {"groups": (window,)}}, "full attention"),
        ({"config": {"groups": (window, replace(window, group_id=1))}}, "--disable-hybrid-kv-cache-manager"),
    ):
        with pytest.raises(FormatError, match=sentence), bench.manager(changes):
            pass


def _until(holds: Any) -> Any:
    """What `holds` gives once it is true; a client tries a gateway that did not answer again within seconds."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        found = holds()
        if found is True or (isinstance(found, list) and all(found)):
            return found
        time.sleep(0.1)
    raise AssertionError("it does not come to that")
