"""The data folder: one owner at a time, private, and refusals that say who, where, and what to do."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvgw.datadir import DataFolder, FolderLocked, check_folder, holder
from kvgw.endpoint import UNIX_PATH_BYTES_MAX, UnixEndpoint, parse_endpoint
from kvgw.errors import Code, RequestRefused
from kvgw.metrics import Metrics
from kvgw.runtime import SystemRng
from kvgw.server.listeners import listening
from kvgw.settings import SettingsError
from tests.support.aio import aio

HOLDING = """
import sys, fcntl, os
lock = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
os.ftruncate(lock, 0)
os.pwrite(lock, b"process 4711 of another house\\n", 0)
print("held", flush=True)
sys.stdin.read()
"""


def another_process_holds(folder: Path) -> subprocess.Popen[str]:
    holding = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(folder / "kvgw.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holding.stdout is not None
    assert holding.stdout.readline() == "held\n"
    return holding


def let_go(holding: subprocess.Popen[str]) -> None:
    holding.communicate()


def test_a_folder_is_made_private_and_given_back(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    assert holder(path) is None
    folder = DataFolder.open(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / "kvgw.lock").stat().st_mode) == 0o600
    assert holder(path) == f"process {os.getpid()}"
    name = folder.node_name("", SystemRng())
    folder.close()
    assert holder(path) is None
    again = DataFolder.open(path)
    assert again.node_name("", SystemRng()) == name, "a node keeps its name"
    assert again.node_name("given", SystemRng()) == "given"
    again.close()


def test_a_second_gateway_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    DataFolder.open(tmp_path / "gw").close()
    holding = another_process_holds(tmp_path / "gw")
    for _ in range(3):
        with pytest.raises(FolderLocked, match=r"process 4711 of another house.*Recreate") as refusal:
            DataFolder.open(tmp_path / "gw")
        assert refusal.value.code is Code.BUSY
        assert str(tmp_path / "gw") in str(refusal.value)
    assert holder(tmp_path / "gw") == "process 4711 of another house", "the holder is not disturbed"
    let_go(holding)
    DataFolder.open(tmp_path / "gw").close()


@aio
async def test_R81_the_next_gateway_waits_and_takes_over(tmp_path: Path) -> None:
    DataFolder.open(tmp_path / "gw").close()
    holding = another_process_holds(tmp_path / "gw")
    waiting = asyncio.create_task(DataFolder.open_within(tmp_path / "gw", 30.0))
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done, "it waits, and the event loop turns meanwhile"
    await asyncio.to_thread(let_go, holding)
    async with asyncio.timeout(5):
        folder = await waiting
    assert holder(tmp_path / "gw") == f"process {os.getpid()}"
    folder.close()


@aio
async def test_R81_waiting_ends_and_names_the_holder(tmp_path: Path) -> None:
    DataFolder.open(tmp_path / "gw").close()
    holding = another_process_holds(tmp_path / "gw")
    with pytest.raises(FolderLocked, match="4711"):
        await DataFolder.open_within(tmp_path / "gw", 0.2)
    cancelled = asyncio.create_task(DataFolder.open_within(tmp_path / "gw", 30.0))
    await asyncio.wait([cancelled], timeout=0.05)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await asyncio.to_thread(let_go, holding)
    assert holder(tmp_path / "gw") is None, "who gave up waiting holds nothing"


def test_R71_another_owner_or_an_open_mode_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gw"
    DataFolder.open(path).close()
    path.chmod(0o750)
    with pytest.raises(SettingsError, match=r"mode 0750.*chmod 700"):
        DataFolder.open(path)
    path.chmod(0o700)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(SettingsError, match=rf"{path} belongs to uid {uid}, .* uid {uid + 1}; .*chown"):
        check_folder(path)


def test_R71_a_folder_that_cannot_be_made_names_the_path_and_the_user(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SettingsError, match=rf"{tmp_path}/file/gw cannot be made by uid {os.geteuid()}: .*--data"):
        DataFolder.open(tmp_path / "file" / "gw")
    with pytest.raises(SettingsError, match="not an absolute path"):
        DataFolder.open(Path("relative"))
    (tmp_path / "gw").mkdir(mode=0o700)
    (tmp_path / "gw" / "kvgw.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match=r"kvgw\.lock cannot be written"):
        DataFolder.open(tmp_path / "gw")
    assert not (tmp_path / "elsewhere").exists(), "a planted link is not followed"


async def nobody(_: socket.socket) -> None:
    return


async def listen_on(path: Path) -> None:
    async with listening(UnixEndpoint(str(path)), nobody, 4, Metrics()):
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600, "only this user connects"


@aio
async def test_R41_the_longest_socket_path_works_and_a_longer_one_is_refused(tmp_path: Path) -> None:
    room = UNIX_PATH_BYTES_MAX - len(str(tmp_path)) - 1
    assert room > 20
    await listen_on(tmp_path / ("s" * room))
    for path in (tmp_path / ("s" * (room + 1)), tmp_path / ("s" * 130), tmp_path / ("é" * (room // 2 + 1))):
        length = len(str(path).encode())
        with pytest.raises(RequestRefused, match=rf"has {length} bytes; the kernel takes at most 107.*server\.socket"):
            await listen_on(path)
        with pytest.raises(RequestRefused, match=str(length)):
            parse_endpoint(f"unix:{path}")


@aio
async def test_R41_a_stale_socket_makes_way(tmp_path: Path) -> None:
    path = tmp_path / "kvgw.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    assert path.is_socket()
    await listen_on(path)
    assert not path.exists(), "a gateway takes its own socket away"


@aio
async def test_R41_nothing_else_is_ever_unlinked(tmp_path: Path) -> None:
    path, target = tmp_path / "kvgw.sock", tmp_path / "target"
    target.write_text("precious")
    for make in (lambda: path.write_text("precious"), path.mkdir, lambda: path.symlink_to(target)):
        make()
        with pytest.raises(SettingsError, match="is not a socket; remove it"):
            await listen_on(path)
        assert path.is_symlink() or path.exists()
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    assert target.read_text() == "precious"
    async with listening(UnixEndpoint(str(path)), nobody, 4, Metrics()):
        with pytest.raises(SettingsError, match="another process listens"):
            await listen_on(path)
        assert path.is_socket()
    with pytest.raises(SettingsError, match="cannot listen on unix:"):
        await listen_on(tmp_path / "none" / "kvgw.sock")


@pytest.mark.parametrize(
    "text", ["", "unix:", "unix", "/run/kvgw.sock", "tcp:", "tcp:host", "tcp::1", "tcp:host:", "tcp:host:65536",
             "tcp:host:-1", "tcp:host:٣", "http://host:1", "unix:/a\0b"],
)  # fmt: skip
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(RequestRefused, match=r"not an endpoint|socket path"):
        parse_endpoint(text)


@pytest.mark.parametrize("text", ["unix:/run/kvgw.sock", "tcp:host:1", "tcp:[::1]:8470", "tcp:127.0.0.1:0"])
def test_an_endpoint_reads_as_it_is_written(text: str) -> None:
    assert str(parse_endpoint(text)) == text
