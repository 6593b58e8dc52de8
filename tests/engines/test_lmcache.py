"""LMCache's own plug-in factory, memory objects and bitmaps, from the released package, over a real gateway.

Needs an environment with LMCache: `make test-lmcache`. It runs without a GPU.
"""

from __future__ import annotations

import copy
import hashlib
import json
import select
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("lmcache", reason="LMCache has an environment of its own: make test-lmcache")

import torch  # after the skip
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.platform import consume_fd

from kvgw.engines.breakeven import SAMPLES_MIN
from kvgw.engines.lmcache import adapter as lmcache_adapter
from kvgw.engines.lmcache.format import engine_key
from kvgw.engines.testing import CHUNKS, SCENARIOS
from kvgw.errors import FormatError
from tests.engines.bench import DEADLINES_S, Gateway, content, gateway
from tests.support.served import kvgw

pytestmark = pytest.mark.engine

SAMPLE = Path(__file__).resolve().parents[2] / "docs" / "engines" / "lmcache-l2.json"
MODEL = "Qwen/Qwen3-8B"
SHAPE = (2, 3, 256, 8)


def adapter_config(served: Gateway, **changes: Any) -> dict[str, Any]:
    """The documentation's sample for this gateway. `changes`: of its model, or of the settings."""
    config = json.loads(SAMPLE.read_text(encoding="utf-8"))
    params = config["adapter_params"]
    identity = {name: changes.pop(name) for name in ("weights", "tokenizer", "compatibility") if name in changes}
    params["models"][MODEL].update(identity)
    params["models"]["other/model"] = copy.copy(params["models"][MODEL])
    params.update(served.options)
    params.update(changes)
    return config


@contextmanager
def created(config: dict[str, Any]) -> Iterator[Any]:
    """As LMCache's server makes an adapter from its command line."""
    adapter = create_l2_adapter(PluginL2AdapterConfig.from_dict(config))
    adapter.set_backend_identity(config["type"])
    try:
        yield adapter
    finally:
        adapter.close()


class Server:
    """What LMCache's controllers do with an adapter, for one rank's keys."""

    def __init__(self, adapter: Any, *, shape: Sequence[int] = SHAPE, dtype: Any = torch.bfloat16, **key: Any) -> None:
        self.adapter = adapter
        self.deadlines_s = DEADLINES_S
        self.shape, self.dtype = torch.Size(shape), dtype
        self.key = {"model_name": MODEL, "kv_rank": ObjectKey.ComputeKVRank(2, 0, 2, 0), **key}
        self.allocator = TensorMemoryAllocator(torch.zeros(16 << 20, dtype=torch.uint8))
        self.lock = threading.Lock()

    def keys(self, prompt: int, chunks: int) -> list[ObjectKey]:
        made, last = [], f"prompt {prompt}".encode()
        for _ in range(chunks):
            last = hashlib.sha256(last).digest()
            made.append(ObjectKey(chunk_hash=last, **self.key))
        return made

    @contextmanager
    def objects(self, prompt: int, chunks: int) -> Iterator[list[MemoryObj]]:
        with self.lock:
            made = [self.allocator.allocate([self.shape], [self.dtype], MemoryFormat.KV_2LTD) for _ in range(chunks)]
        for index, one in enumerate(made):
            view = memoryview(one.byte_array).cast("B")
            view[:] = content(prompt, index, len(view))
        yield made
        with self.lock:
            for one in made:
                one.ref_count_down()

    def wait(self, fd: int, take: Any, limit_s: float) -> Any:
        """As a controller: poll the descriptor, then ask. Other threads of a test may take the signal first."""
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        until = time.monotonic() + limit_s + 2
        while time.monotonic() < until:
            if poller.poll(50):
                consume_fd(fd)
            found = take()
            if found is not None:
                return found
        raise AssertionError("the task did not end")

    def store(self, prompt: int, chunks: int) -> int:
        keys = self.keys(prompt, chunks)
        with self.objects(prompt, chunks) as objects:
            task = self.adapter.submit_store_task(keys, objects)
            ended = self.wait(self.adapter.get_store_event_fd(), lambda: self._popped(task), DEADLINES_S[2])
        return chunks if ended.is_successful() else 0

    def _popped(self, task: int) -> Any:
        with self.lock:
            self.popped = {**getattr(self, "popped", {}), **self.adapter.pop_completed_store_tasks()}
            return self.popped.pop(task, None)

    def found(self, prompt: int, chunks: int) -> int:
        layouts = {self.key.get("object_group_id", 0): MemoryLayoutDesc([self.shape], [self.dtype])}
        task = self.adapter.submit_lookup_and_lock_task(self.keys(prompt, chunks), layouts)
        found = self.wait(
            self.adapter.get_lookup_and_lock_event_fd(),
            lambda: self.adapter.query_lookup_and_lock_result(task),
            DEADLINES_S[0],
        )
        return int(found.count_leading_ones())

    def load(self, prompt: int, chunks: int) -> Sequence[bool]:
        keys = self.keys(prompt, chunks)
        with self.objects(-prompt, chunks) as objects:
            task = self.adapter.submit_load_task(keys, objects)
            loaded = self.wait(
                self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task), DEADLINES_S[1]
            )
            self.adapter.submit_unlock(keys)
            hits = [loaded.test(index) for index in range(chunks)]
            for index, (hit, one) in enumerate(zip(hits, objects, strict=True)):
                read = bytes(one.byte_array)
                assert not hit or read == content(prompt, index, len(read)), index
        return hits


