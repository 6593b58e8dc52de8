"""SGLang's own factory and interface, from the released package, with the backend over a real gateway.

Pools and pages are SGLang's own too. Needs an environment with SGLang: `make test-sglang`. It runs without a GPU.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

# Before SGLang, which imports torchvision.
pytest.importorskip(
    "tests.engines.sglang_pool", reason="SGLang has an environment of its own: make test-sglang", exc_type=ImportError
)

import torch
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation, StorageOperation
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    HiCacheStorageFailureInjector,
    PoolName,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str

from kvgw.engines.breakeven import SAMPLES_MIN
from kvgw.engines.sglang import KvgwHiCache
from kvgw.engines.sglang import backend as sglang_backend
from kvgw.engines.tenants import OWN
from kvgw.engines.testing import CHUNKS, SCENARIOS
from kvgw.errors import FormatError
from tests.engines.bench import DEADLINES_S, Gateway, content, gateway
from tests.engines.sglang_pool import mha_pool, mla_pool
from tests.support.served import kvgw

pytestmark = pytest.mark.engine

SAMPLE = Path(__file__).resolve().parents[2] / "docs" / "engines" / "sglang-hicache.json"
POOLS = {"mha": mha_pool, "mla": mla_pool}


def extra_config(served: Gateway, **changes: Any) -> dict[str, Any]:
    """The documentation's sample, as SGLang hands it on: without the settings that it takes out."""
    sample = json.loads(SAMPLE.read_text(encoding="utf-8"))
    assert sample.pop("hicache_storage_pass_prefix_keys") is True
    return {**sample, **served.options, **changes}


def storage_config(extra: dict[str, Any], **changes: Any) -> HiCacheStorageConfig:
    made = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=2,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=True,
        is_page_first_layout=True,
        model_name="/models/Qwen3-8B",
        extra_config=extra,
    )
    return replace(made, **changes)


def hashes(prompt: int, pages: int) -> list[str]:
    """A chain of page hashes, as SGLang makes them."""
    chain, last = [], f"prompt {prompt}"
    for _ in range(pages):
        last = hashlib.sha256(last.encode()).hexdigest()
        chain.append(last)
    return chain


@contextmanager
def attached(config: HiCacheStorageConfig, pool: Any) -> Iterator[Any]:
    """What SGLang's cache controller does to attach a backend and to detach it."""
    backend = StorageBackendFactory.create_backend("dynamic", config, pool)
    backend.register_mem_pool_host(pool)
    backend.register_mem_host_pool_v2(pool, PoolName.KV)
    backend.on_host_pools_registered()
    try:
        yield backend
    finally:
        backend.close()


