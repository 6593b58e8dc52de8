"""LMCache's own storage manager, with its controllers and its memory, over the adapter and a real gateway.

It is the server without its protocol to engines. Needs an environment with LMCache: `make test-lmcache`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

pytest.importorskip("lmcache", reason="LMCache has an environment of its own: make test-lmcache")

import torch  # after the skip
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import parse_args
from lmcache.v1.distributed.storage_manager import StorageManager

from tests.engines.bench import Gateway, content, gateway
from tests.engines.test_lmcache import MODEL, SHAPE, adapter_config

pytestmark = pytest.mark.engine

LAYOUT = MemoryLayoutDesc([torch.Size(SHAPE)], [torch.bfloat16])
RANKS = [ObjectKey.ComputeKVRank(2, rank, 2, rank) for rank in range(2)]
CHUNKS = 4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("storage") / "data") as made:
        yield made


@contextmanager
def manager(served: Gateway, name: str) -> Iterator[StorageManager]:
    config = json.dumps(adapter_config(served, compatibility=name))
    options = ["--l1-size-gb", "0.05", "--eviction-policy", "LRU", "--l2-adapter", config]
    made = StorageManager(parse_args(options))
    try:
        yield made
    finally:
        made.close()


def keys(rank: int, chunks: int = CHUNKS) -> list[ObjectKey]:
    return [ObjectKey(hashlib.sha256(bytes([index])).digest(), MODEL, RANKS[rank]) for index in range(chunks)]


def write(storage: StorageManager) -> None:
    """As an engine's workers do; LMCache then stores in the background."""
    for rank in range(2):
        reserved = storage.reserve_write(keys(rank), LAYOUT)
        assert len(reserved) == CHUNKS
        for index, key in enumerate(keys(rank)):
            view = memoryview(reserved[key].byte_array).cast("B")
            view[:] = content(rank, index, len(view))
        storage.finish_write(keys(rank))


def wait_stored(storage: StorageManager, tokens: int) -> None:
    ((_, adapter),) = storage.l2_adapters()
    until = time.monotonic() + 30
    while adapter.report_status()["tokens_stored"] < tokens:
        assert time.monotonic() < until, adapter.report_status()
        time.sleep(0.02)


def prefetched(storage: StorageManager) -> list[int]:
    """How many leading chunks of each rank LMCache has in its memory now; their bytes are compared."""
    rows = [GroupedObjectKeys([*keys(rank, CHUNKS + 1)], 0, LAYOUT) for rank in range(2)]
    handle = storage.submit_prefetch_task(PrefetchTaskSpec(rows))
    assert storage.wait_prefetch_status(handle, 20)
    result = storage.query_prefetch_status(handle)
    counts = [row.popcount() for row in result.hit_cells]
    for rank, count in enumerate(counts):
        check(storage, rank, count)
    return counts


def check(storage: StorageManager, rank: int, count: int) -> None:
    here = keys(rank, count)
    if not here:
        return
    with storage.read_prefetched_results(here) as objects:
        assert objects is not None
        for index, one in enumerate(objects):
            read = bytes(one.byte_array)
            assert read == content(rank, index, len(read)), (rank, index)
    storage.finish_read_prefetched(here)


@pytest.mark.smoke
def test_another_server_takes_what_one_stored(served: Gateway) -> None:
    with manager(served, "another") as first:
        assert prefetched(first) == [0, 0]
        write(first)
        wait_stored(first, 2 * CHUNKS * 256)
        usage = first.get_l2_usages_by_type()["plugin"]
        assert sum(one.total_bytes_used for one in usage) == 2 * CHUNKS * 24576
    served.stop()
    served.start()
    with manager(served, "another") as second:
        assert prefetched(second) == [CHUNKS, CHUNKS]
    with manager(served, "a third kind") as third:
        assert prefetched(third) == [0, 0]


def test_without_a_gateway_a_prefetch_ends_empty(served: Gateway) -> None:
    with manager(served, "without") as storage:
        write(storage)
        wait_stored(storage, 2 * CHUNKS * 256)
    served.freeze()
    try:
        with manager(served, "without") as storage:
            started = time.monotonic()
            assert prefetched(storage) == [0, 0]
            assert time.monotonic() - started < 8
    finally:
        served.thaw()
    with manager(served, "without") as storage:
        assert prefetched(storage) == [CHUNKS, CHUNKS]


def test_a_damaged_chunk_ends_the_prefix_before_it(served: Gateway) -> None:
    with manager(served, "damaged") as storage:
        write(storage)
        wait_stored(storage, 2 * CHUNKS * 256)
    served.stop()
    served.damage_one()
    served.start()
    with manager(served, "damaged") as storage:
        counts: Sequence[int] = prefetched(storage)
        assert min(counts) < CHUNKS
