"""Hits of several parts, and reads while space is reused, as clients meet them at a whole gateway (R11, R15)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvgw.client import Client
from kvgw.kvformat import KVFormat
from kvgw.model import Durability
from kvgw.reports import Registered
from kvgw.settings import NvmeSettings, StagingSettings
from tests.support.aio import aio
from tests.support.gateways import MIB, SMALL, buffers_for, format_of, house, keys_of, payloads_of, read

PARTS = {
    "kv-and-index": [format_of(4096), format_of(512, extra=(("part", "index"),))],
    "four-ranks": [format_of(4096, parallel=(4, rank, 1, 0, 1, 0)) for rank in range(4)],
}


async def _loaded(client: Client, parts: Sequence[Registered], keys: Sequence[bytes], count: int) -> list[int]:
    """What an engine does after a match of `count`: each part's own leading run."""
    return [(await client.get(part, keys[:count], buffers_for(part, count))).leading for part in parts]


@pytest.mark.parametrize("formats", PARTS.values(), ids=PARTS.keys())
def test_R15_a_hit_of_several_parts_is_as_long_as_its_shortest(tmp_path: Path, formats: list[KVFormat]) -> None:
    @aio
    async def main() -> None:
        async with house("unix", tmp_path / "gw") as gateway:
            clients = [gateway.client() for _ in range(3)]
            parts = [await clients[0].register(one) for one in formats]
            keys = keys_of(10)
            for part in parts:
                await clients[0].put(part, keys, payloads_of(part, 10))

            async def seen() -> set[int]:
                return {(await client.match(parts, keys)).count for client in clients}

            assert await seen() == {10}
            await clients[1].delete(parts[1], keys[8:9])
            assert await seen() == {8}, "the same for everybody"
            assert await _loaded(clients[2], parts, keys, 8) == [8] * len(parts)
            # Between a match and its reads:
            await clients[1].delete(parts[1], keys[3:4])
            runs = await _loaded(clients[2], parts, keys, 8)
            assert min(runs) == runs[1] == 3, "the part that lost a chunk says so, and bounds the hit"
            assert await seen() == {3}
            _, found = await read(clients[0], parts[1], keys)
            assert [one is None for one in found] == [index in (3, 8) for index in range(10)]

    main()


@pytest.mark.timeout(180)
@aio
async def test_R11_a_reader_while_writers_turn_the_disk_over_sees_right_bytes_or_a_miss(tmp_path: Path) -> None:
    """Law 3: four writers put ten times what NVMe and staging hold, and eviction makes room all the while."""
    small = StagingSettings(bytes=8 * MIB, tenants=1)
    settings = replace(SMALL, nvme=NvmeSettings(capacity_bytes=4 * MIB, min_free_bytes=0), staging=small)
    async with house("unix", tmp_path / "gw", settings=settings) as gateway:
        client = gateway.client()
        part = await client.register(format_of(64 * 1024))
        known = keys_of(32, "old")
        payloads = payloads_of(part, 32, seed=1)
        await client.put(part, known, payloads, durability=Durability.NVME)
        hits = 0

        async def write(writer: int) -> None:
            own = gateway.client()
            for turn in range(5):
                name = f"w{writer}-{turn}"
                await own.put(part, keys_of(32, name), payloads_of(part, 32, seed=hash(name) % 10**8))
                await gateway.opened.crew.evict()

        async def read_on(done: asyncio.Event) -> None:
            nonlocal hits
            chance = random.Random(11)
            while not done.is_set():
                keys = chance.sample(range(32), 8)
                _, found = await read(client, part, [known[index] for index in keys])
                for index, one in zip(keys, found, strict=True):
                    assert one is None or one == payloads[index], "law 3: wrong bytes"
                    hits += one is not None

        done = asyncio.Event()
        reader = asyncio.create_task(read_on(done))
        await asyncio.gather(*(write(writer) for writer in range(4)))
        done.set()
        await reader
        assert hits, "it did read something"
        usage, *_ = await gateway.opened.rooms.catalog.usage((await gateway.place()).scope)
        assert usage.objects < 4 * 5 * 32, "the disk was turned over"
