"""Changes that wait together go together: fewer syncs, each with its own end, and nobody waits for company."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvgw.runtime import SystemClock, ThreadWorkers
from storage.errors import BlobMissing, TierFull, TierUnavailable
from storage.nvme import NvmeOptions, NvmeState, NvmeTier
from storage.nvme.changes import Change
from storage.nvme.lanes import Bounds, Lane
from storage.tier import blob_name
from tests.storage.test_nvme_direct import aligned
from tests.support.aio import aio
from tests.support.tier_conformance import MIB, NAMESPACES, content, listed, read
from tests.torture.disk import Disk, Recorder

Result = TypeVar("Result")
LENGTH = 9000


def name(number: int, digits: int = 0) -> str:
    """A blob in a directory that the test chooses."""
    return blob_name(NAMESPACES[0], bytes([digits]) + random.Random(number).randbytes(15))


class Gate:
    """Worker threads that begin when the test opens the gate; counts hops."""

    def __init__(self, workers: ThreadWorkers) -> None:
        self.hops = 0
        self.open = asyncio.Event()
        self._workers = workers

    async def run(self, work: Callable[[], Result]) -> Result:
        self.hops += 1

        async def later() -> Result:
            await self.open.wait()
            return await self._workers.run(work)

        running = asyncio.ensure_future(later())
        while not running.done():
            try:
                await asyncio.wait((running,))
            except asyncio.CancelledError:
                continue
        return running.result()


@pytest.fixture(autouse=True)
def _one_hop_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is certain who goes with whom."""
    monkeypatch.setattr("storage.nvme.tier._SMALL", Bounds(hops=1, changes=32, nbytes=MIB))
    monkeypatch.setattr("storage.nvme.tier._REMOVALS", Bounds(hops=1, changes=32, nbytes=0))


@asynccontextmanager
async def gated(root: Path) -> AsyncIterator[tuple[NvmeTier, Gate]]:
    """A tier whose gate is open, and closes when the test clears it."""
    workers = ThreadWorkers(4)
    try:
        gate = Gate(workers)
        gate.open.set()
        options = NvmeOptions(root, 1024 * MIB, 0, full_retry_s=0)
        tier = await NvmeTier.open(options, workers=gate, clock=SystemClock())
        gate.hops = 0
        try:
            yield tier, gate
        finally:
            gate.open.set()
            await tier.aclose()
    finally:
        workers.close()


