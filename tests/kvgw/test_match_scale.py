"""A match costs the same in a small catalog and in a large one, remembered or not."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection

from kvgw.settings import NvmeSettings
from tests.support.aio import run
from tests.support.gateways import SMALL, House, format_of, house, keys_of, payloads_of

CALLS = 100

CHUNK = """
    WITH RECURSIVE other(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM other WHERE n < :count)
    INSERT INTO chunk SELECT tenant_id, namespace_id, randomblob(16), format_id, randomblob(32), salt, tag_root, epoch,
        seg_log2, length, sealed_length, created_ms, home_node, home_boot, durability, state
    FROM (SELECT * FROM chunk LIMIT 1), other
"""
ENTRY = """
    INSERT INTO entry SELECT e.tenant_id, e.namespace_id, e.format_id, randomblob(32), c.blob_id, e.parent, e.depth,
        e.tokens, e.ttl_ms, e.expires_ms, e.created_ms, e.last_hit_ms, e.hits, e.writer, e.hold_until_ms
    FROM (SELECT * FROM entry LIMIT 1) e, chunk c WHERE c.blob_id NOT IN (SELECT blob_id FROM entry)
"""
PLACEMENT = """
    INSERT INTO placement SELECT p.tenant_id, p.namespace_id, c.blob_id, p.tier, p.node, hex(c.blob_id), p.offset,
        p.length, p.state, p.owner, p.lease_ms, p.not_before_ms, p.attempts, p.updated_ms
    FROM (SELECT * FROM placement LIMIT 1) p, chunk c WHERE c.blob_id NOT IN (SELECT blob_id FROM placement)
"""


def fill(connection: Connection, rows: int) -> None:
    """Chunks that nobody asks for, until there are so many."""
    there = connection.exec_driver_sql("SELECT count(*) FROM entry").scalar_one()
    connection.exec_driver_sql(CHUNK.replace(":count", str(rows - there)))
    for statement in (ENTRY, PLACEMENT):
        connection.exec_driver_sql(statement)
    assert connection.exec_driver_sql("SELECT count(*) FROM entry").scalar_one() == rows


async def cost(call: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Microseconds of CPU in all threads, and of time, of one call: the median."""
    for _ in range(10):
        await call()
    costs = []
    for _ in range(CALLS):
        cpu, began = time.process_time(), time.perf_counter()
        await call()
        costs.append(((time.process_time() - cpu) * 1e6, (time.perf_counter() - began) * 1e6))
    return median(one for one, _ in costs), median(one for _, one in costs)


async def costs(made: House, rows: int) -> tuple[float, float]:
    """CPU of a match of 64 keys, remembered and not."""
    client = made.client()
    registered = await client.register(format_of())
    keys = keys_of(64)

    async def match() -> None:
        assert (await client.match(registered, keys)).count == 64

    async def match_anew() -> None:
        made.opened.rooms.index._shelves.clear()
        await match()

    (warm, warm_p50), (cold, cold_p50) = await cost(match), await cost(match_anew)
    print(f"{rows:>9} rows: warm {warm:.0f} µs of CPU, p50 {warm_p50:.0f}; cold {cold:.0f}, p50 {cold_p50:.0f}")
    return warm, cold


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_times_the_rows_cost_a_match_little(tmp_path: Path) -> None:
    run(measured(tmp_path), timeout=900)


async def measured(tmp_path: Path) -> None:
    settings = replace(SMALL, nvme=NvmeSettings(capacity_bytes=2**60, min_free_bytes=0))
    async with house("embedded", tmp_path / "gw", settings=settings, check=False) as made:
        client = made.client()
        registered = await client.register(format_of())
        await client.put(registered, keys_of(64), payloads_of(registered, 64))
        found = []
        for rows in (10_000, 1_000_000):
            await made.opened.rooms.catalog._database.write(lambda connection, rows=rows: fill(connection, rows))
            found.append(await costs(made, rows))
        (warm, cold), (warm_in_many, cold_in_many) = found
        assert warm_in_many < 2 * warm
        assert cold_in_many < 3 * cold