@dataclass
class Server:
    """One rank of a server; each call takes other pages of its pool."""

    backend: Any
    pool: Any
    deadlines_s: tuple[float, float, float] = DEADLINES_S

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0

    def indices(self, pages: int) -> torch.Tensor:
        with self._lock:
            first = self._next if self._next + pages <= self.pool.size // self.pool.page_size else 0
            self._next = first + pages
        return torch.arange(first * self.pool.page_size, (first + pages) * self.pool.page_size)

    def page(self, indices: torch.Tensor, index: int) -> torch.Tensor:
        return self.pool.get_data_page(int(indices[index * self.pool.page_size])).view(torch.uint8)

    def fill(self, indices: torch.Tensor, prompt: int) -> None:
        pointers, sizes = self.pool.get_page_buffer_meta(indices)
        per_page = len(pointers) // (len(indices) // self.pool.page_size)
        for index in range(len(pointers) // per_page):
            write(
                pointers[index * per_page : (index + 1) * per_page],
                content(prompt, index, sum(sizes[:per_page])),
            )

    def store(self, prompt: int, chunks: int) -> int:
        indices = self.indices(chunks)
        self.fill(indices, prompt)
        return leading(self.backend.batch_set_v1(hashes(prompt, chunks), indices, HiCacheStorageExtraInfo([])))

    def found(self, prompt: int, chunks: int) -> int:
        return self.backend.batch_exists(hashes(prompt, chunks), HiCacheStorageExtraInfo([]))

    def load(self, prompt: int, chunks: int) -> Sequence[bool]:
        indices = self.indices(chunks)
        self.fill(indices, -prompt)
        hits = self.backend.batch_get_v1(hashes(prompt, chunks), indices, HiCacheStorageExtraInfo([]))
        for index, hit in enumerate(hits):
            page = bytes(self.page(indices, index).tolist())
            assert page == content(prompt if hit else -prompt, index, len(page)), (index, hit)
        return hits


def write(pointers: Sequence[int], data: bytes) -> None:
    import ctypes

    size = len(data) // len(pointers)
    for number, pointer in enumerate(pointers):
        ctypes.memmove(pointer, data[number * size : (number + 1) * size], size)


def leading(results: Sequence[bool]) -> int:
    return results.index(False) if False in results else len(results)


class SglangBench:
    """`kvgw.engines.testing.Bench` for SGLang; `kind`: mha or mla."""

    def __init__(self, served: Gateway, kind: str, name: str) -> None:
        self.served, self.kind, self.name = served, kind, name
        self.tenants = served.tenants
        self.stop, self.start, self.kill = served.stop, served.start, served.kill
        self.freeze, self.thaw, self.damage_one = served.freeze, served.thaw, served.damage_one

    @property
    def other_kinds(self) -> Iterator[Mapping[str, Any]]:
        for setting in ("weights", "tokenizer", "compatibility", "model"):
            yield {"extra": {setting: "another"}}
        yield {"config": {"tp_size": 4}}
        yield {"config": {"pp_size": 2, "pp_rank": 1}}
        yield {"version": "0.99.0"}
        for dtype in (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
            yield {"pool": {"dtype": dtype}}
        for name in ("fp8_e4m3", "fp8_e5m2"):  # a pool that says only that it has bytes
            yield {"pool": {"dtype": torch.uint8}, "extra": {"kv_dtype": name, "compatibility": name}}
        yield {"pool": {"layout": "page_first_direct"}}
        yield {"pool": {"page_size": 4}}
        yield {"pool": {"layers": 2}}
        if self.kind == "mha":
            yield {"config": {"tp_rank": 1}}
            yield {"pool": {"heads": 4, "head_dim": 8}}

    @contextmanager
    def adapter(self, changes: Mapping[str, Any] | None = None, *, tenant: str = "") -> Iterator[Server]:
        changes = changes or {}
        pool = POOLS[self.kind](**changes.get("pool", {}))
        # SGLang tells a backend no request: a server is one tenant's, and a stranger is its own namespace.
        who = {"token_file": str(self.served.tokens[tenant])} if tenant in self.served.tokens else {}
        extra = extra_config(self.served, **{"compatibility": self.name, **who, **changes.get("extra", {})})
        config = storage_config(extra, is_mla_model=self.kind == "mla", **changes.get("config", {}))
        version = changes.get("version", sglang_backend.sglang_version)
        with mock.patch.object(sglang_backend, "sglang_version", version), attached(config, pool) as backend:
            assert isinstance(backend, (KvgwHiCache, HiCacheStorageFailureInjector))
            yield Server(backend, pool)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("sglang") / "data") as made:
        yield made


@pytest.fixture(params=["mha", "mla"])
def bench(running: Gateway, request: pytest.FixtureRequest) -> SglangBench:
    running.ensure()
    return SglangBench(running, request.param, request.node.name)


@pytest.fixture
def mha(running: Gateway, request: pytest.FixtureRequest) -> SglangBench:
    running.ensure()
    return SglangBench(running, "mha", request.node.name)


@pytest.mark.parametrize("name", SCENARIOS)
def test_conformance(name: str, bench: SglangBench) -> None:
    SCENARIOS[name](bench)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_pages_of_both_layouts(layout: str, bench: SglangBench) -> None:
    with bench.adapter({"pool": {"layout": layout}}) as server:
        assert server.store(1, CHUNKS) == CHUNKS
    with bench.adapter({"pool": {"layout": layout}}) as server:
        assert all(server.load(1, CHUNKS))


def test_a_long_prompt_in_batches_and_few_windows(bench: SglangBench) -> None:
    """A batch names what comes before it; windows for two pages carry all of them."""
    little = {"load_bytes": 2 * 8 * 1024, "store_bytes": 2 * 8 * 1024}
    with bench.adapter({"extra": little}) as server:
        keys, indices = hashes(1, 12), server.indices(12)
        server.fill(indices, 1)
        tokens = server.pool.page_size
        for first in (0, 5):
            batch = slice(first, first + 5)
            here = indices[first * tokens : (first + 5) * tokens]
            assert all(server.backend.batch_set_v1(keys[batch], here, HiCacheStorageExtraInfo(keys[:first])))
        assert server.found(1, 12) == 10
        assert server.load(1, 12) == [True] * 10 + [False] * 2
        stats = server.backend.get_stats()
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([5, 5], [10])
        assert server.backend.get_stats().prefetch_pgs == []


@pytest.mark.parametrize("told", [True, False])
def test_a_deletion_by_prefix_is_refused_where_pages_name_no_predecessor(bench: SglangBench, told: bool) -> None:
    """As without ``hicache_storage_pass_prefix_keys``: the second batch could follow anything."""
    with bench.adapter() as server:
        keys, indices, half = hashes(1, 4), server.indices(4), 2 * server.pool.page_size
        server.fill(indices, 1)
        for first, here in ((0, indices[:half]), (2, indices[half:])):
            before = HiCacheStorageExtraInfo(keys[:first]) if told else None
            assert all(server.backend.batch_set_v1(keys[first : first + 2], here, before))
        kv_format = server.backend._format
        registered = server.backend._loop.call(
            lambda: server.backend._remote._register(server.backend._remote._client(OWN), OWN, kv_format, 1e12), 5
        )
        prefix = ("--format", registered.fingerprint.hex(), "--prefix", keys[1])
        run = kvgw("delete", *prefix, "--data", str(bench.served.folder))
        assert (run.returncode == 0) is told, run.stdout + run.stderr
        assert ("unsupported" in run.stdout + run.stderr) is not told
        assert server.found(1, 4) == (1 if told else 4)


def test_hits_that_load_slower_than_the_told_speed_are_declined(bench: SglangBench) -> None:
    with bench.adapter({"extra": {"prefill_tokens_per_s": 1e9}}) as server:
        assert server.store(1, CHUNKS) == CHUNKS
        for _ in range(SAMPLES_MIN):
            assert server.found(1, CHUNKS) == CHUNKS
            assert all(server.load(1, CHUNKS))
        assert server.found(1, CHUNKS) == 0
        assert server.backend._counters.total("hits_declined") == 1
        assert server.backend._counters.gauges["load_bytes_per_second"] > 0
    with bench.adapter({"extra": {"prefill_tokens_per_s": 1e9, "break_even": False}}) as server:
        for _ in range(SAMPLES_MIN):
            assert all(server.load(1, CHUNKS))
        assert server.found(1, CHUNKS) == CHUNKS


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_the_older_interface(mha: SglangBench, layout: str) -> None:
    """Flat tensors, and a layout whose pages do not lie together."""
    kind = {"pool": {"layout": layout}, "extra": {"interface_v1": 0}}
    with mha.adapter(kind) as server:
        keys = hashes(1, 3)
        pages = [torch.randn(2 * 3 * 8 * 2 * 16).to(torch.bfloat16) for _ in range(2)]
        assert server.backend.batch_set(keys[:2], pages)
        assert not server.backend.set(keys[2])
        assert server.backend.exists(keys[1])
        assert not server.backend.exists(keys[2])
    with mha.adapter(kind) as server:
        read = server.backend.batch_get(keys, [server.pool.get_dummy_flat_data_page() for _ in keys])
        assert read[2] is None
        assert all(torch.equal(page, one) for page, one in zip(pages, read, strict=False))
        assert torch.equal(server.backend.get(keys[1]), pages[1])


def test_mla_is_written_by_one_rank_and_read_by_all(running: Gateway, request: pytest.FixtureRequest) -> None:
    running.ensure()
    bench = SglangBench(running, "mla", request.node.name)
    with bench.adapter({"config": {"tp_rank": 1}}) as follower:
        assert follower.store(1, CHUNKS) == CHUNKS, "SGLang must not take it for a failure"
        assert follower.found(1, CHUNKS) == 0, "and nothing was written"
        with bench.adapter() as writer:
            assert writer.store(1, CHUNKS) == CHUNKS
        assert all(follower.load(1, CHUNKS))


def test_detached_and_attached_again_while_the_server_runs(mha: SglangBench) -> None:
    """Law 7: nothing is left of the first one."""
    with mha.adapter() as first:
        assert first.store(1, CHUNKS) == CHUNKS
    assert not [thread for thread in threading.enumerate() if thread.name == "kvgw-sglang"]
    assert first.found(1, CHUNKS) == 0
    assert first.store(2, CHUNKS) == 0
    with mha.adapter() as second:
        assert all(second.load(1, CHUNKS))


def test_clear_deletes_nothing_and_ends_nothing(mha: SglangBench) -> None:
    with mha.adapter() as server:
        assert server.store(1, CHUNKS) == CHUNKS
        server.backend.clear()
        assert server.found(1, CHUNKS) == CHUNKS


def test_keys_that_are_no_hashes_are_misses(mha: SglangBench) -> None:
    with mha.adapter() as server:
        assert server.backend.batch_exists(["no hash"]) == 0
        assert server.backend.batch_set_v1(["no hash"], server.indices(1)) == [False]
        assert server.backend.batch_get_v1(["no hash"], server.indices(1)) == [False]


def test_read_only(mha: SglangBench) -> None:
    with mha.adapter({"extra": {"store": False}}) as reader:
        assert reader.store(1, CHUNKS) == 0
        with mha.adapter() as writer:
            assert writer.store(1, CHUNKS) == CHUNKS
        assert all(reader.load(1, CHUNKS))


def test_sglangs_own_fault_injection(mha: SglangBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "1.0")
    with mha.adapter() as server:
        assert isinstance(server.backend, HiCacheStorageFailureInjector)
        assert server.store(1, CHUNKS) == 0
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.0")
    with mha.adapter() as server:
        assert server.store(1, CHUNKS) == CHUNKS


def test_what_cannot_be_served_is_refused_when_it_is_attached(mha: SglangBench) -> None:
    for changes, sentence in (
        ({"extra": {"weights": ""}}, "'weights'"),
        ({"extra": {"weigths": "x"}}, "weigths"),
        ({"extra": {"tenants_file": "x"}}, "no setting tenants_file"),
        ({"config": {"attn_cp_size": 2}}, "context parallelism"),
        ({"config": {"should_split_heads": True}}, "tp_lcm_size"),
        ({"pool": {"layout": "layer_first"}}, "--hicache-mem-layout"),
        ({"pool": {"dtype": torch.uint8}}, "'kv_dtype'"),
    ):
        with pytest.raises(FormatError, match=sentence), mha.adapter(changes):
            pass
    mla = storage_config(extra_config(mha.served), is_mla_model=True)
    with pytest.raises(FormatError, match="kv_cache_dim"), attached(mla, mha_pool()):
        pass
    with mha.adapter() as server, pytest.raises(FormatError, match="mamba"):
        server.backend.register_mem_host_pool_v2(server.pool, PoolName.MAMBA)


def test_adapters_have_pages_of_their_own(mha: SglangBench) -> None:
    """Laws 2 and 6. SGLang's own page keys, from its own ids of adapters; what is in their folders it tells nobody."""
    ids = [LoRARef.deterministic_id(name, f"/adapters/{name}") for name in ("a", "b")]
    prompts = [RadixKey(array("q", range(32)), extra_key=key) for key in (None, *ids)]
    chains = [get_storage_hash_str(prompt, None, page_size=8) for prompt in prompts]
    with mha.adapter() as server:
        for number, chain in enumerate(chains):
            assert len(chain) == CHUNKS
            assert server.backend.batch_exists(chain, HiCacheStorageExtraInfo([])) == 0, number
            indices = server.indices(CHUNKS)
            server.fill(indices, number)
            assert all(server.backend.batch_set_v1(chain, indices, HiCacheStorageExtraInfo([])))


class Controller(HiCacheController):
    """SGLang's own cache controller, without the collectives between ranks and the threads that call these methods."""

    def __init__(self, server: Server) -> None:
        self.storage_backend, self.storage_host_pool = server.backend, server.pool
        self.page_size = server.pool.page_size
        self.page_get_func, self.page_set_func = self._page_get_zero_copy, self._page_set_zero_copy
        self.prefetch_sync_queue: queue.Queue[Any] = queue.Queue()


@pytest.mark.smoke
def test_sglangs_controller_backs_up_and_prefetches(bench: SglangBench) -> None:
    """Page keys, batches of 128 pages and what counts as success are SGLang's."""
    pages, kind = 130, {"pool": {"page_size": 4}}
    tokens = list(range(4 * pages))
    with bench.adapter(kind) as first:
        controller = Controller(first)
        indices = first.indices(pages)
        first.fill(indices, 1)
        keys = get_storage_hash_str(tokens, None, page_size=4)
        backup = StorageOperation(indices, tokens, hash_value=keys, prefix_keys=[])
        controller._page_backup(backup)
        assert backup.completed_tokens == len(tokens)
    with bench.adapter(kind) as second:
        controller = Controller(second)
        prefetch = PrefetchOperation("request", [*tokens, 7, 7, 7, 7], None, prefix_keys=[])
        prefetch.hash_value, hit_tokens = controller._storage_hit_query(prefetch)
        assert hit_tokens == len(tokens)
        prefetch.host_indices = second.indices(pages)
        assert controller._page_transfer(prefetch) == pages
        page = bytes(second.page(prefetch.host_indices, 129).tolist())
        assert page == content(1, 129, len(page))
