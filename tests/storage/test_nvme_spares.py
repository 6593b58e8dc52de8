"""Spares: they make a put quicker and are otherwise not to be seen, least of all where room is scarce."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from storage.errors import TierFull
from storage.nvme import NvmeState, NvmeTier
from storage.nvme.spares import Spares
from tests.storage.test_nvme import files_in, nvme
from tests.storage.test_nvme_direct import aligned
from tests.support.aio import aio
from tests.support.tier_conformance import MIB, content, name, read

LENGTH = 64 * 1024 + 308


async def settled(tier: NvmeTier) -> None:
    """Until no spare is being made."""
    while tier._preparing is not None:
        await asyncio.wait((tier._preparing,))


async def put_each(tier: NvmeTier, numbers: Sequence[int], length: int = LENGTH) -> None:
    for number in numbers:
        await tier.put(name(number), aligned(content(length, number)))
        await settled(tier)


def unnamed() -> int:
    """Files of this process that have no name (any more)."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").endswith(" (deleted)")
        except FileNotFoundError:  # the folder's own descriptor, closed by now
            continue
    return count


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that spares got."""
    names: list[str] = []
    link = os.link

    def noted(source: str, target: str, **more: Any) -> None:
        link(source, target, **more)
        names.append(target)

    monkeypatch.setattr(os, "link", noted)
    return names


@pytest.fixture
def able(tmp_path: Path) -> Path:
    """A folder on a file system that has direct transfers and unnamed files."""
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_WRONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"no spares here: {error}")
    return tmp_path / "nvme"


@aio
async def test_a_blob_of_a_length_that_came_before_goes_into_a_spare_and_nobody_sees_it(
    able: Path, linked: list[str]
) -> None:
    before = unnamed()
    async with nvme(able) as tier:
        await put_each(tier, range(2))
        assert (linked, unnamed() - before) == ([], 1)
        await put_each(tier, range(2, 6))
        assert len(linked) == 4
        assert files_in(able) == {name(number) for number in range(6)}
        assert tier.statistics.used_bytes == 6 * LENGTH
        assert tier.statistics.in_flight_bytes == 0
        for number in range(6):
            assert await read(tier, name(number), LENGTH) == content(LENGTH, number)
    assert unnamed() == before, "law 7: spares end with the tier"


@aio
async def test_a_blob_in_a_spare_is_durable_before_put_returns(able: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Laws 1 and 8: named where unfinished files are, bytes, data sync, the blob's name, its directory."""
    events: list[str] = []

    def noting(function: str) -> None:
        real = getattr(os, function)

        def noted(*arguments: Any, **more: Any) -> Any:
            result = real(*arguments, **more)
            events.append(function)
            return result

        monkeypatch.setattr(os, function, noted)

    async with nvme(able) as tier:
        await put_each(tier, [1, 2, 1])
        for function in ("link", "write", "fdatasync", "rename", "fsync"):
            noting(function)
        await tier.put(name(1), aligned(content(LENGTH)))
        assert events == ["link", "write", "write", "fdatasync", "rename", "fsync"]


@aio
async def test_spares_are_bounded_in_number_bytes_and_lengths(able: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 9."""
    before = unnamed()
    async with nvme(able) as tier:
        await put_each(tier, range(24))  # made anew when half of them are used up
        assert 8 <= unnamed() - before <= 16
        for more in range(1, 6):
            await put_each(tier, [1, 2, 3], LENGTH + more)
        assert unnamed() - before == 4 * 2
        monkeypatch.setattr("storage.nvme.spares._BYTES", 10 * LENGTH)
        await put_each(tier, range(6), LENGTH + 6)
        assert 3 * 2 < unnamed() - before <= 10


@aio
async def test_spares_give_way_to_blobs_at_the_capacity(able: Path) -> None:
    async with nvme(able, capacity_bytes=20 * LENGTH) as tier:
        before = unnamed()
        await put_each(tier, range(6))
        assert unnamed() - before > 2
        for number in range(6, 20):
            await tier.put(name(number), aligned(content(LENGTH - 1, number)))
        taken = 20 * LENGTH - 14
        assert tier.statistics.used_bytes == taken
        with pytest.raises(TierFull, match=f"{taken} of {20 * LENGTH} bytes are taken, 15 more do not fit"):
            await tier.put(name(20), memoryview(bytes(15)))
        await settled(tier)
        assert unnamed() == before


@aio
async def test_spares_give_way_to_blobs_on_a_disk_that_others_filled(
    able: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[bool] = []
    drop = Spares.drop

    def noted(spares: Spares) -> bool:
        dropped.append(drop(spares))
        return dropped[-1]

    async with nvme(able) as tier:
        await put_each(tier, range(4))
        monkeypatch.setattr(Spares, "drop", noted)
        monkeypatch.setattr("storage.nvme.files._free_bytes", lambda fd: 1 << 40 if any(dropped) else 5000)
        await tier.put(name(4), memoryview(content(6000)))
        assert any(dropped)
        assert tier.statistics.state is NvmeState.OK
        assert await read(tier, name(4), 6000) == content(6000)
        monkeypatch.setattr("storage.nvme.files._free_bytes", lambda fd: 5000)
        with pytest.raises(TierFull):
            await tier.put(name(5), memoryview(content(6000)))


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EMFILE, errno.ENOSPC])
@pytest.mark.parametrize("function", ["open", "posix_fallocate", "link"])
@aio
async def test_R29_without_spares_everything_works_as_before(
    able: Path, monkeypatch: pytest.MonkeyPatch, function: str, error: int
) -> None:
    real = getattr(os, function)
    puts = True

    def faulty(*arguments: Any, **more: Any) -> Any:
        nonlocal puts
        if function == "link" or (function == "open" and arguments[0] == ".") or not puts:
            raise OSError(error, os.strerror(error))
        return real(*arguments, **more)

    before = unnamed()
    async with nvme(able) as tier:
        monkeypatch.setattr(os, function, faulty)
        for number in range(6):
            await tier.put(name(number), aligned(content(LENGTH, number)))
            puts = False
            await settled(tier)
            puts = True
        for number in range(6):
            assert await read(tier, name(number), LENGTH) == content(LENGTH, number)
        assert files_in(able) == {name(number) for number in range(6)}
        assert tier.statistics.used_bytes == 6 * LENGTH
        assert tier.statistics.state is NvmeState.OK
        monkeypatch.undo()
    assert unnamed() == before


@aio
async def test_a_put_into_a_spare_that_fails_leaves_nothing(able: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with nvme(able, capacity_bytes=100 * MIB) as tier:
        await put_each(tier, range(4))
        descriptors = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(os, "write", broken)
        with pytest.raises(Exception, match="Input/output error"):
            await tier.put(name(4), aligned(content(LENGTH)))
        monkeypatch.undo()
        assert files_in(able) == {name(number) for number in range(4)}
        assert len(os.listdir("/proc/self/fd")) == descriptors - 1, "the spare is spent"
        assert tier.statistics.used_bytes == 4 * LENGTH
        assert tier.statistics.in_flight_bytes == 0
