"""Files of deleted blobs are written again: zeroed before, nowhere to be seen, and never under a reader's eyes."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgw.runtime import ThreadWorkers
from storage.errors import BlobMissing, TierFull, TierUnavailable
from storage.nvme import NvmeTier, NvmeTracer
from storage.nvme.listing import split_name
from storage.nvme.recycled import LENGTH_MIN, zero_whole
from storage.nvme.space import PLENTY
from tenancy.sealing import namespace_of
from tests.storage.test_nvme import files_in, nvme
from tests.storage.test_nvme_direct import aligned
from tests.support.aio import aio
from tests.support.tier_conformance import MIB, content, listed, name, read

LENGTH = LENGTH_MIN + 308


@pytest.fixture
def able(tmp_path: Path) -> Path:
    """A folder on a file system that can zero the blocks of a file, and has direct transfers."""
    try:
        fd = os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
        try:
            os.posix_fallocate(fd, 0, LENGTH)
            zero_whole(fd, LENGTH)
        finally:
            os.close(fd)
    except OSError as error:
        pytest.skip(f"no files are written again here: {error}")
    return tmp_path / "nvme"


async def put(tier: NvmeTier, *numbers: int, length: int = LENGTH) -> None:
    for number in numbers:
        await tier.put(name(number), aligned(content(length, number)))


def inode(root: Path, number: int) -> int:
    return (root / name(number)).stat().st_ino


def waiting(root: Path) -> list[Path]:
    """Files that are kept for the next blobs."""
    return sorted((root / "tmp").iterdir())


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Note the calls of some `os` functions from now on."""

    def begin(*functions: str) -> list[str]:
        noted: list[str] = []
        for function in functions:
            monkeypatch.setattr(os, function, noting(function, getattr(os, function), noted))
        return noted

    def noting(function: str, real: Callable[..., Any], noted: list[str]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            result = real(*arguments, **more)
            noted.append(function)
            return result

        return call

    return begin


@aio
async def test_the_next_blob_of_its_length_goes_into_the_file_of_a_deleted_one(able: Path) -> None:
    async with nvme(able) as tier:
        await put(tier, 1, 2)
        before = inode(able, 1)
        await tier.delete([name(1)])
        assert (tier.statistics.used_bytes, [blob.name for blob in await listed(tier)]) == (LENGTH, [name(2)])
        with pytest.raises(BlobMissing):
            await read(tier, name(1), LENGTH)
        await put(tier, 3)
        assert (inode(able, 3), waiting(able)) == (before, [])
        assert tier.statistics.used_bytes == 2 * LENGTH
        assert tier.statistics.in_flight_bytes == 0
        for number in (2, 3):
            assert await read(tier, name(number), LENGTH) == content(LENGTH, number)


@aio
async def test_law_5_what_was_in_it_is_gone_when_the_deletion_is_acknowledged(able: Path) -> None:
    workers = ThreadWorkers(1)
    async with nvme(able) as tier:
        await put(tier, 1)
        await tier.delete([name(1)])
        (kept,) = waiting(able)
        assert kept.read_bytes() == bytes(LENGTH)
        traces = [trace async for trace in NvmeTracer(able, workers).traces(name(1))]
        assert [(trace.kind, trace.name) for trace in traces] == [("unfinished", f"tmp/{kept.name}")]
        assert namespace_of(traces[0].head) is None, "whoever looks for what a deletion left sees that nothing is"
    workers.close()
    assert files_in(able) == set(), "law 7: they end with the tier"


@aio
async def test_laws_1_and_8_the_name_is_gone_for_good_before_the_bytes_and_the_next_ones_come_before_theirs(
    able: Path, events: Callable[..., list[str]]
) -> None:
    async with nvme(able) as tier:
        await put(tier, 1, 2)
        deleting = events("rename", "unlink", "fdatasync", "fsync")
        await tier.delete([name(1)])
        assert deleting == ["rename", "fsync", "fdatasync"]
        (able / os.path.dirname(name(1))).rmdir()
        await put(tier, 1)  # makes its directory anew, and has that one durable
        deleting.clear()
        await tier.delete([name(2)])
        deleting.clear()
        await put(tier, 1)
        assert deleting[-3:] == ["fdatasync", "rename", "fsync"]


@aio
async def test_law_3_a_file_that_is_being_read_is_not_written_again(able: Path) -> None:
    """Its reader would get another blob's bytes, and call the disk wrong."""
    async with nvme(able) as tier:
        await put(tier, 1)
        with tier._files._readers.reading(*split_name(name(1))):
            await tier.delete([name(1)])
        assert waiting(able) == []
        await put(tier, 2)
        await tier.delete([name(2)])
        assert len(waiting(able)) == 1, "nobody reads that one"


@aio
async def test_a_name_that_may_come_back_with_the_power_leaves_no_file_to_write_again(
    able: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with nvme(able) as tier:
        await put(tier, 1)
        monkeypatch.setattr(os, "fsync", broken)
        with pytest.raises(TierUnavailable):
            await tier.delete([name(1)])
        monkeypatch.undo()
        assert waiting(able) == []


@aio
async def test_files_are_bounded_in_number_bytes_and_lengths(able: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 9."""
    async with nvme(able) as tier:
        await put(tier, *range(6))
        monkeypatch.setattr("storage.nvme.recycled._FILES", 2)
        await tier.delete([name(number) for number in range(3)])
        assert len(waiting(able)) == 2
        monkeypatch.undo()
        monkeypatch.setattr("storage.nvme.recycled._BYTES", 3 * LENGTH)
        await tier.delete([name(number) for number in range(3, 6)])
        assert len(waiting(able)) == 3
        for more in range(1, 5):
            await put(tier, 1, length=LENGTH + more)
        assert waiting(able) == [], "of that length, no blob came lately"


@aio
async def test_files_give_way_to_blobs_at_the_capacity(able: Path) -> None:
    capacity = (PLENTY + 12) * LENGTH
    async with nvme(able, capacity_bytes=capacity) as tier:
        await put(tier, *range(4))
        await tier.delete([name(number) for number in range(4)])
        assert len(waiting(able)) == 4
        nbytes = 2 * LENGTH
        for number in range(10, 10 + capacity // nbytes):
            await put(tier, number, length=nbytes)
        assert (waiting(able), tier.statistics.used_bytes) == ([], capacity)
        with pytest.raises(TierFull):
            await tier.put(name(99), memoryview(b"x"))


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EIO, errno.ENOSPC])
@aio
async def test_R29_a_file_system_that_cannot_zero_has_its_files_removed(
    able: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    calls: list[int] = []

    def unable(fd: int, length: int) -> None:
        calls.append(length)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("storage.nvme.recycled.zero_whole", unable)
    async with nvme(able, capacity_bytes=100 * MIB) as tier:
        for _ in range(2):
            await put(tier, 1)
            await tier.delete([name(1)])
            assert files_in(able) == set()
        assert calls == [LENGTH], "it is not asked again"
        assert tier.statistics.used_bytes == 0
        await put(tier, *range(90))  # the room is there, all of it


@aio
async def test_law_3_who_reads_beside_puts_and_deletions_gets_the_blob_or_a_miss(able: Path) -> None:
    rng = random.Random(3)
    fates: Counter[str] = Counter()

    async def live(tier: NvmeTier, number: int) -> None:
        await put(tier, number)
        reading = [asyncio.create_task(look(tier, number)) for _ in range(3)]
        await asyncio.sleep(rng.random() / 500)
        await tier.delete([name(number)])
        await asyncio.gather(*reading)

    async def look(tier: NvmeTier, number: int) -> None:
        for _ in range(3):
            try:
                assert await read(tier, name(number), LENGTH) == content(LENGTH, number)
            except BlobMissing:
                fates["missing"] += 1
            else:
                fates["read"] += 1

    async with nvme(able) as tier:
        for start in range(0, 64, 8):
            await asyncio.gather(*(live(tier, number) for number in range(start, start + 8)))
        kept = len(waiting(able))
    assert min(fates.values()) > 0 and len(fates) == 2, fates
    assert 0 < kept < 64, "some files were written again"
