"""Blobs as files: the conformance suite, planted files, crashes, and who may use the folder."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from kvgw.runtime import SystemClock, ThreadWorkers
from storage.errors import BlobDamaged, BlobMissing, TierMisconfigured, TierUnavailable
from storage.limited import LimitedTier
from storage.nvme import NvmeOptions, NvmeState, NvmeTier
from storage.tier import Tier
from tests.support.aio import aio
from tests.support.tier_conformance import BAD_NAMES, MIB, TierConformance, content, listed, name, read

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@asynccontextmanager
async def nvme(root: Path, **settings: int | float | str) -> AsyncIterator[NvmeTier]:
    options = NvmeOptions(**{"root": root, "capacity_bytes": 1024 * MIB, "free_bytes_min": 0, **settings})
    workers = ThreadWorkers(8)
    try:
        tier = await NvmeTier.open(options, workers=workers, clock=SystemClock())
        try:
            yield tier
        finally:
            await tier.aclose()
    finally:
        workers.close()


def files_in(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.name != "owner"}


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, int], list[int]]:
    """Make an `os` function fail once: at its `when`-th call (0: the next) with `error`; the list counts calls."""

    def plan(function: str, error: int, when: int = 0) -> list[int]:
        real = getattr(os, function)
        calls = [0]

        def faulty(*args: object, **kwargs: object) -> object:
            calls[0] += 1
            if calls[0] == when + 1:
                raise OSError(error, os.strerror(error))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, function, faulty)
        return calls

    return plan


class TestNvmeTier(TierConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.root = tmp_path / "nvme"

    def open_tier(self) -> AbstractAsyncContextManager[Tier]:
        return nvme(self.root)


class TestLimitedNvmeTier(TestNvmeTier):
    def open_tier(self) -> AbstractAsyncContextManager[Tier]:
        @asynccontextmanager
        async def limited() -> AsyncIterator[Tier]:
            async with nvme(self.root) as tier:
                yield LimitedTier(tier, 2)

        return limited()


@aio
async def test_blobs_outlive_the_tier_and_are_counted_when_it_opens(tmp_path: Path) -> None:
    async with nvme(tmp_path / "a") as tier:
        for number in range(5):
            await tier.put(name(number), memoryview(content(1000, number)))
        await tier.delete([name(0)])
        assert tier.statistics.used_bytes == 4000
    async with nvme(tmp_path / "a") as tier:
        assert tier.statistics.used_bytes == 4000
        assert await read(tier, name(3), 1000) == content(1000, 3)
        assert tier.statistics.state is NvmeState.OK


@aio
async def test_files_and_folders_are_the_owners_alone(tmp_path: Path) -> None:
    async with nvme(tmp_path / "a" / "b") as tier:
        await tier.put(name(1), memoryview(b"x"))
    for path in [tmp_path / "a", *(tmp_path / "a").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


@aio
async def test_what_a_killed_writer_left_is_removed_and_empty_folders_too(tmp_path: Path) -> None:
    async with nvme(tmp_path) as tier:
        await tier.put(name(1), memoryview(b"x"))
        await tier.put(name(2), memoryview(b"y"))
        await tier.delete([name(2)])
    (tmp_path / "tmp" / "half.7").write_bytes(b"half")
    async with nvme(tmp_path) as tier:
        assert files_in(tmp_path) == {name(1)}
        assert not (tmp_path / name(2)).parent.exists()
        assert tier.statistics.used_bytes == 1


@pytest.mark.parametrize("length", [0, 1, 4096, 9999, 10001, 1 << 20])
@aio
async def test_a_torn_or_grown_file_is_damage(tmp_path: Path, length: int) -> None:
    async with nvme(tmp_path) as tier:
        await tier.put(name(1), memoryview(content(10_000)))
        os.truncate(tmp_path / name(1), length)
        with pytest.raises(BlobDamaged, match=f"{length} bytes, not 10000"):
            await read(tier, name(1), 10_000)
        await tier.put(name(1), memoryview(content(10_000)))
        assert await read(tier, name(1), 10_000) == content(10_000)
        assert tier.statistics.used_bytes == 10_000


@aio
async def test_a_file_that_shrinks_while_it_is_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:999]], at) if at < 4500 else 0)
    async with nvme(tmp_path) as tier:
        await tier.put(name(1), memoryview(content(10_000)))
        with pytest.raises(BlobDamaged, match="ended after 4995 of 10000 bytes"):
            await read(tier, name(1), 10_000)


@pytest.mark.parametrize("what", ["symlink", "fifo", "directory"])
@aio
async def test_F02_what_is_no_regular_file_is_no_blob(tmp_path: Path, what: str) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789")
    root = tmp_path / "nvme"
    async with nvme(root) as tier:
        await tier.put(name(1), memoryview(b"0123456789"))
        blob = root / name(1)
        blob.unlink()
        {"symlink": lambda: blob.symlink_to(secret), "fifo": lambda: os.mkfifo(blob), "directory": blob.mkdir}[what]()
        with pytest.raises(BlobDamaged):
            await read(tier, name(1), 10)
        assert await tier.stat([name(1)]) == {}
        assert await listed(tier) == []
        if what == "directory":
            with pytest.raises(TierUnavailable):
                await tier.delete([name(1)])
        else:
            await tier.put(name(1), memoryview(b"abcdefghij"))
            assert await read(tier, name(1), 10) == b"abcdefghij"
            await tier.delete([name(1)])
    assert secret.read_bytes() == b"0123456789"


@pytest.mark.parametrize("depth", [0, 1, 2], ids=["v1", "namespace", "digits"])
@aio
async def test_F02_no_directory_behind_a_symbolic_link_is_entered(tmp_path: Path, depth: int) -> None:
    outside = tmp_path / "outside"
    root = tmp_path / "nvme"
    async with nvme(root) as tier:
        await tier.put(name(1), memoryview(b"0123456789"))
    planted = root.joinpath(*name(1).split("/")[: depth + 1])
    planted.rename(outside)
    planted.symlink_to(outside)
    before = files_in(outside)
    async with nvme(root) as tier:
        assert tier.statistics.used_bytes == 0
        with pytest.raises(BlobDamaged):
            await read(tier, name(1), 10)
        with pytest.raises(TierUnavailable, match="Not a directory"):
            await tier.put(name(1), memoryview(b"abcdefghij"))
        with pytest.raises(TierUnavailable, match="Not a directory"):
            await tier.delete([name(1)])
        assert await tier.stat([name(1)]) == {}
        assert await listed(tier) == []
    assert files_in(outside) == before


@aio
async def test_F02_bad_names_create_nothing(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "nvme"
    async with nvme(root) as tier:
        before = {str(path) for path in tmp_path.rglob("*")}
        for bad in BAD_NAMES.values():
            with pytest.raises(ValueError, match="is not a blob name"):
                await tier.put(bad, memoryview(b"x"))
        assert {str(path) for path in tmp_path.rglob("*")} == before


@aio
async def test_strangers_are_left_alone_and_counted(tmp_path: Path) -> None:
    async with nvme(tmp_path) as tier:
        await tier.put(name(1), memoryview(b"x"))
    folder = (tmp_path / name(1)).parent
    (folder / "note.txt").write_text("mine")
    (folder / ("f" * 32)).write_text("under another folder's digits")
    (folder.parent / "zz").write_text("no folder")
    async with nvme(tmp_path) as tier:
        assert tier.statistics.foreign == 3
        assert [blob.name for blob in await listed(tier)] == [name(1)]
        await tier.delete([name(1)])
    assert (folder / "note.txt").read_text() == "mine"


@aio
async def test_R05_blobs_removed_by_hand_are_missing_and_their_room_comes_back(tmp_path: Path) -> None:
    async with nvme(tmp_path, capacity_bytes=20 * 1000) as tier:
        for number in range(20):
            await tier.put(name(number), memoryview(content(1000, number)))
        for number in range(10):
            (tmp_path / name(number)).unlink()
        (tmp_path / name(0)).parent.rmdir()
        with pytest.raises(BlobMissing):
            await read(tier, name(0), 1000)
        await tier.delete([name(number) for number in range(10)])
        assert tier.statistics.used_bytes == 10 * 1000
        for number in range(20, 30):
            await tier.put(name(number), memoryview(content(1000, number)))
        assert tier.statistics.used_bytes == 20 * 1000


@aio
async def test_R21_a_folder_in_use_is_refused_and_its_owner_named(tmp_path: Path) -> None:
    async with nvme(tmp_path, owner="gateway seven on\nhost a") as tier:
        with pytest.raises(TierMisconfigured, match="in use by gateway seven on host a; give each gateway a folder"):
            async with nvme(tmp_path, owner="gateway eight"):
                pytest.fail("opened twice")
        await tier.put(name(1), memoryview(b"x"))
    async with nvme(tmp_path, owner="gateway eight"):
        assert (tmp_path / "owner").read_text().strip() == "gateway eight"


@aio
async def test_a_killed_owner_gives_the_folder_back(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from storage.nvme.opening import open_folder;"
        "from storage.nvme import NvmeOptions; open_folder(NvmeOptions(Path(sys.argv[1]), 1000, 0));"
        "print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "nvme")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"open\n"
        with pytest.raises(TierMisconfigured, match="in use by another process"):
            async with nvme(tmp_path / "nvme"):
                pytest.fail("opened twice")
        owner.kill()
        owner.wait(timeout=10)
    async with nvme(tmp_path / "nvme"):
        pass


@aio
async def test_R29_a_file_system_that_cannot_reserve_space_is_written_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    async with nvme(tmp_path) as tier:
        assert not tier.statistics.preallocates
        await tier.put(name(1), memoryview(content(70_000)))
        assert await read(tier, name(1), 70_000) == content(70_000)


@aio
async def test_short_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, memoryview(data)[:1001]))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:999]], at))
    async with nvme(tmp_path) as tier:
        await tier.put(name(1), memoryview(content(50_000)))
        assert await read(tier, name(1), 50_000) == content(50_000)


@pytest.mark.parametrize(("function", "when"), [("fdatasync", 0), ("fsync", 0), ("fsync", 1)])
@aio
async def test_S06_a_failed_sync_is_final(
    tmp_path: Path, failing: Callable[[str, int, int], list[int]], function: str, when: int
) -> None:
    async with nvme(tmp_path) as tier:
        await tier.put(name(1), memoryview(content(100)))
        calls = failing(function, errno.EIO, when)
        with pytest.raises(TierUnavailable, match="could not be synced: Input/output error; the tier is suspect"):
            await tier.put(name(2), memoryview(content(200)))
        assert calls[0] == when + 1, "a sync that failed is not asked again"
        assert files_in(tmp_path) == {name(1)}
        assert tier.statistics.state is NvmeState.SUSPECT
        assert "Input/output error" in tier.statistics.reason
        assert tier.statistics.used_bytes == 100
        assert tier.statistics.in_flight_bytes == 0
        with pytest.raises(TierUnavailable, match="suspect"):
            await tier.put(name(3), memoryview(b"x"))
        assert await read(tier, name(1), 100) == content(100)
        await tier.delete([name(1)])


@aio
async def test_a_blob_is_durable_before_put_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order of the calls: the data before the name, each new directory's name, the blob's name last."""
    events: list[str] = []

    def noting(function: str, what: Callable[..., str]) -> None:
        real = getattr(os, function)

        def noted(*args: object, **kwargs: object) -> object:
            result = real(*args, **kwargs)
            events.append(what(*args))
            return result

        monkeypatch.setattr(os, function, noted)

    def where(fd: int) -> str:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path)

    async with nvme(tmp_path) as tier:
        noting("fdatasync", lambda fd: "data")
        noting("fsync", lambda fd: f"names in {where(fd)}")
        noting("rename", lambda *_: "rename")
        await tier.put(name(1), memoryview(b"x"))
        namespace, digits = name(1).split("/")[1:3]
        assert events == [
            "data", "names in .", "names in v1", f"names in v1/{namespace}",
            "rename", f"names in v1/{namespace}/{digits}",
        ]  # fmt: skip
        events.clear()
        await tier.put(name(1), memoryview(b"x"))
        assert events == ["data", "rename", f"names in v1/{namespace}/{digits}"]
        events.clear()
        await tier.delete([name(1), name(1)])
        assert events == [f"names in v1/{namespace}/{digits}"]


