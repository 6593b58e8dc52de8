"""Containers: a tiny /dev/shm (R35), another user and a read-only root (R71), nobody looked up (R61), a fork (R67)."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.served import ROOT, SMALL_TOML, command, environment

UID = 12345
NEEDS = "needs root, unshare, setpriv and mounts of its own"


def in_own_mounts(script: str, *arguments: str, timeout: float = 90.0) -> subprocess.CompletedProcess[str]:
    """Run a shell script whose mounts nobody else sees; skips the test where that cannot be."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv", "mount"))):
        pytest.skip(NEEDS)
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode != 0:
        pytest.skip(NEEDS)
    whole = f"set -e\nmount --make-rprivate /\n{_reachable_python()}\n{script}"
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", whole, "sh", *arguments],
        cwd="/", env=environment(), capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def _reachable_python() -> str:
    """Mounts by which another user reaches an interpreter that lies in somebody's private folder."""
    base = Path(sys.base_prefix).resolve()
    private = [folder for folder in reversed(base.parents) if not folder.stat().st_mode & 0o001]
    if not private:
        return ""
    return (
        f"mount -t tmpfs none /mnt; mkdir /mnt/python; mount --bind {base} /mnt/python\n"
        f"mount -t tmpfs -o mode=755 none {private[0]}; mkdir -p {base}\n"
        f"mount --bind /mnt/python {base}; umount -l /mnt"
    )


WINDOWS = """
import asyncio, sys
from pathlib import Path
from msgspec.structs import replace
from kvgw.settings import StagingSettings
from tests.support.gateways import MIB, SMALL, format_of, house, keys_of, payloads_of, read

async def main():
    settings = replace(SMALL, staging=StagingSettings(bytes=256 * MIB, tenants=4))
    async with house("shm", Path(sys.argv[1]), settings=settings) as gateway:
        memory = gateway.opened.arena.memory
        while memory.prepare_next(64 * MIB):
            pass
        clients = [gateway.client() for _ in range(4)]
        part = await clients[0].register(format_of(2 * MIB))
        sent = [payloads_of(part, 12, seed=seed) for seed in range(4)]
        async def use(at):
            keys = keys_of(12, str(at))
            assert (await clients[at].put(part, keys, sent[at])).stored == 12
            assert (await read(clients[at], part, keys))[1] == sent[at]
        await asyncio.gather(*(use(at) for at in range(4)))
        assert gateway.opened.rooms.lending.lent_bytes >= 4 * 24 * MIB, "the windows are shared"
        print("prepared", memory.prepared_bytes // MIB, "lent", gateway.opened.rooms.lending.lent_bytes // MIB)

asyncio.run(main())
"""


