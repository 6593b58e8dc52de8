"""The one suite that every tier and every wrapper of a tier passes.

Subclass it in a test module and say how a fresh, empty tier is opened:

    class TestMemoryTier(TierConformance):
        def open_tier(self):
            return opened(MemoryTier())
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from uuid import UUID

import pytest

from storage.errors import BlobDamaged, BlobMissing, StorageError
from storage.tier import BlobInfo, Tier, blob_name
from tests.support.aio import aio

MIB = 1024 * 1024
NAMESPACES = (UUID(int=1), UUID(int=2))
LENGTHS = (1, 4095, 4096, 4097, MIB, 5 * MIB)

GOOD = blob_name(NAMESPACES[0], bytes(16))
BAD_NAMES = {
    "empty": "",
    "parent": "../" + GOOD,
    "parent-inside": GOOD.replace("/00/", "/../"),
    "percent": "%2e%2e%2f" + GOOD,
    "nul": GOOD[:-1] + "\0",
    "double-slash": GOOD.replace("/", "//"),
    "absolute": "/" + GOOD,
    "long": GOOD + "0" * 4096,
    "right-to-left": "\u202e" + GOOD,
    "surrogate": GOOD[:-1] + "\ud800",
    "device": "CON",
    "newline": GOOD + "\n",
    "other-digits": GOOD.replace("/00/", "/01/"),
    "upper-case": GOOD.upper(),
    "wide-digit": GOOD[:-1] + "\uff10",
    "other-version": "v2" + GOOD[2:],
}


def name(number: int, namespace: UUID = NAMESPACES[0]) -> str:
    """The name of the test's blob `number`; spread over directories as random names are."""
    return blob_name(namespace, random.Random(number).randbytes(16))


def content(length: int, seed: int = 0) -> bytes:
    """Bytes that differ from place to place and from seed to seed."""
    return random.Random(f"{length}/{seed}").randbytes(length)


async def read(tier: Tier, blob: str, length: int) -> bytes:
    """The blob's bytes, read into a buffer that cannot pass for them."""
    target = bytearray(os.urandom(length))
    await tier.get_into(blob, memoryview(target))
    return bytes(target)


async def listed(tier: Tier) -> list[BlobInfo]:
    return [blob async for blob in tier.scan()]


@asynccontextmanager
async def opened(tier: Tier) -> AsyncIterator[Tier]:
    """`tier`, closed at the end."""
    try:
        yield tier
    finally:
        await tier.aclose()


