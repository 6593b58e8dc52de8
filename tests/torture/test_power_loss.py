"""S04, S07: power is lost after any call of a PUT or DELETE, and what was not synced is there or not, in all ways.

What was acknowledged is there (law 8), what was deleted is not (law 5), and everything else is whole or absent (law 2).
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgw.runtime import SystemClock, ThreadWorkers
from storage.errors import BlobDamaged, BlobMissing
from storage.nvme import NvmeOptions, NvmeTier
from storage.nvme.recycled import OldFile, Recycled
from tests.support.aio import run
from tests.support.tier_conformance import MIB, content, name
from tests.torture.disk import Disk, Event, Recorder

LENGTH = 3000
VARIANTS = 12
"""Combinations of what is lost, for each moment."""


@pytest.fixture
def quick() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="kvgw-power-", dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


async def opened(root: Path, workers: ThreadWorkers) -> NvmeTier:
    options = NvmeOptions(root=root, capacity_bytes=64 * MIB, free_bytes_min=0)
    return await NvmeTier.open(options, workers=workers, clock=SystemClock())


async def scenario(tier: NvmeTier, recorder: Recorder, length: int) -> None:
    """Puts in one directory and in another, a deletion, and puts after that."""
    for number in (1, 2, 3):
        await tier.put(name(number), memoryview(content(length, number)))
        recorder.note("acked", number)
    recorder.note("asked", 2)
    await tier.delete([name(2)])
    recorder.note("gone", 2)
    await asyncio.gather(*(tier.put(name(number), memoryview(content(length, number))) for number in (4, 5)))
    recorder.note("acked", 4)
    recorder.note("acked", 5)


async def check(tier: NvmeTier, acked: set[int], gone: set[int], length: int) -> None:
    for number in range(1, 6):
        target = memoryview(bytearray(length))
        try:
            await tier.get_into(name(number), target)
        except BlobMissing:
            assert number not in acked, f"law 8: blob {number} was acknowledged and is lost with the power"
        else:
            assert number not in gone, f"law 5: blob {number} was deleted and came back with the power"
            assert target == content(length, number), f"law 3: blob {number} came back with other bytes"


async def all_moments(folder: Path, rng: random.Random, length: int = LENGTH) -> list[Event]:
    workers = ThreadWorkers(2)
    try:
        tier = await opened(folder / "nvme", workers)
        shutil.copytree(folder / "nvme", folder / "before")
        recorder = Recorder(folder / "nvme")
        with recorder.recording():
            await scenario(tier, recorder, length)
        await tier.aclose()
        for moment in range(1, len(recorder.events) + 1):
            disk, acked, gone = Disk(folder / "before"), set[int](), set[int]()
            for event in recorder.events[:moment]:
                if event[0] == "acked":
                    acked.add(event[1])
                elif event[0] == "asked":
                    acked.discard(event[1])
                elif event[0] == "gone":
                    gone.add(event[1])
                else:
                    disk.do(event)
            for variant in range(VARIANTS):
                after = folder / f"{moment}-{variant}"
                disk.lose_power(after, rng)
                back = await opened(after, workers)
                try:
                    await check(back, acked, gone, length)
                except BaseException as error:
                    error.add_note(f"the power went after {recorder.events[:moment][-12:]}")
                    raise
                finally:
                    await back.aclose()
                    shutil.rmtree(after)
        return recorder.events
    finally:
        workers.close()


def test_S04_acknowledged_blobs_survive_a_power_cut_at_any_moment(quick: Path) -> None:
    assert len(run(all_moments(quick, random.Random(4)))) > 30


@pytest.fixture
def recycling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files of deleted blobs are written again, too."""
    monkeypatch.setattr("storage.nvme.recycled.LENGTH_MIN", 1)


@pytest.mark.usefixtures("recycling")
def test_S04_and_so_they_do_where_files_of_deleted_blobs_are_written_again(quick: Path) -> None:
    events = run(all_moments(quick, random.Random(5), 9000))
    old = [event[4] for event in events if event[0] == "rename" and event[3] == "tmp"]
    assert old, "the file of a deleted blob was kept"
    assert old == [event[2] for event in events if event[0] == "rename" and event[2] in old], "and written again"


@pytest.mark.usefixtures("recycling")
def test_S07_files_that_are_zeroed_before_their_old_names_are_gone_for_good_fail_that_test(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside = Recycled.set_aside

    def at_once(recycled: Recycled, directory_fd: int, leaf: str, length: int) -> OldFile | None:
        old = aside(recycled, directory_fd, leaf, length)
        assert old is None or recycled._is_zero_now(old)
        return old

    monkeypatch.setattr(Recycled, "set_aside", at_once)
    with pytest.raises(BlobDamaged):
        run(all_moments(quick, random.Random(5), 9000))


def test_S07_without_one_sync_of_a_directory_the_test_of_lost_power_fails(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("storage.nvme.tree", "storage.nvme.files"):
        monkeypatch.setattr(f"{module}.sync_directory", lambda descriptor: None)
    with pytest.raises(AssertionError, match=r"law 8: blob \d was acknowledged and is lost"):
        run(all_moments(quick, random.Random(4)))