@pytest.mark.timeout(180)
def test_R35_windows_and_arena_are_not_bound_by_a_tiny_dev_shm(tmp_path: Path) -> None:
    run = in_own_mounts(
        'mount -t tmpfs -o size=1m tmpfs /dev/shm\nexec "$@"', sys.executable, "-c", WINDOWS, str(tmp_path / "gw")
    )
    assert run.returncode == 0, f"no SIGBUS, no refusal: {run.returncode} {run.stderr[-3000:]}"
    assert "prepared 256" in run.stdout, run.stdout


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A folder that another user can reach; pytest's own cannot be entered by others."""
    folder = Path(tempfile.mkdtemp(prefix="kvgw-uid-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def as_nobody_known(folder: Path, *arguments: str) -> list[str]:
    """A command of kvgw as a user without a name or a home, in group 0, that may write to nothing but its folder."""
    who = ["setpriv", f"--reuid={UID}", "--regid=0", "--clear-groups", "--no-new-privs"]
    bare = ["env", "-i", f"PATH={os.environ['PATH']}", f"PYTHONPATH={ROOT}", "COLUMNS=200"]
    return [*who, *bare, *command(*arguments, "--data", str(folder))]


READ_ONLY_ROOT = """
folder=$1; shift
mount --bind "$folder" "$folder"
for other in /dev/shm /run /mnt; do mount -t tmpfs -o ro none "$other"; done
mount -o remount,bind,ro /
cd /
"$@" &
gateway=$!
tries=0
while [ ! -S "$folder/kvgw.sock" ] && [ $tries -lt 300 ] && kill -0 $gateway; do sleep 0.1; tries=$((tries + 1)); done
"""


@pytest.mark.timeout(180)
def test_R71_an_unknown_user_on_a_read_only_root_is_served(theirs: Path) -> None:
    """Everything else is mounted read-only: what it writes, it writes in its folder."""
    data = theirs / "gw"
    data.mkdir(mode=0o700)
    (data / "kvgw.toml").write_text(SMALL_TOML)
    for path in (data, data / "kvgw.toml"):
        os.chown(path, UID, 0)
    asks = "\n".join(
        f"{shlex.join(as_nobody_known(data, *words))}; echo code $?"
        for words in (("status",), ("doctor",), ("namespace", "create", "team-a"))
    )
    script = f"{READ_ONLY_ROOT}set +e\n{asks}\nkill $gateway; wait $gateway; echo ended $?\n"
    run = in_own_mounts(script, str(data), *as_nobody_known(data, "serve"))
    assert run.stdout.count("code 0") == 3, run.stdout + run.stderr
    assert "ended 0" in run.stdout, run.stdout + run.stderr
    assert "Traceback" not in run.stderr + run.stdout
    assert {path.stat().st_uid for path in data.rglob("*")} == {UID}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("wrong", ["owner", "read-only"])
def test_R71_a_folder_that_the_user_cannot_write_is_one_sentence_and_no_start(theirs: Path, wrong: str) -> None:
    data = theirs / "gw"
    data.mkdir(mode=0o700)
    if wrong == "read-only":
        os.chown(data, UID, 0)
    if wrong == "owner":
        data.chmod(0o755)
    flag = "ro" if wrong == "read-only" else "rw"
    mounts = f'mount --bind "$1" "$1"\nmount -o remount,bind,{flag} "$1"\nset +e\n'
    run = in_own_mounts(f"{mounts}{shlex.join(as_nobody_known(data, 'serve'))}\nexit $?", str(data))
    said = run.stderr.strip()
    assert run.returncode not in (0, 126, 127), run.stderr
    assert "Traceback" not in said
    assert str(data) in said.replace("\n", "")
    assert str(UID) in said, "which user it was"


ALONE = """
import asyncio, sys
from pathlib import Path
asked = []
def note(event, arguments):
    if event == "socket.getaddrinfo":
        asked.append(arguments[:2])
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        asked.append(arguments[1])
sys.addaudithook(note)
import kvgw.cli
from kvgw.examine import examine
from kvgw.settings import S3Settings
from msgspec.structs import replace
from tests.support.gateways import SMALL, format_of, house, keys_of, payloads_of

async def main():
    async with house("unix", Path(sys.argv[1])) as gateway:
        client = gateway.client()
        part = await client.register(format_of())
        assert (await client.put(part, keys_of(2), payloads_of(part, 2))).stored == 2
        await gateway.opened.crew.drain_everywhere()
    await examine(SMALL, Path(sys.argv[1]))
    assert asked == [], asked
    nowhere = replace(SMALL, s3=S3Settings(bucket="b", endpoint="http://127.0.0.1:9"))
    try:
        async with house("unix", Path(sys.argv[1]), settings=nowhere):
            pass
    except Exception as error:
        print("refused:", error)
    assert all(where[0] == "127.0.0.1" for where in asked), f"nobody else is asked: {asked}"

asyncio.run(main())
"""


def test_R61_without_s3_nobody_is_looked_up_and_with_it_nobody_but_s3(tmp_path: Path) -> None:
    clean = {name: value for name, value in environment().items() if not name.startswith("AWS_")}
    run = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "gw")],
        cwd=ROOT, env=clean | {"HOME": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert "credentials" in run.stdout, f"what is missing is said at the start: {run.stdout}"


FORKED = """
import asyncio, multiprocessing, os, sys, time, warnings
from pathlib import Path
import torch.utils.data
from kvgw.model import Outcome
from tests.support.gateways import format_of, house, keys_of, payloads_of, read

owner = 0

class Chunks(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, at):
        return ask(at)

def ask(at):
    started = time.monotonic()
    global runner, owner
    if owner != os.getpid():
        runner, owner = asyncio.Runner(), os.getpid()
    count = runner.run(found())
    assert time.monotonic() - started < 5
    return count, os.getpid()

async def found():
    match = await client.match(part, keys_of(2))
    if kind == "embedded":
        # After a few of them the breaker answers by itself.
        assert match.outcome is Outcome.OUTAGE and ("process" in match.reason or "tried again" in match.reason), match
        return 2
    assert (await read(client, part, keys_of(2)))[1] == payloads
    return match.count

def pooled():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(ask, range(8))

def loaded():
    return [(int(count), int(pid)) for count, pid in torch.utils.data.DataLoader(
        Chunks(), batch_size=None, num_workers=2, multiprocessing_context="fork")]

async def main():
    global client, part, payloads, kind
    kind = sys.argv[2]
    async with house(kind, Path(sys.argv[1])) as gateway:
        client = gateway.client()
        part = await client.register(format_of())
        payloads = payloads_of(part, 2)
        await client.put(part, keys_of(2), payloads)
        for way in (pooled, loaded):
            work = asyncio.create_task(asyncio.to_thread(way))
            while not work.done():
                assert (await read(client, part, keys_of(2)))[1] == payloads, "the parent works on meanwhile"
                await asyncio.sleep(0.01)
            answers = await work
            assert [count for count, _ in answers] == [2] * 8
            assert os.getpid() not in {pid for _, pid in answers}
            assert (await read(client, part, keys_of(2)))[1] == payloads
        await gateway.check_clean()

asyncio.run(main())
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["unix", pytest.param("embedded", marks=pytest.mark.slow)])
def test_R67_pools_and_data_loaders_fork_a_client_that_is_in_use(tmp_path: Path, kind: str) -> None:
    command_line = [sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path / "gw"), kind]
    run = subprocess.run(
        command_line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
