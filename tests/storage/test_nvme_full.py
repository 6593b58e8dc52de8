"""Room on NVMe: the limit is never passed, a full disk is a value, and the tier recovers by itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from kvgw.runtime import ThreadWorkers
from storage.errors import TierFull, TierMisconfigured
from storage.nvme import NvmeOptions, NvmeState, NvmeTier
from tests.support.aio import aio
from tests.support.tier_conformance import MIB, content, name, read


class HandClock:
    """A clock that moves when the test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds

    def now_ms(self) -> int:
        return 1_700_000_000_000


@asynccontextmanager
async def nvme(options: NvmeOptions, clock: HandClock | None = None) -> AsyncIterator[NvmeTier]:
    workers = ThreadWorkers(8)
    try:
        tier = await NvmeTier.open(options, workers=workers, clock=clock or HandClock())
        try:
            yield tier
        finally:
            await tier.aclose()
    finally:
        workers.close()


def mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True, capture_output=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    try:
        mount(folder, "size=16m,mode=0700")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a tmpfs here: {error}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(file: Path) -> None:
    """Take the last byte of the disk that `file` is on."""
    with file.open("wb", buffering=0) as ballast, pytest.raises(OSError, match="No space"):
        while True:
            assert ballast.write(bytes(4096)) == 4096


def bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # a temporary file may have got its name meanwhile
            total += path.stat().st_size if path.is_file() and path.name != "owner" else 0
    return total


async def put_all(tier: NvmeTier, count: int, length: int, writers: int) -> int:
    """Put `count` blobs from `writers` tasks; how many were taken."""
    numbers = iter(range(count))
    taken = 0

    async def writer() -> None:
        nonlocal taken
        for number in numbers:
            try:
                await tier.put(name(number), memoryview(content(length, number)))
            except TierFull:
                continue
            taken += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(writers):
            group.create_task(writer())
    return taken


