"""Maintenance: write-back, sweep, expiry, orphans, eviction; each job by hand on a clock that the test moves."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from kvgw.maintenance.evict import HIGH_WATER, LOW_WATER
from kvgw.maintenance.writeback import CONCURRENT, GROUP, LEASE_MS, WRITE_SECONDS
from kvgw.model import Durability, PutOutcome
from storage.errors import TierMisconfigured, TierUnavailable
from tenancy.placements import DueWrite, Endings
from tests.kvgw.maintenance_bench import MIB, FlakyTier, Works, settings, works
from tests.support.aio import aio
from tests.support.gateways import keys_of

STORED = PutOutcome.STORED


def sample(one: Works, name: str, **labels: str) -> float:
    return one.rooms.metrics.registry.get_sample_value(name, labels) or 0.0


# Write-back


@aio
async def test_write_back_empties_the_outbox_and_settles_staging(tmp_path: Path) -> None:
    s3 = FlakyTier()
    async with works(tmp_path, s3=s3) as one:
        assert await one.put(10) == [STORED] * 10
        assert len(one.rooms.staging.dirty_names()) == 10
        assert s3.names == set()
        await one.crew.drain_everywhere()
        assert len(s3.names) == 10
        assert one.rooms.staging.dirty_names() == []
        assert await one.rooms.catalog.outbox_length(one.scope) == {}
        assert sample(one, "kvgw_outbox_blobs", tier="s3") == 0
        shutil.rmtree(one.gateway.folder / "nvme" / "v1")
        one.forget_staging()
        assert await one.hits(10) == list(range(10))
        await one.check()


@aio
async def test_staged_chunks_reach_every_tier(tmp_path: Path) -> None:
    s3 = FlakyTier()
    async with works(tmp_path, chosen=settings(durability="staged"), s3=s3) as one:
        await one.put(3, durability=Durability.STAGED)
        assert one.blob_files() == []
        await one.crew.drain_everywhere()
        assert len(one.blob_files()) == len(s3.names) == 3


@aio
async def test_what_came_first_is_written_first(tmp_path: Path) -> None:
    s3 = FlakyTier()
    async with works(tmp_path, s3=s3) as one:
        expected = []
        for number in range(3 * CONCURRENT):
            await one.put(1, f"k{number}")
            expected.append(next(name for name in one.rooms.staging.dirty_names() if name not in expected))
            await one.wait(0.01)
        await one.crew.drain_everywhere()
        for at in range(0, len(expected), CONCURRENT):
            assert set(s3.puts[at : at + CONCURRENT]) == set(expected[at : at + CONCURRENT])


@pytest.mark.parametrize("failure", [TierUnavailable("away"), TierMisconfigured("no such bucket")])
@aio
async def test_a_tier_that_fails_is_tried_again_later_and_holds_up_no_other(tmp_path: Path, failure: Exception) -> None:
    s3 = FlakyTier()
    async with works(tmp_path, chosen=settings(durability="staged"), s3=s3) as one:
        await one.put(5, durability=Durability.STAGED)
        s3.failure = failure  # type: ignore[assignment]
        await one.crew.drain_everywhere()
        assert len(one.blob_files()) == 5, "NVMe does not wait for S3"
        assert len(one.rooms.staging.dirty_names()) == 5, "what is still due stays in staging"
        assert sample(one, "kvgw_tier_failures_total", tier="s3", op="put") == 5
        assert sample(one, "kvgw_outbox_blobs", tier="s3") == 5
        await one.crew.drain_everywhere()
        assert len(s3.puts) == 5, "not before its time"
        pauses = []
        for _ in range(12):
            before, waited = len(s3.puts), 0.0
            while len(s3.puts) == before:
                await one.wait(0.25)
                waited += 0.25
                await one.crew.drain_everywhere()
            pauses.append(waited)
            await one.wait(40.0)  # so that all five are due again
            await one.crew.drain_everywhere()
            if len(pauses) == 3:
                break
        assert pauses[0] <= 1.0
        assert max(pauses) <= 90
        s3.failure = None
        await one.wait(90.0)
        await one.crew.drain_everywhere()
        assert len(s3.names) == 5
        assert one.rooms.staging.dirty_names() == []
        await one.check()


@aio
async def test_a_lease_outlives_its_write(tmp_path: Path) -> None:
    assert LEASE_MS > 1000 * WRITE_SECONDS
    s3 = FlakyTier()
    async with works(tmp_path, s3=s3) as one:
        await one.put(1)
        now_ms = one.rooms.time.now_ms()
        taken = await one.rooms.catalog.claim_due(one.scope, "s3", now_ms + LEASE_MS, now_ms, 10)
        await one.crew.drain_everywhere()
        assert s3.puts == [], "another has it"
        await one.wait(LEASE_MS / 1000 + 0.001)
        await one.crew.drain_everywhere()
        assert len(s3.names) == 1, "the other died"
        turn = await one.rooms.catalog.settle_writes(one.scope, Endings(taken), None, one.rooms.time.now_ms())
        assert turn.unneeded == frozenset()


@aio
async def test_a_write_whose_source_is_gone_is_given_up(tmp_path: Path) -> None:
    s3 = FlakyTier()
    async with works(tmp_path, s3=s3) as one:
        await one.put(3)
        for name in one.rooms.staging.dirty_names():
            one.rooms.staging.drop(name)
        one.blob_files()[0].unlink()
        await one.crew.drain_everywhere()
        assert len(s3.names) == 2, "two could still be read from NVMe"
        assert await one.rooms.catalog.outbox_length(one.scope) == {}
        assert len(await one.hits(3)) == 2
        assert await one.hits(3), "and they go on being served"
        await one.check()


@aio
async def test_a_chunk_deleted_while_it_is_written_leaves_nothing_behind(tmp_path: Path) -> None:
    class Slow(FlakyTier):
        reached = asyncio.Event()
        go_on = asyncio.Event()

        async def put(self, name: str, sealed: memoryview) -> None:
            self.reached.set()
            await self.go_on.wait()
            await super().put(name, sealed)

    s3 = Slow()
    async with works(tmp_path, s3=s3) as one:
        await one.put(1)
        draining = asyncio.create_task(one.crew.drain_everywhere())
        await s3.reached.wait()
        assert await one.client.delete(one.registered, keys_of(1)) == 1
        await one.crew.sweep_everywhere()
        s3.go_on.set()
        await draining
        await one.wait(LEASE_MS / 1000 + 1)
        await one.crew.sweep_everywhere()
        assert s3.names == set()
        assert one.blob_files() == []
        usage, *_ = await one.rooms.catalog.usage(one.scope)
        assert (usage.objects, usage.s3_bytes) == (0, 0)


# Sweep and expiry


@aio
async def test_a_deletion_takes_the_bytes_from_every_tier(tmp_path: Path) -> None:
    s3 = FlakyTier()
    async with works(tmp_path, s3=s3) as one:
        await one.put(300 // 10, "a")
        await one.put(5, "b")
        await one.crew.drain_everywhere()
        assert await one.client.delete(one.registered, keys_of(30, "a")) == 30
        assert await one.hits(30, "a") == []
        await one.crew.sweep_everywhere()
        assert len(one.blob_files()) == len(s3.names) == 5
        assert await one.hits(5, "b") == list(range(5))
        await one.check()


@aio
async def test_a_tier_that_refuses_to_delete_holds_up_no_other(tmp_path: Path) -> None:
    s3 = FlakyTier()
    async with works(tmp_path, s3=s3, chunk=4096) as one:
        await one.put(300)  # more than one batch of the sweep
        await one.crew.drain_everywhere()
        await one.client.delete(one.registered, keys_of(300))
        s3.failure = TierMisconfigured("access denied")
        await one.crew.sweep_everywhere()
        assert one.blob_files() == []
        assert len(s3.names) == 300
        usage, *_ = await one.rooms.catalog.usage(one.scope)
        assert usage.objects == 300, "charged until every byte is gone"
        s3.failure = None
        await one.crew.sweep_everywhere()
        assert s3.names == set()
        usage, *_ = await one.rooms.catalog.usage(one.scope)
        assert (usage.objects, usage.s3_bytes) == (0, 0)


@aio
async def test_expiry_ends_entries_their_bytes_and_abandoned_reservations(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        await one.put(3, "short", ttl=10)
        await one.put(2, "long", ttl=100)
        assert len(one.blob_files()) == 5
        await one.wait(9.999)
        assert await one.crew.sweep.expire(one.scope) == 0
        await one.wait(0.001)
        assert await one.crew.sweep.expire(one.scope) == 3
        await one.crew.sweep_everywhere()
        assert len(one.blob_files()) == 2
        assert sample(one, "kvgw_ended_entries_total", reason="expired") == 3
        await one.check()


@aio
async def test_R27_what_has_to_be_read_first_is_written_after_what_gives_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for memory, which those that came after it keep until they are written."""
    s3, written = FlakyTier(), []
    async with works(tmp_path, chosen=settings(durability="staged"), s3=s3) as one:

        async def later(*_: object) -> list[DueWrite]:
            return []

        async def put(name: str, sealed: memoryview) -> None:
            written.append(name)
            await to_disk(name, sealed)

        to_disk = one.rooms.tiers["nvme"].put
        with monkeypatch.context() as patch:
            patch.setattr(one.rooms.catalog, "claim_due", later)
            assert await one.put(1, "cold", durability=Durability.S3) == [STORED]
            (cold,) = s3.names
            one.rooms.staging.drop(cold)
            assert await one.put(20, "here") == [STORED] * 20
        monkeypatch.setattr(one.rooms.tiers["nvme"], "put", put)
        await one.crew.drain_everywhere()
        assert len(written) == len(one.blob_files()) == 21
        assert written.index(cold) >= GROUP - 1, "all others of its group went before"