class LmcacheBench:
    """`kvgw.engines.testing.Bench` for LMCache."""

    def __init__(self, served: Gateway, name: str) -> None:
        self.served = served
        self.name = name
        self.tenants = served.tenants
        self.stop, self.start, self.kill = served.stop, served.start, served.kill
        self.freeze, self.thaw, self.damage_one = served.freeze, served.thaw, served.damage_one

    @property
    def other_kinds(self) -> Iterator[Mapping[str, Any]]:
        for setting in ("weights", "tokenizer", "compatibility"):
            yield {"params": {setting: "another"}}
        yield {"server": {"model_name": "other/model"}}
        yield {"server": {"model_name": "a model/that kvgw is not told about"}}
        yield {"server": {"kv_rank": ObjectKey.ComputeKVRank(2, 1, 2, 1)}}
        yield {"server": {"kv_rank": ObjectKey.ComputeKVRank(4, 0, 4, 0)}}
        yield {"server": {"object_group_id": 1}}
        yield {"server": {"shape": (2, 256, 3, 8)}}
        yield {"version": "0.99.0"}
        for dtype in (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
            yield {"server": {"dtype": dtype}}
        yield {"server": {"cache_salt": "someone"}}

    @contextmanager
    def adapter(self, changes: Mapping[str, Any] | None = None, *, tenant: str = "") -> Iterator[Server]:
        changes = changes or {}
        entries = {f"{name}-secret": {"token_file": str(path)} for name, path in self.served.tokens.items()}
        tenants = self.served.folder.parent / "tenants.json"
        tenants.write_text(json.dumps({"by": "cache_salt", "tenants": entries}))
        who = {"cache_salt": f"{tenant}-secret"} if tenant else {}
        params = {"compatibility": self.name, "tenants_file": str(tenants), **changes.get("params", {})}
        config = adapter_config(self.served, **params)
        version = changes.get("version", lmcache_adapter.lmcache_version)
        with mock.patch.object(lmcache_adapter, "lmcache_version", version), created(config) as adapter:
            yield Server(adapter, **{**who, **changes.get("server", {})})


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("lmcache") / "data") as made:
        yield made


@pytest.fixture
def bench(running: Gateway, request: pytest.FixtureRequest) -> LmcacheBench:
    running.ensure()
    return LmcacheBench(running, request.node.name)


@pytest.mark.parametrize("name", SCENARIOS)
def test_conformance(name: str, bench: LmcacheBench) -> None:
    SCENARIOS[name](bench)