@pytest.mark.parametrize("length", [1000, 99_999, 300_000])
@aio
async def test_R33_the_capacity_is_never_passed_by_eight_writers(tmp_path: Path, length: int) -> None:
    capacity = 2_000_000
    most = 0
    stop = asyncio.Event()

    async def watch(tier: NvmeTier) -> None:
        nonlocal most
        while not stop.is_set():
            room = tier.statistics
            assert room.used_bytes + room.in_flight_bytes <= capacity
            most = max(most, await asyncio.to_thread(bytes_in, tmp_path))

    async with nvme(NvmeOptions(tmp_path, capacity, 0)) as tier:
        watcher = asyncio.create_task(watch(tier))
        taken = await put_all(tier, 2 * capacity // length if length > 1000 else 2200, length, writers=8)
        stop.set()
        await watcher
        assert taken == capacity // length
        assert tier.statistics.used_bytes == bytes_in(tmp_path) == taken * length
        assert tier.statistics.state is NvmeState.FULL
        assert "do not fit" in tier.statistics.reason
    assert 0 < most <= capacity


@aio
async def test_room_for_a_smaller_blob_is_given_at_once_and_deletes_make_room(tmp_path: Path) -> None:
    async with nvme(NvmeOptions(tmp_path, 1000, 0)) as tier:
        await tier.put(name(1), memoryview(content(600)))
        with pytest.raises(TierFull, match="600 of 1000 bytes are taken, 500 more do not fit"):
            await tier.put(name(2), memoryview(content(500)))
        await tier.put(name(3), memoryview(content(400)))
        await tier.delete([name(1)])
        await tier.put(name(2), memoryview(content(500)))
        assert tier.statistics.used_bytes == 900
        assert tier.statistics.state is NvmeState.OK


@aio
async def test_R13_blobs_of_before_count_until_they_are_deleted(tmp_path: Path) -> None:
    async with nvme(NvmeOptions(tmp_path, 1000, 0)) as tier:
        await tier.put(name(1), memoryview(content(900)))
    async with nvme(NvmeOptions(tmp_path, 1000, 0)) as tier:
        with pytest.raises(TierFull):
            await tier.put(name(2), memoryview(content(200)))
        await tier.delete([name(1)])
        await tier.put(name(2), memoryview(content(200)))


@aio
async def test_R33_the_tighter_of_two_limits_wins(small_disk: Path) -> None:
    with pytest.raises(TierMisconfigured, match="on a disk of 16777216 bytes, of which 16777216 are to stay free"):
        async with nvme(NvmeOptions(small_disk, 200 * MIB, 16 * MIB)):
            pytest.fail("opened")
    async with nvme(NvmeOptions(small_disk, 200 * MIB, 6 * MIB)) as tier:
        assert tier.statistics.limit_bytes == 10 * MIB
        taken = await put_all(tier, 20, MIB, writers=8)
        assert 9 <= taken <= 10
        assert bytes_in(small_disk) <= 10 * MIB


@aio
async def test_R31_a_disk_filled_from_outside_is_a_value_and_recovers(small_disk: Path) -> None:
    clock = HandClock()
    ballast = small_disk / "ballast"
    async with nvme(NvmeOptions(small_disk, 200 * MIB, 0, full_retry_s=5), clock) as tier:
        await tier.put(name(1), memoryview(content(MIB)))
        fill(ballast)
        with pytest.raises(TierFull, match=r"do not fit|No space"):
            await tier.put(name(2), memoryview(content(2 * MIB)))
        assert tier.statistics.state is NvmeState.FULL
        assert tier.statistics.in_flight_bytes == 0
        assert await read(tier, name(1), MIB) == content(MIB)
        os.truncate(ballast, 4 * MIB)
        with pytest.raises(TierFull):
            await tier.put(name(2), memoryview(content(2 * MIB)))  # not asked again before its time
        clock.seconds += 5
        await tier.put(name(2), memoryview(content(2 * MIB)))
        assert await read(tier, name(2), 2 * MIB) == content(2 * MIB)
        assert tier.statistics.state is NvmeState.OK
        assert not list((small_disk / "tmp").iterdir())


@aio
async def test_R31_a_write_that_runs_out_of_space_leaves_nothing(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without preallocation and without the look at free space, the write itself meets the full disk."""
    clock = HandClock()
    monkeypatch.setattr("storage.nvme.files._free_bytes", lambda fd: 1 << 60)
    monkeypatch.setattr("storage.nvme.opening._preallocates", lambda fd: False)
    async with nvme(NvmeOptions(small_disk, 200 * MIB, 0), clock) as tier:
        (small_disk / "ballast").write_bytes(bytes(4 * MIB))
        await tier.put(name(1), memoryview(content(8 * MIB)))
        with pytest.raises(TierFull, match="No space left on device; free space on its disk"):
            await tier.put(name(2), memoryview(content(6 * MIB)))
        assert not list((small_disk / "tmp").iterdir())
        assert tier.statistics.used_bytes == 8 * MIB
        assert tier.statistics.state is NvmeState.FULL
        await tier.delete([name(1)])  # our own deletion made room: the next put may try at once
        await tier.put(name(2), memoryview(content(6 * MIB)))
        assert tier.statistics.state is NvmeState.OK


@aio
async def test_while_the_disk_is_full_one_put_at_a_time_probes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = HandClock()
    asked = 0

    def nothing_free(fd: int) -> int:
        nonlocal asked
        asked += 1
        return 0

    monkeypatch.setattr("storage.nvme.files._free_bytes", nothing_free)
    async with nvme(NvmeOptions(tmp_path, 1000, 100, full_retry_s=5), clock) as tier:
        for expected in (1, 2, 3):
            assert await put_all(tier, 20, 10, writers=1) == 0
            assert asked == expected
            clock.seconds += 5


@aio
async def test_a_full_disk_does_not_keep_a_gateway_from_starting(small_disk: Path) -> None:
    async with nvme(NvmeOptions(small_disk, 200 * MIB, 0)) as tier:
        await tier.put(name(1), memoryview(content(MIB)))
    fill(small_disk / "ballast")
    async with nvme(NvmeOptions(small_disk, 200 * MIB, 0)) as tier:
        assert await read(tier, name(1), MIB) == content(MIB)
        with pytest.raises(TierFull):
            await tier.put(name(2), memoryview(content(MIB)))


@aio
async def test_a_disk_mounted_read_only_is_refused(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(TierMisconfigured, match="of uid 0 is on a file system mounted read-only; mount it for writing"):
        async with nvme(NvmeOptions(small_disk, 200 * MIB, 0)):
            pytest.fail("opened")
