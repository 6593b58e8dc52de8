"""What the host allows is what the pools are made for (R77), and what its file system cannot do is said (R29)."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvgw import runtime
from kvgw.examine import Verdict, examine
from kvgw.model import Durability
from kvgw.wiring.abilities import DIRECT, NAMELESS, RESERVED, missing_abilities
from storage.tier import blob_name
from tests.support.aio import aio
from tests.support.gateways import SMALL, format_of, house, keys_of, payloads_of, read

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("affinity", "quota", "usable"),
    [
        (64, "50000 100000\n", 1),
        (64, "250000 100000\n", 3),
        (64, "max 100000\n", 64),
        (2, "800000 100000\n", 2),
        (1, "max 100000\n", 1),
        (4, "", 4),
        (4, "nonsense\n", 4),
    ],
)
def test_R77_the_tighter_of_affinity_and_quota_counts(
    affinity: int, quota: str, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: str, *_: Any, **__: Any) -> io.StringIO:
        assert path == "/sys/fs/cgroup/cpu.max"
        if not quota:
            raise FileNotFoundError(path)
        return io.StringIO(quota)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr("builtins.open", opened)
    assert runtime.usable_cpus() == usable


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to CPUs")
def test_R77_a_process_bound_to_one_cpu_makes_pools_for_one() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); os.cpu_count = lambda: 64\n"
        "from kvgw.runtime import ThreadWorkers, usable_cpus\n"
        "workers = ThreadWorkers(); print(usable_cpus(), workers.count); workers.close()"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1", "2"], "two threads are the least: one may wait for a disk"


OPENED = os.open


@pytest.mark.parametrize(
    ("refused", "error", "missing"),
    [
        (0, errno.EINVAL, []),
        (os.O_TMPFILE, errno.EOPNOTSUPP, [NAMELESS]),
        (os.O_DIRECT, errno.EINVAL, [DIRECT]),
        (os.O_DIRECT, errno.ENOSPC, []),
    ],
)
@aio
async def test_R29_what_a_file_system_cannot_do_is_said_once_and_by_the_doctor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refused: int,
    error: int,
    missing: list[str],
) -> None:
    def picky(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if refused and flags & refused == refused:
            raise OSError(error, os.strerror(error))
        return OPENED(path, flags, *rest, **more)

    if missing_abilities(tmp_path):
        pytest.skip("the file system of the tests cannot do all of it")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", picky)
        assert missing_abilities(tmp_path) == missing
    if error == errno.ENOSPC:
        return  # a disk that is full is another case
    monkeypatch.setattr(os, "open", picky)
    async with house("embedded", tmp_path / "gw") as gateway:
        client = gateway.client()
        part = await client.register(format_of())
        payloads = payloads_of(part, 2)
        assert (await client.put(part, keys_of(2), payloads, durability=Durability.NVME)).stored == 2
        for (blob_id,) in await gateway.rows("SELECT blob_id FROM chunk"):
            gateway.opened.rooms.staging.drop(blob_name((await gateway.place()).scope.namespace, bytes(blob_id)))
        assert (await read(client, part, keys_of(2)))[1] == payloads, "the same bytes and the same promise"
    told = [record.getMessage() for record in caplog.records if "file system" in record.getMessage()]
    assert len(told) == (1 if missing else 0), told
    (found,) = [one for one in await examine(SMALL, tmp_path / "gw") if one.subject == "disk"]
    assert all(ability in found.what and ability in told[0] for ability in missing)
    assert (found.verdict is Verdict.NOTE) == bool(missing) or "has room for" in found.what


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.ENOSPC])
def test_R29_space_that_cannot_be_reserved_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert missing_abilities(tmp_path) == ([RESERVED] if error == errno.EOPNOTSUPP else [])
    with pytest.raises(FileNotFoundError):
        missing_abilities(tmp_path / "none")


READING = """
import asyncio, json, os, sys, time
from pathlib import Path
from msgspec.structs import replace
from kvgw.settings import NvmeSettings, StagingSettings
from tests.support.gateways import MIB, SMALL, buffers_for, format_of, house, keys_of, payloads_of