def test_three_descriptors_and_results_that_are_given_once(bench: LmcacheBench) -> None:
    with bench.adapter() as one, bench.adapter() as other:
        fds = [
            fd
            for adapter in (one.adapter, other.adapter)
            for fd in (
                adapter.get_store_event_fd(),
                adapter.get_lookup_and_lock_event_fd(),
                adapter.get_load_event_fd(),
            )
        ]
        assert len(set(fds)) == 6
        task = one.adapter.submit_lookup_and_lock_task(one.keys(1, 1), {0: MemoryLayoutDesc([one.shape], [one.dtype])})
        one.wait(fds[1], lambda: one.adapter.query_lookup_and_lock_result(task), DEADLINES_S[0])
        assert one.adapter.query_lookup_and_lock_result(task) is None
        assert one.adapter.pop_completed_store_tasks() == {}


def test_only_the_bit_of_the_damaged_chunk_is_0(bench: LmcacheBench) -> None:
    """Laws 2 and 3: not the ones behind it, which LMCache may use for other requests."""
    with bench.adapter() as server:
        assert server.store(1, CHUNKS) == CHUNKS
    bench.stop()
    bench.damage_one()
    bench.start()
    with bench.adapter() as server:
        assert sorted(server.load(1, CHUNKS)) == [False, True, True, True]
        assert server.adapter.report_status()["chunks_lost"] == 1


@pytest.mark.smoke
def test_one_task_with_the_keys_of_two_ranks_and_a_stranger(bench: LmcacheBench) -> None:
    """As LMCache asks: a row of keys for each rank. Each row's hits are its own."""
    ranks = [ObjectKey.ComputeKVRank(2, rank, 2, rank) for rank in range(2)]
    with bench.adapter() as server:
        for rank, chunks in zip(ranks, (4, 2), strict=True):
            server.key["kv_rank"] = rank
            assert server.store(1, chunks) == chunks
        rows = []
        for rank, model in ((ranks[0], MODEL), (ranks[1], MODEL), (ranks[0], "unknown")):
            server.key.update(kv_rank=rank, model_name=model)
            rows += server.keys(1, 4)
        layouts = {0: MemoryLayoutDesc([server.shape], [server.dtype])}
        task = server.adapter.submit_lookup_and_lock_task(rows, layouts)
        found = server.wait(
            server.adapter.get_lookup_and_lock_event_fd(),
            lambda: server.adapter.query_lookup_and_lock_result(task),
            DEADLINES_S[0],
        )
        assert [found.test(index) for index in range(12)] == [True] * 6 + [False] * 6
        assert server.adapter.report_status()["requests_not_served"] == 4


def test_usage_by_salt_and_deletion(bench: LmcacheBench) -> None:
    size = 2 * 3 * 256 * 8 * 2
    with bench.adapter(tenant="red") as red:
        assert red.store(1, CHUNKS) == CHUNKS
        assert red.store(1, CHUNKS) == CHUNKS, "counted once"
        assert dict(red.adapter.get_usage().bytes_by_cache_salt) == {"red-secret": CHUNKS * size}
        red.adapter.delete(red.keys(1, CHUNKS)[2:])
        assert red.found(1, CHUNKS) == 2
        assert red.adapter.get_usage().total_bytes_used == 2 * size
        bench.kill()
        red.adapter.delete(red.keys(1, 2))
        assert red.adapter.get_usage().total_bytes_used == 2 * size, "what may still be there is still counted"
        status = red.adapter.report_status()
        assert status["objects_tracked"] == 2


