"""What only S3 has is read ahead too, as many at once as it takes, and is due on NVMe afterwards like all of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvgw.gateway.ahead import DEPTHS
from kvgw.model import Durability, Outcome
from storage.errors import StorageError, TierUnavailable
from tests.kvgw.maintenance_bench import MIB, FlakyTier, Works, settings, works
from tests.support.aio import aio
from tests.support.gateways import keys_of, payloads_of, read, until

COUNT = 12
CHUNK = 64 * 1024
S3 = DEPTHS["s3"]


class Slow(FlakyTier):
    """Reads of it wait for `open`; how many did at once is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.asked: list[str] = []
        self.now = self.most = 0
        self.refusal: StorageError | None = None

    async def get_into(self, name: str, target: memoryview) -> None:
        self.asked.append(name)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.open.wait()
            if self.refusal is not None:
                raise self.refusal
            await super().get_into(name, target)
        finally:
            self.now -= 1


async def only_in_s3(one: Works, s3: FlakyTier) -> list[bytes]:
    """Store chunks that lose their files, and NVMe's placements with the first look at them."""
    await one.put(COUNT, durability=Durability.S3)
    for file in one.blob_files():
        file.unlink()
    for name in s3.names:
        one.rooms.staging.drop(name)
    assert not one.blob_files()
    return payloads_of(one.registered, COUNT, seed=hash("key") % 10**8)


@pytest.mark.parametrize("refused", [False, True])
@aio
async def test_s3_is_asked_for_what_follows_once_each(tmp_path: Path, refused: bool) -> None:
    s3 = Slow()
    async with works(tmp_path, chosen=settings(capacity=64 * MIB), s3=s3, chunk=CHUNK) as one:
        payloads = await only_in_s3(one, s3)
        reading = asyncio.create_task(read(one.client, one.registered, keys_of(COUNT)))
        await until(lambda: s3.now == S3.own)
        s3.refusal = TierUnavailable("503") if refused else None
        s3.open.set()
        report, found = await reading
        assert sorted(s3.asked) == sorted(set(s3.asked)), "nothing is asked for twice"
        if refused:
            assert found == [None] * COUNT
            assert report.outcome is Outcome.OUTAGE, "law 2: an outage is no miss"
            return
        assert found == payloads
        assert {hit.tier for hit in report.hits} == {"s3"}
        await one.crew.drain_everywhere()
        assert len(one.blob_files()) == COUNT, "what came from S3 is promoted"
        await one.check()


@aio
async def test_law_7_what_was_on_its_way_from_s3_ends_with_the_get(tmp_path: Path) -> None:
    s3 = Slow()
    async with works(tmp_path, chosen=settings(capacity=64 * MIB), s3=s3, chunk=CHUNK) as one:
        await only_in_s3(one, s3)
        reading = asyncio.create_task(read(one.client, one.registered, keys_of(COUNT)))
        await until(lambda: s3.now == S3.own)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: s3.now == 0)
        assert one.rooms.staging.statistics().lingering == 0
        assert not one.rooms.staging.names()