# Eviction


@aio
async def test_R33_eviction_goes_from_the_high_to_the_low_water_mark(tmp_path: Path) -> None:
    capacity = 4 * MIB
    async with works(tmp_path, chosen=settings(capacity=capacity)) as one:
        number = 0
        while one.nvme.statistics.used_bytes <= HIGH_WATER * capacity:
            await one.crew.evict()
            assert not sample(one, "kvgw_ended_entries_total", reason="evicted"), "nothing goes before the mark"
            await one.put(1, f"k{number}")
            number += 1
            await one.wait(1.0)
        before = one.nvme.statistics.used_bytes
        await one.crew.evict()
        await one.crew.sweep_everywhere()
        used = one.nvme.statistics.used_bytes
        assert LOW_WATER * capacity - 70_000 < used <= LOW_WATER * capacity < before
        alive = [at for at in range(number) if await one.hits(1, f"k{at}")]
        assert alive == list(range(number - len(alive), number)), "the longest unused went"
        assert sample(one, "kvgw_ended_entries_total", reason="evicted") == number - len(alive)
        await one.check()


@aio
async def test_eviction_does_not_give_up_more_while_the_disk_refuses_to_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity = 4 * MIB
    async with works(tmp_path, chosen=settings(capacity=capacity)) as one:
        await one.put(60)

        async def refuse(names: object) -> None:
            raise TierUnavailable("the disk does not delete")

        monkeypatch.setattr(one.rooms.tiers["nvme"], "delete", refuse)
        await one.crew.evict()
        _, left, *_ = await one.rooms.catalog.usage(one.scope)
        assert 40 < left < 60
        for _ in range(5):
            await one.crew.evict()
        assert (await one.rooms.catalog.usage(one.scope))[1] == left


