"""SGLang's own factory and interface, from the released package, with the backend over a real gateway.

Needs an environment with SGLang: `make test-engines`. Its host pools need a GPU's kernels; see sglang_pool.py.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

sglang = pytest.importorskip("sglang", reason="SGLang has an environment of its own: make test-engines")

import torch  # noqa: E402  # after the skip
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402

from kvgw.engines.testing import SCENARIOS  # noqa: E402
from tests.engines.bench import DEADLINES_S, Gateway, content, gateway  # noqa: E402
from tests.engines.sglang_pool import MHATokenToKVPoolHost, MLATokenToKVPoolHost  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.smoke]

SAMPLE = Path(__file__).resolve().parents[2] / "docs" / "engines" / "sglang-hicache.json"
POOLS = {"mha": MHATokenToKVPoolHost, "mla": MLATokenToKVPoolHost}


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

    def __init__(self, served: Gateway, kind: str) -> None:
        self.served, self.kind = served, kind
        self.tenants = served.tenants
        self.stop, self.start, self.kill = served.stop, served.start, served.kill
        self.freeze, self.thaw, self.damage_one = served.freeze, served.thaw, served.damage_one

    @property
    def other_kinds(self) -> Iterator[Mapping[str, Any]]:
        for setting in ("weights", "tokenizer", "compatibility", "model"):
            yield {"extra": {setting: "another"}}
        yield {"config": {"tp_size": 4}}
        yield {"config": {"pp_size": 2, "pp_rank": 1}}
        yield {"pool": {"dtype": torch.float16}}
        yield {"pool": {"layout": "page_first_direct"}}
        yield {"pool": {"page_size": 4}}
        yield {"pool": {"layer_num": 2}}
        if self.kind == "mha":
            yield {"config": {"tp_rank": 1}}
            yield {"pool": {"head_num": 4, "head_dim": 8}}

    @contextmanager
    def adapter(self, changes: Mapping[str, Any] | None = None, *, tenant: str = "") -> Iterator[Server]:
        changes = changes or {}
        pool = POOLS[self.kind](**changes.get("pool", {}))
        # SGLang tells a backend no request: a server is one tenant's, and a stranger is its own namespace.
        who = {"token_file": str(self.served.tokens[tenant])} if tenant in self.served.tokens else {}
        extra = extra_config(self.served, **who, **changes.get("extra", {}))
        config = storage_config(extra, is_mla_model=self.kind == "mla", **changes.get("config", {}))
        with attached(config, pool) as backend:
            yield Server(backend, pool)


@pytest.fixture(params=["mha", "mla"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SglangBench]:
    with gateway(tmp_path / "data") as served:
        yield SglangBench(served, request.param)


@pytest.mark.parametrize("name", SCENARIOS)
def test_conformance(name: str, bench: SglangBench) -> None:
    SCENARIOS[name](bench)