@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("function", ["open", "posix_fallocate", "write", "rename", "mkdir", "stat", "fstatvfs"])
@aio
async def test_S03_an_error_at_any_call_of_a_put_leaves_nothing(
    tmp_path: Path, failing: Callable[[str, int, int], list[int]], function: str, error: int
) -> None:
    async with nvme(tmp_path, full_retry_s=0) as tier:
        descriptors = len(os.listdir("/proc/self/fd"))
        failing(function, error, 0)
        with pytest.raises(TierUnavailable):
            await tier.put(name(1), memoryview(content(1000)))
        assert files_in(tmp_path) == set()
        assert tier.statistics.used_bytes == tier.statistics.in_flight_bytes == 0
        assert len(os.listdir("/proc/self/fd")) == descriptors
        await tier.put(name(1), memoryview(content(1000)))
        assert await read(tier, name(1), 1000) == content(1000)
        assert tier.statistics.state is NvmeState.OK


@aio
async def test_a_disk_that_cannot_be_read_is_an_outage_not_a_miss(
    tmp_path: Path, failing: Callable[[str, int, int], list[int]]
) -> None:
    async with nvme(tmp_path) as tier:
        await tier.put(name(1), memoryview(content(1000)))
        for function in ("preadv", "open"):
            failing(function, errno.EIO, 0)
            with pytest.raises(TierUnavailable, match="Input/output error"):
                await read(tier, name(1), 1000)
        failing("unlink", errno.EIO, 0)
        with pytest.raises(TierUnavailable, match="Input/output error"):
            await tier.delete([name(1)])
        assert tier.statistics.used_bytes == 1000