async def behind(gate: Gate, puts: Sequence[Any]) -> list[BaseException | None]:
    """Start `puts` at a closed gate, then open it; how each ended."""
    gate.open.clear()
    tasks = [asyncio.ensure_future(put) for put in puts]
    for _ in range(5):
        await asyncio.sleep(0)
    gate.open.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the file system is asked to make something durable, from now on."""
    counted: Counter[str] = Counter()

    def counting(function: str) -> None:
        real = getattr(os, function)

        def call(fd: int) -> None:
            counted[function] += 1
            real(fd)

        monkeypatch.setattr(os, function, call)

    counting("fsync")
    counting("fdatasync")
    return counted


@aio
async def test_puts_of_one_turn_go_in_one_hop_with_one_sync_of_each_directory(
    tmp_path: Path, calls: Counter[str]
) -> None:
    async with gated(tmp_path) as (tier, gate):
        for digits in (0, 1):
            await tier.put(name(99, digits), memoryview(b"the directory is there"))
        calls.clear()
        gate.hops = 0
        await asyncio.gather(*(tier.put(name(n, n % 2), aligned(content(LENGTH, n))) for n in range(12)))
        assert gate.hops == 1
        assert calls == {"fdatasync": 12, "fsync": 2}
        for n in range(12):
            assert await read(tier, name(n, n % 2), LENGTH) == content(LENGTH, n)


@aio
async def test_what_comes_while_a_hop_runs_goes_with_the_next(tmp_path: Path) -> None:
    async with gated(tmp_path) as (tier, gate):
        gate.open.clear()
        first = asyncio.create_task(tier.put(name(0), memoryview(b"x")))
        for _ in range(5):
            await asyncio.sleep(0)
        assert gate.hops == 1, "a lone put does not wait for company"
        later = [asyncio.create_task(tier.put(name(n), memoryview(b"x"))) for n in range(1, 20)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert gate.hops == 1
        gate.open.set()
        await asyncio.gather(first, *later)
        assert gate.hops == 2
        assert len(await listed(tier)) == 20


@aio
async def test_deletions_of_one_turn_share_a_hop_and_a_sync(tmp_path: Path, calls: Counter[str]) -> None:
    async with gated(tmp_path) as (tier, gate):
        await asyncio.gather(*(tier.put(name(n), memoryview(b"x")) for n in range(9)))
        calls.clear()
        gate.hops = 0
        await asyncio.gather(*(tier.delete([name(n), name(n + 1)]) for n in range(0, 8, 2)))
        assert gate.hops == 1
        assert calls == {"fsync": 1}
        assert [blob.name for blob in await listed(tier)] == [name(8)]
        assert tier.statistics.used_bytes == 1


@pytest.mark.parametrize(
    ("function", "error", "raised"),
    [
        ("open", errno.EMFILE, TierUnavailable),
        ("posix_fallocate", errno.ENOSPC, TierFull),
        ("write", errno.EIO, TierUnavailable),
        ("fdatasync", errno.EIO, TierUnavailable),
        ("rename", errno.EIO, TierUnavailable),
    ],
)
@aio
async def test_S03_what_one_member_meets_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, error: int, raised: type[Exception]
) -> None:
    """Law 1: of the one that failed nothing is left; law 8: the others are as durable as alone."""
    async with gated(tmp_path) as (tier, gate):
        await tier.put(name(99), memoryview(b"the directory is there"))
        real, met = getattr(os, function), iter(range(100))

        def faulty(*arguments: Any, **more: Any) -> Any:
            if next(met) == 2:
                raise OSError(error, os.strerror(error))
            return real(*arguments, **more)

        descriptors = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(os, function, faulty)
        ends = await behind(gate, [tier.put(name(n), memoryview(content(LENGTH, n))) for n in range(6)])
        monkeypatch.undo()
        failed = [n for n, end in enumerate(ends) if end is not None]
        assert len(failed) == 1
        assert type(ends[failed[0]]) is raised
        assert gate.hops == 2
        with pytest.raises(BlobMissing):
            await read(tier, name(failed[0]), LENGTH)
        for n in set(range(6)) - set(failed):
            assert await read(tier, name(n), LENGTH) == content(LENGTH, n)
        assert not list((tmp_path / "tmp").iterdir())
        assert tier.statistics.used_bytes == 5 * LENGTH + 22
        assert tier.statistics.in_flight_bytes == 0
        assert (tier.statistics.state is NvmeState.SUSPECT) == (function == "fdatasync")
        assert len(os.listdir("/proc/self/fd")) == descriptors


@aio
async def test_S06_a_directory_that_cannot_be_synced_fails_all_that_depend_on_it_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gated(tmp_path) as (tier, gate):
        for digits in (0, 1):
            await tier.put(name(99, digits), memoryview(b"there"))
        bad = os.stat((tmp_path / name(99, 1)).parent).st_ino
        real = os.fsync

        def faulty(fd: int) -> None:
            if os.fstat(fd).st_ino == bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(fd)

        monkeypatch.setattr(os, "fsync", faulty)
        ends = await behind(gate, [tier.put(name(n, n % 2), memoryview(content(LENGTH, n))) for n in range(6)])
        for n, end in enumerate(ends):
            if n % 2:
                assert isinstance(end, TierUnavailable)
                assert "the tier is suspect" in str(end)
                assert not (tmp_path / name(n, 1)).exists()
            else:
                assert end is None
                assert await read(tier, name(n), LENGTH) == content(LENGTH, n)
        assert len({id(end) for end in ends if end is not None}) == 3, "each caller has an error of its own"
        with pytest.raises(TierUnavailable, match="could not be synced"):
            await tier.delete([name(99, 1)])
        await tier.delete([name(0)])
        assert tier.statistics.used_bytes == 2 * LENGTH + 5


@aio
async def test_the_capacity_holds_for_members_of_one_group(tmp_path: Path) -> None:
    workers = ThreadWorkers(2)
    options = NvmeOptions(tmp_path, 5 * LENGTH, 0)
    try:
        tier = await NvmeTier.open(options, workers=workers, clock=SystemClock())
        puts = (tier.put(name(n), memoryview(content(LENGTH, n))) for n in range(8))
        ends = await asyncio.gather(*puts, return_exceptions=True)
        assert [type(end) for end in ends if end is not None] == [TierFull] * 3
        assert tier.statistics.used_bytes == 5 * LENGTH
        await tier.aclose()
    finally:
        workers.close()


@aio
async def test_a_caller_that_is_cancelled_while_it_waits_is_not_written_and_has_its_memory_at_once(
    tmp_path: Path,
) -> None:
    """Law 7."""
    async with gated(tmp_path) as (tier, gate):
        gate.open.clear()
        first = asyncio.create_task(tier.put(name(0), memoryview(b"x")))
        for _ in range(3):
            await asyncio.sleep(0)
        memory = bytearray(content(LENGTH))
        waiting = asyncio.create_task(tier.put(name(1), memoryview(memory)))
        other = asyncio.create_task(tier.put(name(2), memoryview(b"y")))
        for _ in range(3):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        del waiting
        memory.extend(b"nobody has it")
        gate.open.set()
        await asyncio.gather(first, other)
        assert {blob.name for blob in await listed(tier)} == {name(0), name(2)}


@aio
async def test_a_caller_that_is_cancelled_under_way_waits_for_the_thread_and_spoils_nobodys_put(tmp_path: Path) -> None:
    """Law 7."""
    async with gated(tmp_path) as (tier, gate):
        gate.open.clear()
        memory = bytearray(content(LENGTH))
        puts = [asyncio.create_task(tier.put(name(0), memoryview(memory)))]
        puts += [asyncio.create_task(tier.put(name(n), memoryview(content(LENGTH, n)))) for n in (1, 2)]
        for _ in range(3):
            await asyncio.sleep(0)
        for _ in range(3):
            puts[0].cancel()
            await asyncio.sleep(0)
        assert not puts[0].done(), "law 7: memory was given back while a thread may use it"
        gate.open.set()
        await asyncio.wait(puts)
        assert [put.cancelled() for put in puts] == [True, False, False]
        del puts
        memory.extend(b"nobody has it")
        assert await read(tier, name(2), LENGTH) == content(LENGTH, 2)


@aio
async def test_a_put_that_failed_keeps_no_hold_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 7, without the help of the collector of cycles."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    memory = bytearray(content(LENGTH))
    async with gated(tmp_path) as (tier, _):
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(TierFull):
            await tier.put(name(1), memoryview(memory))
        memory.extend(b"nobody has it")


class Wish(Change):
    def __init__(self, nbytes: int) -> None:
        super().__init__("test", nbytes)


async def ridden(sizes: Sequence[int], bounds: Bounds) -> list[list[int]]:
    """Sizes of the changes that each hop took."""
    hops: list[list[int]] = []

    def work(wishes: Sequence[Wish]) -> None:
        hops.append([one.nbytes for one in wishes])
        for one in wishes:
            one.succeed()

    workers = ThreadWorkers(1)
    try:
        lane = Lane[Wish](workers, work, bounds)
        await asyncio.gather(*(lane.carry(Wish(size)) for size in sizes))
    finally:
        workers.close()
    return hops


@aio
async def test_a_hop_is_bounded_in_changes_and_bytes(tmp_path: Path) -> None:
    """Law 9."""
    assert await ridden([1] * 7, Bounds(hops=1, changes=3, nbytes=100)) == [[1, 1, 1], [1, 1, 1], [1]]
    assert await ridden([50, 40, 20, 90, 200, 1], Bounds(1, 9, 100)) == [[50, 40], [20], [90], [200], [1]]
    assert await ridden([], Bounds(1, 9, 100)) == []


@aio
async def test_those_that_wait_are_shared_out_among_the_hops() -> None:
    assert await ridden([1] * 4, Bounds(hops=3, changes=2, nbytes=100)) == [[1, 1], [1], [1]]
    assert sorted(map(len, await ridden([1] * 16, Bounds(hops=3, changes=2, nbytes=100)))) == [2] * 8


@aio
async def test_work_that_breaks_is_told_to_all_who_ride_and_the_lane_goes_on() -> None:
    broken = [True]

    def work(wishes: Sequence[Wish]) -> None:
        wishes[0].succeed()
        if broken.pop():
            raise AssertionError("a bug")
        for one in wishes:
            one.succeed()

    workers = ThreadWorkers(1)
    try:
        lane = Lane[Wish](workers, work, Bounds(1, 9, 100))
        ends = await asyncio.gather(*(lane.carry(Wish(1)) for _ in range(3)), return_exceptions=True)
        assert [type(end) for end in ends] == [type(None), AssertionError, AssertionError]
        broken.append(False)
        await asyncio.wait_for(lane.carry(Wish(1)), 10)
    finally:
        workers.close()


@pytest.fixture
def quick() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="kvgw-power-", dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@aio
async def test_S04_of_a_group_what_was_acknowledged_survives_a_power_cut_at_any_moment(quick: Path) -> None:
    """Law 8, with three blobs in two directories that are written together."""
    names = [name(1), name(2), name(3, 1)]
    data = [content(LENGTH, n) for n in range(3)]
    async with gated(quick / "nvme") as (tier, gate):
        shutil.copytree(quick / "nvme", quick / "before")
        recorder = Recorder(quick / "nvme")
        with recorder.recording():
            await asyncio.gather(*(tier.put(one, aligned(what)) for one, what in zip(names, data, strict=True)))
        assert gate.hops == 1
    for moment in range(len(recorder.events) + 1):
        disk = Disk(quick / "before")
        for event in recorder.events[:moment]:
            disk.do(event)
        for variant in range(4):
            after = quick / f"{moment}-{variant}"
            disk.lose_power(after, random.Random(variant))
            async with gated(after) as (tier, _):
                found = await tier.stat(names)
                assert moment < len(recorder.events) or len(found) == 3, "law 8: acknowledged and lost"
                for one, what in zip(names, data, strict=True):
                    if one in found:
                        assert await read(tier, one, LENGTH) == what, "law 3: other bytes came back"
            shutil.rmtree(after)