@aio
async def test_what_s3_has_stays_readable_after_eviction(tmp_path: Path) -> None:
    s3 = FlakyTier()
    async with works(tmp_path, chosen=settings(capacity=4 * MIB), s3=s3) as one:
        await one.put(60)
        await one.crew.drain_everywhere()
        await one.crew.evict()
        await one.crew.sweep_everywhere()
        assert len(one.blob_files()) < 60
        for name in s3.names:
            one.rooms.staging.drop(name)
        assert await one.hits(60) == list(range(60))


@pytest.mark.timeout(240)
@aio
async def test_R05_eviction_and_reads_live_with_deletions_behind_the_gateways_back(tmp_path: Path) -> None:
    async with works(tmp_path, chosen=settings(capacity=5 * MIB), chunk=256 * 1024) as one:
        assert await one.put(15, "old") == [STORED] * 15
        files = one.blob_files()
        for file in files[::2]:
            file.unlink()
        shutil.rmtree(one.blob_files()[0].parent)
        one.forget_staging()
        for file in files:
            one.rooms.staging.drop("/".join(file.parts[-4:]))
        stop = asyncio.Event()

        async def reader() -> None:
            while not stop.is_set():
                await one.hits(15, "old")
                await asyncio.sleep(0.02)  # engines do other things too; the loop is for the job under test

        readers = [asyncio.create_task(reader()) for _ in range(4)]
        try:
            for number in range(30):
                assert await one.put(1, f"new{number}") == [STORED]
                await one.crew.evict()
                await one.crew.sweep_everywhere()
                await one.wait(1.0)
        finally:
            stop.set()
            await asyncio.gather(*readers)
        await one.crew.sweep_everywhere()
        refused = sum(
            sample(one, "kvgw_refused_blobs_total", tier="nvme", check=check)
            for check in ("BlobMissing", "BlobDamaged", "tag", "length", "header", "commitment", "root")
        )
        assert refused == sample(one, "kvgw_refused_blobs_total", tier="nvme", check="BlobMissing")
        assert 1 <= refused <= 4 * 9, "a lost blob is counted by the readers that met it at once, and then never again"
        assert await one.hits(1, "new29") == [0]
        await one.check()


# The crew


@aio
async def test_one_jobs_bug_does_not_end_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with works(tmp_path) as one:
        beaten = asyncio.Event()

        async def broken() -> None:
            raise KeyError("a bug")

        async def beat() -> None:
            beaten.set()

        one.crew.evict = broken  # type: ignore[method-assign]
        one.crew.heartbeat = beat  # type: ignore[method-assign]
        running = asyncio.create_task(one.crew.run())
        for _ in range(100):
            one.clock.advance(1.0)
            await asyncio.sleep(0.001)
            if sample(one, "kvgw_maintenance_failures_total", task="evict") >= 2 and beaten.is_set():
                break
        assert sample(one, "kvgw_maintenance_failures_total", task="evict") >= 2
        assert beaten.is_set()
        assert not running.done()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert "the job evict failed in an unforeseen way" in caplog.text


@aio
async def test_a_failure_that_lasts_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with works(tmp_path) as one:

        async def failing() -> None:
            raise TierUnavailable("the tier is away")

        for _ in range(3):
            await one.crew._attempt("job", failing)
        assert sample(one, "kvgw_maintenance_failures_total", task="job") == 3
        assert [record.message for record in caplog.records] == [
            "the job job failed and is tried again: the tier is away"
        ]
