"""The next chunks of a GET come from a tier while those before them leave; nothing of it outlives the GET."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from msgspec.structs import replace

from kvgw.gateway import ahead
from kvgw.model import Outcome
from kvgw.reports import Registered
from kvgw.settings import StagingSettings
from storage.errors import BlobMissing, TierUnavailable
from storage.tier import blob_name
from tenancy.sealing import sealed_length
from tests.support.aio import aio
from tests.support.gateways import (
    MIB,
    SMALL,
    House,
    Kind,
    format_of,
    house,
    keys_of,
    payloads_of,
    read,
    until,
)

CHUNK = 256 * 1024
NVME = ahead.DEPTHS["nvme"]


@dataclass
class Disk:
    """Sees the reads of an NVMe tier, and may hold them back or refuse them."""

    get_into: Callable[[str, memoryview], Awaitable[None]]
    asked: list[str] = field(default_factory=list)
    now: int = 0
    most: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: Exception | None = None

    async def __call__(self, name: str, target: memoryview) -> None:
        self.asked.append(name)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.gate.wait()
            if self.refusal is not None:
                raise self.refusal
            await self.get_into(name, target)
        finally:
            self.now -= 1


@asynccontextmanager
async def cold(
    kind: Kind, folder: Path, count: int, *, staging: int = 64 * MIB, same: bool = False
) -> AsyncIterator[tuple[House, Disk, Registered, list[bytes], list[bytes]]]:
    """A gateway whose chunks are on its disk alone; with `same`, two keys each have the same one."""
    settings = replace(SMALL, staging=StagingSettings(bytes=staging, tenants=1))
    async with house(kind, folder, settings=settings) as gateway:
        client = gateway.client()
        registered = await client.register(format_of(CHUNK))
        keys, payloads = keys_of(count), payloads_of(registered, count)
        if same:
            payloads = payloads[: count // 2] * 2
        for start in range(0, count, 4):
            some = slice(start, start + 4)
            assert (await client.put(registered, keys[some], payloads[some])).stored == len(keys[some])
            await gateway.opened.crew.drain_everywhere()
        rooms = gateway.opened.rooms
        for name in rooms.staging.names():
            rooms.staging.drop(name)
        disk = Disk(rooms.tiers["nvme"].get_into)
        with mock.patch.object(rooms.tiers["nvme"], "get_into", disk):
            yield gateway, disk, registered, keys, payloads


@pytest.mark.parametrize("kind", ["unix", "shm", "embedded"])
@aio
async def test_the_disk_is_asked_for_what_follows_and_for_no_more_at_once(tmp_path: Path, kind: Kind) -> None:
    async with cold(kind, tmp_path / "gw", 24) as (gateway, disk, registered, keys, payloads):
        reading = asyncio.create_task(read(gateway.client(), registered, keys))
        await until(lambda: disk.now == NVME.own)
        disk.gate.set()
        report, found = await reading
        assert found == payloads
        assert {hit.tier for hit in report.hits} == {"nvme"}, "brought for this GET: it was not in staging"
        assert sorted(disk.asked) == sorted(set(disk.asked)), "each was read once"
        assert NVME.own < disk.most <= NVME.own + ahead.EXTRA
        report, found = await read(gateway.client(), registered, keys)
        assert found == payloads
        assert {hit.tier for hit in report.hits} == {"staging"}
        assert len(disk.asked) == 24


@aio
async def test_what_a_group_before_still_lacks_is_read_first(tmp_path: Path) -> None:
    """A group whose first chunks are in staging is on its way when the next one, all cold, finds out that it is."""
    async with cold("unix", tmp_path / "gw", 40) as (gateway, disk, registered, keys, payloads):
        client, staging = gateway.client(), gateway.opened.rooms.staging
        disk.gate.set()
        for key in keys:
            await read(client, registered, [key])
        names = list(disk.asked)
        for name in names[3:]:
            staging.drop(name)
        disk.asked.clear()
        disk.gate.clear()
        reading = asyncio.create_task(read(client, registered, keys))
        await until(lambda: disk.now == NVME.own)
        assert disk.asked == names[3 : 3 + NVME.own]
        disk.gate.set()
        assert (await reading)[1] == payloads
        assert sorted(disk.asked) == sorted(names[3:]), "each was read once"


@aio
async def test_law_9_no_more_lies_undelivered_than_may(tmp_path: Path) -> None:
    most = 3
    with mock.patch.dict(ahead.DEPTHS, nvme=ahead.Depth(NVME.own, most * sealed_length(CHUNK))):
        async with cold("unix", tmp_path / "gw", 24) as (gateway, disk, registered, keys, payloads):
            disk.gate.set()
            left = asyncio.Event()
            rooms = gateway.opened.rooms
            with mock.patch.object(rooms.workers, "run", side_effect=_held_back(rooms.workers.run, left)):
                reading = asyncio.create_task(read(gateway.client(), registered, keys))
                await until(lambda: len(disk.asked) == most and disk.now == 0)
                await asyncio.sleep(0.05)
                assert len(disk.asked) == most, "nothing was delivered yet"
                left.set()
                assert (await reading)[1] == payloads


def _held_back(run: Callable[..., object], left: asyncio.Event) -> Callable[..., object]:
    async def later(work: Callable[[], object]) -> object:
        await left.wait()
        return await run(work)  # type: ignore[misc]

    return later


@pytest.mark.parametrize("kind", ["unix", "shm", "embedded"])
@aio
async def test_law_7_what_was_on_its_way_ends_with_the_get(tmp_path: Path, kind: Kind) -> None:
    async with cold(kind, tmp_path / "gw", 12) as (gateway, disk, registered, keys, payloads):
        with mock.patch.dict(ahead.DEPTHS, nvme=ahead.Depth(NVME.own, 3 * sealed_length(CHUNK))):
            reading = asyncio.create_task(read(gateway.client(), registered, keys))
            await until(lambda: disk.now == NVME.own)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            if kind != "embedded":
                disk.gate.set()  # that a client has left is seen when something is sent to it
            await until(lambda: disk.now == 0)
            await gateway.check_clean()
        assert len(disk.asked) < 12, "nobody wanted the others any more"
        disk.gate.set()
        assert (await read(gateway.client(), registered, keys))[1] == payloads


@aio
async def test_law_6_many_gets_together_have_few_more_reads_than_each_its_own(tmp_path: Path) -> None:
    async with cold("embedded", tmp_path / "gw", 24) as (gateway, disk, registered, keys, payloads):
        with mock.patch.object(ahead, "EXTRA", 1):
            extra = ahead.Extra()
        with mock.patch.object(gateway.opened.gateway._get, "_extra", extra):
            parts = [slice(start, start + 8) for start in (0, 8, 16)]
            readings = [asyncio.create_task(read(gateway.client(), registered, keys[part])) for part in parts]
            await until(lambda: disk.now == 3 * NVME.own)
            disk.gate.set()
            answers = await asyncio.gather(*readings)
        assert [found for _, found in answers] == [payloads[part] for part in parts]
        assert disk.most <= 3 * NVME.own + 1
        assert extra.left == 1, "it came back"


@pytest.mark.parametrize("kind", ["unix", "shm"])
@aio
async def test_a_tier_that_does_not_answer_is_asked_once_for_each_chunk(tmp_path: Path, kind: Kind) -> None:
    async with cold(kind, tmp_path / "gw", 8) as (gateway, disk, registered, keys, payloads):
        disk.refusal = TierUnavailable("planned")
        disk.gate.set()
        report, found = await read(gateway.client(), registered, keys)
        assert found == [None] * 8
        assert "planned" in report.reason, "an outage, not a miss (law 2)"
        assert set(Counter(disk.asked).values()) == {1}
        disk.refusal = None
        assert (await read(gateway.client(), registered, keys))[1] == payloads


@aio
async def test_a_blob_that_is_gone_is_a_miss_and_asked_for_once(tmp_path: Path) -> None:
    async with cold("embedded", tmp_path / "gw", 8) as (gateway, disk, registered, keys, _):
        disk.refusal = BlobMissing("planned")
        disk.gate.set()
        report, found = await read(gateway.client(), registered, keys)
        assert (report.outcome, found) == (Outcome.OK, [None] * 8)
        assert set(Counter(disk.asked).values()) == {1}
        metrics = gateway.opened.rooms.metrics
        assert metrics.refused_blobs.labels("nvme", "BlobMissing")._value.get() == 8


@aio
async def test_one_cold_chunk_alone_needs_no_reading_ahead(tmp_path: Path) -> None:
    async with cold("embedded", tmp_path / "gw", 4) as (gateway, disk, registered, keys, payloads):
        disk.gate.set()
        with mock.patch.object(gateway.opened.rooms.staging, "fetch", side_effect=AssertionError("read ahead")):
            for key, payload in zip(keys, payloads, strict=True):
                assert (await read(gateway.client(), registered, [key]))[1] == [payload]


@pytest.mark.parametrize("kind", ["unix", "shm", "embedded"])
@aio
async def test_gets_that_are_short_of_memory_do_not_wait_for_each_other(tmp_path: Path, kind: Kind) -> None:
    async with cold(kind, tmp_path / "gw", 24, staging=4 * MIB) as (gateway, disk, registered, keys, payloads):
        disk.gate.set()
        orders = [keys, keys[::-1], keys[12:] + keys[:12]]
        expected = [payloads, payloads[::-1], payloads[12:] + payloads[:12]]
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(read(gateway.client(), registered, order) for order in orders))
        assert [found for _, found in answers] == expected


@pytest.mark.parametrize("kind", ["unix", "shm", "embedded"])
@aio
async def test_keys_with_the_same_content_are_read_once(tmp_path: Path, kind: Kind) -> None:
    async with cold(kind, tmp_path / "gw", 16, same=True) as (gateway, disk, registered, keys, payloads):
        disk.gate.set()
        assert (await read(gateway.client(), registered, keys))[1] == payloads
        assert len(disk.asked) == 8


@aio
async def test_what_another_get_brought_is_not_waited_for(tmp_path: Path) -> None:
    """The groups of a GET have the same chunks, of which the second's were never begun when the first had them all."""
    async with cold("unix", tmp_path / "gw", 8, same=True) as (gateway, disk, registered, keys, payloads):
        rooms = gateway.opened.rooms
        reading = asyncio.create_task(read(gateway.client(), registered, keys))
        await until(lambda: disk.now == NVME.own)
        scope = (await gateway.place()).scope
        found = await gateway.rows("SELECT blob_id FROM entry ORDER BY depth")
        names = [blob_name(scope.namespace, bytes(blob_id)) for (blob_id,) in found]
        for name in [name for name in dict.fromkeys(names) if name not in disk.asked]:
            target = partial(disk.get_into, name)
            assert await rooms.staging.fetch(gateway.owner.tenant, name, sealed_length(CHUNK), target)
        disk.gate.set()
        async with asyncio.timeout(10):
            assert (await reading)[1] == payloads