ENTRIES, CHUNK, BATCH, SECONDS = 4000, 64 * 1024, 32, 6.0

async def main():
    affinity = os.sched_getaffinity(0)
    os.cpu_count = lambda: 64
    settings = replace(SMALL, staging=StagingSettings(bytes=64 * MIB, tenants=1),
                       nvme=NvmeSettings(capacity_bytes=1024 * MIB, min_free_bytes=0))
    async with house("embedded", Path(sys.argv[1]), settings=settings) as gateway:
        client = gateway.client()
        part = await client.register(format_of(CHUNK))
        for start in range(0, ENTRIES, 100):
            keys, payloads = keys_of(100, str(start)), payloads_of(part, 100, seed=start)
            assert (await client.put(part, keys, payloads)).stored == 100
        lags, done = [], asyncio.Event()

        async def watch():
            while not done.is_set():
                began = time.perf_counter()
                await asyncio.sleep(0.001)
                lags.append(time.perf_counter() - began - 0.001)

        async def read(at):
            buffers, count, turn = buffers_for(part, BATCH), 0, at
            while time.perf_counter() < until:
                keys = keys_of(100, str(100 * (turn % (ENTRIES // 100))))[:BATCH]
                assert (await client.match(part, keys)).count == BATCH
                assert (await client.get(part, keys, buffers)).leading == BATCH
                count, turn = count + BATCH, turn + 7
            return count

        until = time.perf_counter() + SECONDS
        watching = asyncio.create_task(watch())
        read_ = sum(await asyncio.gather(*(read(at) for at in range(4))))
        done.set()
        await watching
        p99 = sorted(lags)[int(len(lags) * 0.99)]
        print(json.dumps({"rate": read_ * CHUNK / SECONDS / 1e6, "lag": p99, "cpus": len(affinity)}))

asyncio.run(main())
"""


@contextlib.contextmanager
def half_a_cpu() -> Iterator[Path]:
    """The file to join a control group of half a CPU; skips the test where none can be made."""
    made = None
    for root, limits in (
        ("/sys/fs/cgroup", {"cpu.max": "50000 100000"}),
        ("/sys/fs/cgroup/cpu", {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}),
    ):
        group = Path(root) / f"kvgw-test-{os.getpid()}"
        try:
            if not (Path(root) / "cgroup.procs").exists():
                continue  # the place where hierarchies are mounted, and none of them
            group.mkdir()
            made = group
            for name, value in limits.items():
                (group / name).write_text(value)
            break
        except OSError:
            if made:
                made.rmdir()
                made = None
    if made is None:
        pytest.skip("no control group for CPU time can be made here")
    try:
        yield made / "cgroup.procs"
    finally:
        made.rmdir()


def reading(cpus: int | None = None, group: Path | None = None) -> dict[str, float]:
    """MB/s of match and GET of chunks on a disk in memory, and the event loop's lag, in a process so limited."""
    folder = Path(tempfile.mkdtemp(prefix="kvgw-r77-", dir="/dev/shm"))
    limit = f"import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{cpus}])\n" if cpus else ""
    join = f"open({str(group)!r}, 'w').write('0')\n" if group else ""
    try:
        command = [sys.executable, "-c", limit + join + READING, str(folder / "gw")]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    finally:
        shutil.rmtree(folder)
    return dict(json.loads(run.stdout))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a disk in memory")
def test_R77_under_a_limit_of_cpu_the_throughput_is_at_least_half_of_proportional() -> None:
    with half_a_cpu() as group:
        free, one, half = reading(), reading(cpus=1), reading(group=group)
    for name, found in (("free", free), ("one CPU", one), ("half a CPU", half)):
        print(f"R77: {name}: {found['rate']:.0f} MB/s, p99 of the loop's lag {found['lag'] * 1e3:.1f} ms")
    share = free["rate"] / free["cpus"]
    assert one["rate"] >= 0.5 * share
    assert half["rate"] >= 0.5 * share / 2
    assert one["lag"] < 0.050
    assert half["lag"] < 0.100, "half of each 100 ms the quota itself stops the process"