class TierConformance:
    """What ARCHITECTURE asks of a tier; see the module's text for how to use it."""

    def open_tier(self) -> AbstractAsyncContextManager[Tier]:
        raise NotImplementedError

    @pytest.mark.parametrize("length", LENGTHS)
    @aio
    async def test_returns_what_was_put(self, length: int) -> None:
        data = content(length)
        async with self.open_tier() as tier:
            await tier.put(name(1), memoryview(data))
            assert await read(tier, name(1), length) == data
            assert await tier.stat([name(1)]) == {name(1): length}

    @aio
    async def test_same_name_with_the_same_bytes_again_is_no_error(self) -> None:
        data = content(5000)
        async with self.open_tier() as tier:
            await tier.put(name(1), memoryview(data))
            await tier.put(name(1), memoryview(data))
            assert await read(tier, name(1), 5000) == data
            assert len(await listed(tier)) == 1

    @pytest.mark.parametrize("wrong", [1, 4999, 5001, 10000])
    @aio
    async def test_another_length_is_damage(self, wrong: int) -> None:
        async with self.open_tier() as tier:
            await tier.put(name(1), memoryview(content(5000)))
            with pytest.raises(BlobDamaged, match="5000"):
                await read(tier, name(1), wrong)

    @aio
    async def test_a_blob_that_never_was_is_missing(self) -> None:
        async with self.open_tier() as tier:
            await tier.put(name(1), memoryview(b"x"))
            with pytest.raises(BlobMissing):
                await read(tier, name(2), 1)
            with pytest.raises(BlobMissing):
                await read(tier, name(1, NAMESPACES[1]), 1)

    @aio
    async def test_stat_tells_only_of_those_that_exist(self) -> None:
        async with self.open_tier() as tier:
            assert await tier.stat([]) == {}
            await tier.put(name(1), memoryview(content(10)))
            await tier.put(name(3), memoryview(content(30)))
            asked = [name(1), name(2), name(3), name(1, NAMESPACES[1])]
            assert await tier.stat(asked) == {name(1): 10, name(3): 30}

    @aio
    async def test_deleting_what_is_not_there_is_no_error(self) -> None:
        async with self.open_tier() as tier:
            await tier.delete([])
            await tier.delete([name(1), name(2)])
            await tier.put(name(1), memoryview(b"x"))
            await tier.delete([name(2), name(1), name(1)])
            await tier.delete([name(1)])
            assert await listed(tier) == []

    @aio
    async def test_a_deleted_blob_is_missing_and_its_neighbours_stay(self) -> None:
        async with self.open_tier() as tier:
            for number in range(4):
                await tier.put(name(number), memoryview(content(100, number)))
            await tier.delete([name(1), name(2)])
            for number in (1, 2):
                with pytest.raises(BlobMissing):
                    await read(tier, name(number), 100)
            assert await tier.stat([name(number) for number in range(4)]) == {name(0): 100, name(3): 100}
            assert await read(tier, name(3), 100) == content(100, 3)

    @aio
    async def test_a_scan_lists_every_blob_once(self) -> None:
        expected = {}
        before_ms = time.time_ns() // 1_000_000 - 60_000
        async with self.open_tier() as tier:
            assert await listed(tier) == []
            for number in range(30):
                blob = name(number, NAMESPACES[number % 2])
                expected[blob] = number + 1
                await tier.put(blob, memoryview(content(number + 1)))
            found = await listed(tier)
        assert sorted(blob.name for blob in found) == sorted(expected)
        assert {blob.name: blob.length for blob in found} == expected
        assert all(before_ms < blob.modified_ms < before_ms + 600_000 for blob in found)

    @pytest.mark.parametrize("bad", BAD_NAMES.values(), ids=BAD_NAMES.keys())
    @aio
    async def test_refuses_names_that_no_blob_has(self, bad: str) -> None:
        async with self.open_tier() as tier:
            with pytest.raises(ValueError, match="is not a blob name"):
                await tier.put(bad, memoryview(b"x"))
            with pytest.raises(ValueError, match="is not a blob name"):
                await tier.get_into(bad, memoryview(bytearray(1)))
            await tier.put(name(1), memoryview(b"x"))
            with pytest.raises(ValueError, match="is not a blob name"):
                await tier.stat([name(1), bad])
            with pytest.raises(ValueError, match="is not a blob name"):
                await tier.delete([name(1), bad])
            assert [blob.name for blob in await listed(tier)] == [name(1)]

    @aio
    async def test_does_not_keep_the_buffer_of_a_put(self) -> None:
        data = bytearray(content(70_000))
        async with self.open_tier() as tier:
            await tier.put(name(1), memoryview(data))
            data[:] = bytes(len(data))
            assert await read(tier, name(1), 70_000) == content(70_000)
            data.extend(b"resizing works only if nobody holds the buffer")

    @aio
    async def test_puts_and_gets_at_once_do_not_mix(self) -> None:
        length = 100_000
        async with self.open_tier() as tier:
            async with asyncio.TaskGroup() as group:
                for number in range(16):
                    group.create_task(tier.put(name(number), memoryview(content(length, number))))
            async with asyncio.TaskGroup() as group:
                reads = [group.create_task(read(tier, name(number % 16), length)) for number in range(32)]
            for number, task in enumerate(reads):
                assert task.result() == content(length, number % 16)

    @aio
    async def test_one_name_put_many_times_at_once_is_whole(self) -> None:
        data = content(300_000)
        async with self.open_tier() as tier:
            async with asyncio.TaskGroup() as group:
                for _ in range(8):
                    group.create_task(tier.put(name(1), memoryview(data)))
            assert await read(tier, name(1), len(data)) == data
            assert len(await listed(tier)) == 1

    @pytest.mark.parametrize("turns", [0, 1, 2, 5, 20, 100])
    @aio
    async def test_a_cancelled_put_leaves_the_blob_whole_or_not_at_all(self, turns: int) -> None:
        data = content(MIB)
        async with self.open_tier() as tier:
            await _cancelled_after(turns, asyncio.create_task(tier.put(name(1), memoryview(data))))
            found = await tier.stat([name(1)])
            assert found in ({}, {name(1): len(data)})
            if found:
                assert await read(tier, name(1), len(data)) == data
            await tier.put(name(1), memoryview(data))
            assert await read(tier, name(1), len(data)) == data

    @pytest.mark.parametrize("turns", [0, 1, 2, 5, 20, 100])
    @aio
    async def test_nothing_writes_to_the_target_of_a_cancelled_get(self, turns: int) -> None:
        data = content(MIB)
        target = bytearray(MIB)
        async with self.open_tier() as tier:
            await tier.put(name(1), memoryview(data))
            await _cancelled_after(turns, asyncio.create_task(tier.get_into(name(1), memoryview(target))))
            target[:] = bytes(MIB)
            assert await read(tier, name(1), MIB) == data
            assert target == bytes(MIB)

    @aio
    async def test_can_be_closed_with_blobs_in_it(self) -> None:
        async with self.open_tier() as tier:
            await tier.put(name(1), memoryview(b"x"))
            async for _ in tier.scan():
                break

    @aio
    async def test_has_a_label(self) -> None:
        async with self.open_tier() as tier:
            assert tier.label.isascii()
            assert tier.label


async def _cancelled_after(turns: int, task: asyncio.Task[None]) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError, StorageError):
        await task
