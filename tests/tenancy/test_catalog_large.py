"""L02: a catalog with very many rows answers as one with few. ``KVGW_TEST_ROWS`` sets how many."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from tenancy.catalog import Catalog
from tests.support.aio import run
from tests.tenancy import test_catalog_sqlite
from tests.tenancy.catalog_bench import HERE, NOW, SEALED, Bench, name
from tests.tenancy.test_catalog_sqlite import sqlite_backend

ROWS = int(os.environ.get("KVGW_TEST_ROWS", "100000"))
BATCH = 2_000
LOOKUP_S, PAGE_S = 0.002, 0.2
"""What one key and one page of expired entries may take on a machine that does nothing else; more is allowed below."""

empty_catalog = test_catalog_sqlite.empty_catalog


async def fill(bench: Bench, catalog: Catalog, rows: int) -> None:
    for start in range(0, rows, BATCH):
        keys = [f"k{number}" for number in range(start, min(rows, start + BATCH))]
        batch = bench.batch(keys, ttl_ms=3_600_000 if start else 1_000)
        reservation = bench.unique()
        reserved = await catalog.reserve(batch, reservation, NOW + 60_000, NOW)
        assert len(reserved.wanted) == len(keys)
        new = [bench.new_chunk(index, keys[index], written=frozenset({"nvme"})) for index in reserved.wanted]
        await catalog.commit(batch, reservation, new, NOW)


async def look_ups(catalog: Catalog, bench: Bench, rows: int, calls: int = 400) -> tuple[float, float]:
    """Median and 99th of a hundred, in seconds."""
    took = []
    for call in range(calls):
        key = f"k{BATCH + (call * 7919) % (rows - BATCH)}"
        started = time.perf_counter()
        found = await catalog.lookup(bench.scope, [1], [name(key)], NOW + 1)
        took.append(time.perf_counter() - started)
        assert list(found) == [name(key)]
    return sorted(took)[calls // 2], sorted(took)[int(calls * 0.99)]


async def measure(file: Path, rows: int) -> tuple[float, float, float]:
    """Seconds of a look-up (median, 99th of a hundred) and of a page of the sweep."""
    async with sqlite_backend(file) as backend:
        bench = await Bench.make(backend)
        catalog = backend.catalog(HERE)
        await fill(bench, catalog, rows)
        await backend.gather_statistics()
        usage, *_ = await catalog.usage(bench.scope)
        assert (usage.objects, usage.stored_bytes) == (rows, rows * SEALED)
        rounds = [await look_ups(catalog, bench, rows) for _ in range(5)]
        started = time.perf_counter()
        ended, _ = await catalog.expire(bench.scope, NOW + 2_000, 500)
        page = time.perf_counter() - started
        assert ended == 500
        await bench.check()
        return min(middle for middle, _ in rounds), min(late for _, late in rounds), page


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_L02_a_large_catalog_is_as_quick_as_a_small_one(tmp_path: Path, empty_catalog: Path) -> None:
    found = {}
    for rows in (2 * BATCH, ROWS):
        file = tmp_path / f"{rows}.db"
        shutil.copy(empty_catalog, file)
        found[rows] = run(measure(file, rows), timeout=3500)
        middle, late, page = found[rows]
        print(f"L02: {rows} rows: a look-up {middle * 1e3:.2f} ms, p99 {late * 1e3:.2f} ms; a page {page * 1e3:.0f} ms")
    (small, *_), (large, late, page) = found[2 * BATCH], found[ROWS]
    assert large < max(2 * LOOKUP_S, 2 * small), "of logarithmic cost"
    assert late < 10 * LOOKUP_S
    assert page < 5 * PAGE_S
