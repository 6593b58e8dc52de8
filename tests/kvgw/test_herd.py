"""L05: many who want the same cold chunk at once cost S3 as little as one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvgw.model import Durability
from tests.kvgw.maintenance_bench import FlakyTier, Works, works
from tests.support.aio import aio
from tests.support.gateways import keys_of, payloads_of, read, until

HERD = 500


class GatedTier(FlakyTier):
    """Reads of it wait for `open`, and are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.reads = 0

    async def get_into(self, name: str, target: memoryview) -> None:
        self.reads += 1
        await self.open.wait()
        await super().get_into(name, target)


async def cold(one: Works) -> None:
    """A chunk that only S3 has."""
    await one.put(1, durability=Durability.S3)
    for file in one.blob_files():
        file.unlink()
    assert one.s3 is not None
    for name in one.s3.names:
        one.rooms.staging.drop(name)


@pytest.mark.timeout(180)
@aio
async def test_L05_a_herd_at_one_cold_chunk_reads_it_once(tmp_path: Path) -> None:
    s3 = GatedTier()
    async with works(tmp_path, s3=s3) as one:
        await cold(one)
        (payload,) = payloads_of(one.registered, 1, seed=hash("key") % 10**8)
        herd = [asyncio.create_task(read(one.client, one.registered, keys_of(1))) for _ in range(HERD)]
        await until(lambda: s3.reads > 0)
        s3.open.set()
        found = [await task for task in herd]
        assert all(read_back == [payload] for _, read_back in found)
        assert s3.reads <= 2, "law 9: one fill for all who wait, and one more at most for those who came between"


@aio
async def test_L05_when_the_leader_is_cancelled_another_goes_on(tmp_path: Path) -> None:
    s3 = GatedTier()
    async with works(tmp_path, s3=s3) as one:
        await cold(one)
        (payload,) = payloads_of(one.registered, 1, seed=hash("key") % 10**8)
        leader = asyncio.create_task(read(one.client, one.registered, keys_of(1)))
        await until(lambda: s3.reads == 1)
        others = [asyncio.create_task(read(one.client, one.registered, keys_of(1))) for _ in range(10)]
        await asyncio.sleep(0.05)
        leader.cancel()
        await asyncio.gather(leader, return_exceptions=True)
        s3.open.set()
        for task in others:
            assert (await task)[1] == [payload]
        assert s3.reads <= 2
        assert one.rooms.staging.statistics().filling_bytes == 0, "law 7"