@aio
async def test_one_blob_that_resists_does_not_keep_the_others(tmp_path: Path) -> None:
    async with nvme(tmp_path) as tier:
        for number in range(4):
            await tier.put(name(number), memoryview(b"x"))
        (tmp_path / name(1)).unlink()
        (tmp_path / name(1)).mkdir()
        with pytest.raises(TierUnavailable, match="could not delete all 4 blobs"):
            await tier.delete([name(number) for number in range(4)])
        assert await listed(tier) == []


@aio
async def test_closing_waits_for_what_runs_and_refuses_what_comes_later(tmp_path: Path) -> None:
    async with nvme(tmp_path) as tier:
        puts = [asyncio.create_task(tier.put(name(number), memoryview(content(MIB)))) for number in range(4)]
        await asyncio.sleep(0)
        await tier.aclose()
        assert all(put.done() for put in puts)
        await asyncio.gather(*puts)
        with pytest.raises(TierUnavailable, match="the tier is closed"):
            await tier.stat([])


@aio
async def test_a_disk_that_turns_read_only_is_an_outage(
    tmp_path: Path, failing: Callable[[str, int, int], list[int]]
) -> None:
    async with nvme(tmp_path) as tier:
        await tier.put(name(1), memoryview(content(1000)))
        failing("open", errno.EROFS, 0)
        with pytest.raises(TierUnavailable, match="Read-only file system"):
            await tier.put(name(2), memoryview(b"x"))
        failing("unlink", errno.EROFS, 0)
        with pytest.raises(TierUnavailable, match="Read-only file system"):
            await tier.delete([name(1)])
        assert await read(tier, name(1), 1000) == content(1000)
        assert tier.statistics.used_bytes == 1000


@needs_root
@aio
async def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(TierMisconfigured, match=rf"{tmp_path} belongs to uid 12345, not to uid 0 .* `chown 0 "):
        async with nvme(tmp_path):
            pytest.fail("opened")


@aio
async def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(TierMisconfigured, match=rf"others than uid .* \(mode 777\); run `chmod 700 {tmp_path}`"):
        async with nvme(tmp_path):
            pytest.fail("opened")


@aio
async def test_a_root_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierMisconfigured, match=r"file cannot be used by uid \d+: File exists; give a folder"):
        async with nvme(tmp_path / "file"):
            pytest.fail("opened")


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(TierMisconfigured, match="not an absolute path"):
        NvmeOptions(Path("relative"), 1)
    with pytest.raises(TierMisconfigured, match="capacity is 0 bytes"):
        NvmeOptions(Path("/x"), 0)
    with pytest.raises(TierMisconfigured, match="-1 bytes; give 0"):
        NvmeOptions(Path("/x"), 1, -1)
    assert NvmeOptions(Path("/x"), 1).free_bytes(1000) == 50
    assert NvmeOptions(Path("/x"), 1).free_bytes(1 << 50) == 10 * 1024**3
