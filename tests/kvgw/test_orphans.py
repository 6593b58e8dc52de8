"""Orphans and strangers: what lies in a tier without a row, and when it is deleted."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from kvgw.maintenance.orphans import IMPLAUSIBLE_COUNT, OrphanReport
from kvgw.model import PutOutcome
from storage.tier import blob_name
from tests.kvgw.maintenance_bench import MIB, Works, settings, works
from tests.support.aio import aio

STORED = PutOutcome.STORED


FOREIGN = UUID(int=0xF)


def stray(one: Works, count: int, start: int = 0, namespace: UUID | None = None) -> list[str]:
    """Put blobs without a row into the NVMe folder, as a crash between bytes and pointer would; their names."""
    names = [
        blob_name(namespace or one.scope.namespace, (start + number).to_bytes(16, "big")) for number in range(count)
    ]
    for name in names:
        path = one.gateway.folder / "nvme" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"orphan")
    return names


async def look(one: Works) -> OrphanReport:
    await one.crew.look_for_orphans()
    return one.crew.orphan_reports["nvme"]


@aio
async def test_an_orphan_is_deleted_when_seen_twice_a_grace_apart(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        await one.put(3)
        stray(one, 2)
        first = await look(one)
        assert (first.seen, first.deleted, first.waiting, first.refused) == (5, 0, 2, "")
        await one.wait(99.0)
        assert (await look(one)).deleted == 0, "the grace is not over"
        stray(one, 1, start=100)
        await one.wait(1.0)
        third = await look(one)
        assert (third.deleted, third.waiting) == (2, 1), "the third orphan was seen once"
        assert await one.hits(3) == [0, 1, 2]
        assert len(one.blob_files()) == 4


@aio
async def test_a_blob_that_got_its_row_meanwhile_is_no_orphan(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        await one.put(1)
        (blob,) = one.blob_files()
        moved = blob.rename(tmp_path / "aside")
        assert (await look(one)).waiting == 0
        moved.rename(blob)
        await one.wait(1000.0)
        assert (await look(one)).waiting == 0


@aio
async def test_an_orphan_that_vanished_starts_anew_when_it_comes_back(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        stray(one, 1)
        await look(one)
        one.blob_files()[0].unlink()
        await one.wait(200.0)
        await look(one)
        stray(one, 1)
        assert (await look(one)).deleted == 0


@aio
async def test_S14_strangers_of_an_implausible_mass_are_not_believed(tmp_path: Path) -> None:
    async with works(tmp_path, chunk=4096) as one:
        await one.put(10)
        stray(one, IMPLAUSIBLE_COUNT, namespace=FOREIGN)
        await look(one)
        stray(one, 1, start=1000, namespace=FOREIGN)
        stray(one, 3)
        await one.wait(1000.0)
        report = await look(one)
        await one.wait(1000.0)
        report = await look(one)
        assert report.deleted == 3, "orphans of a namespace that the catalog knows are orphans however many they are"
        assert report.waiting == IMPLAUSIBLE_COUNT + 1
        assert "51 of 64 blobs in nvme are strangers" in report.refused
        assert "not deleted" in report.refused
        assert len(one.blob_files()) == 10 + IMPLAUSIBLE_COUNT + 1


@aio
async def test_S14_blobs_of_the_time_after_an_older_catalog_was_copied_are_strangers(tmp_path: Path) -> None:
    async with works(tmp_path, chunk=4096) as one:
        await one.put(10)
        time = one.gateway.rooms.time
        time.began_ms, time.found_ms = 2**62, 0  # as if the catalog had been put back from long ago
        stray(one, IMPLAUSIBLE_COUNT + 1)
        await look(one)
        await one.wait(1000.0)
        report = await look(one)
        assert report.deleted == 0
        assert "lost, older or foreign catalog" in report.refused


@aio
async def test_a_crash_loop_leaves_as_many_orphans_as_it_likes(tmp_path: Path) -> None:
    async with works(tmp_path, chunk=4096) as one:
        await one.put(1)
        stray(one, 200)
        assert (await look(one)).refused == ""
        await one.wait(100.0)
        assert (await look(one)).deleted == 200
        assert await one.hits(1) == [0]


@aio
async def test_R13_a_lost_catalog_is_a_cold_cache_that_keeps_its_limit_and_deletes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    capacity, data = 8 * MIB, tmp_path / "data"
    chosen = settings(capacity=capacity)
    async with works(data, chosen=chosen) as one:
        assert await one.put(100) == [STORED] * 100
        old = one.blob_files()
    for file in data.glob("catalog.db*"):
        file.unlink()
    async with works(data, chosen=chosen) as one:
        assert await one.hits(100) == [], "a cold cache"
        assert one.nvme.statistics.used_bytes > 100 * 65_536
        outcomes = [
            (await one.client.put(one.registered, [b"new-%d" % number], [b"x" * one.registered.chunk_bytes])).outcomes[
                0
            ]
            for number in range(30)
        ]
        assert STORED in outcomes
        assert sum(file.stat().st_size for file in one.blob_files()) <= capacity
        for _ in range(2):
            await one.wait(1000.0)
            await one.crew.look_for_orphans()
        await one.crew.fsck.run()
        assert set(old) <= set(one.blob_files())
        told = [record.message for record in caplog.records if "foreign catalog" in record.message]
        assert len(told) == 1, "said once"