def test_a_deletion_by_prefix_is_refused(bench: LmcacheBench) -> None:
    """A store has chunks of several prompts, in no order that tells which follows which."""
    with bench.adapter(tenant="red") as red:
        keys = [key for prompt in (1, 2) for key in red.keys(prompt, 2)]
        with red.objects(1, len(keys)) as objects:
            task = red.adapter.submit_store_task(keys, objects)
            assert red.wait(red.adapter.get_store_event_fd(), lambda: red._popped(task), DEADLINES_S[2]).is_successful()
        (kv_format,) = red.adapter._formats.values()
        fingerprint = red.adapter._loop.call(lambda: _fingerprint(red.adapter, kv_format), 5)
        folder = str(bench.served.folder)
        for key in keys:
            name = engine_key(key.chunk_hash, red.adapter._tenants.resolve(key.cache_salt, None)[1])
            prefix = ("--format", fingerprint.hex(), "--prefix", name.hex())
            run = kvgw("delete", "--tenant", "red", *prefix, "--data", folder)
            assert run.returncode != 0
            assert "unsupported" in run.stderr + run.stdout
        assert red.found(1, 2) == 2, "refused is not half done"


async def _fingerprint(adapter: Any, kv_format: Any) -> bytes:
    registered = await adapter._remote._register(adapter._remote._client("red-secret"), "red-secret", kv_format, 1e12)
    return bytes(registered.fingerprint)


def test_hits_that_load_slower_than_the_told_speed_are_declined(bench: LmcacheBench) -> None:
    with bench.adapter({"params": {"prefill_tokens_per_s": 1e9}}) as server:
        assert server.store(1, CHUNKS) == CHUNKS
        for _ in range(SAMPLES_MIN):
            assert server.found(1, CHUNKS) == CHUNKS
            assert all(server.load(1, CHUNKS))
        assert server.found(1, CHUNKS) == 0
        status = server.adapter.report_status()
        assert status["hits_declined"] == 1
        assert status["load_bytes_per_second"] > 0
    with bench.adapter({"params": {"prefill_tokens_per_s": 1e9, "break_even": False}}) as server:
        for _ in range(SAMPLES_MIN):
            assert all(server.load(1, CHUNKS))
        assert server.found(1, CHUNKS) == CHUNKS


def test_health_follows_the_gateway(bench: LmcacheBench) -> None:
    with bench.adapter() as server:
        assert server.store(1, 1) == 1
        assert server.adapter.report_status()["is_healthy"] is True
        bench.kill()
        assert server.found(1, 1) == 0
        server.adapter.submit_unlock(server.keys(1, 1))
        assert server.adapter.report_status()["is_healthy"] is False


def test_closing_ends_what_is_in_flight(bench: LmcacheBench) -> None:
    """Law 7: LMCache takes its memory back afterwards."""
    with bench.adapter() as server:
        assert server.store(1, 1) == 1
        bench.freeze()
        try:
            with server.objects(-1, 1) as objects:
                task = server.adapter.submit_load_task(server.keys(1, 1), objects)
                started = time.monotonic()
                server.adapter.close()
                assert time.monotonic() - started < DEADLINES_S[1], "it does not wait for the gateway"
        finally:
            bench.thaw()
        assert server.adapter.query_load_result(task).popcount() == 0
        late = server.adapter.submit_lookup_and_lock_task(server.keys(1, 1), {})
        assert server.adapter.query_lookup_and_lock_result(late).popcount() == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "kvgw-lmcache"]


def test_objects_that_lmcache_made_smaller_are_not_kept(bench: LmcacheBench) -> None:
    with bench.adapter() as server:
        with server.objects(1, 1) as objects:
            objects[0].set_used_size(100)
            task = server.adapter.submit_store_task(server.keys(1, 1), objects)
            ended = server.wait(server.adapter.get_store_event_fd(), lambda: server._popped(task), DEADLINES_S[2])
        assert not ended.is_successful()
        assert server.found(1, 1) == 0


def test_wrong_settings_end_the_start(running: Gateway) -> None:
    for changes, sentence in (
        ({"models": {}}, "'models' must name"),
        ({"weights": ""}, "Qwen"),
        ({"weigths": "x"}, "weigths"),
        ({"model": "x"}, "keeps chunks of several models"),
    ):
        with pytest.raises(FormatError, match=sentence), created(adapter_config(running, **changes)):
            pass
