"""Bytes past the page cache: whole blocks out of the caller's memory, the rest through one page, nothing of what is
behind.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.arena import Arena
from storage.nvme.blocks import BLOCK, Pages, read_whole, write_whole
from tests.storage.test_nvme import nvme
from tests.support.aio import aio
from tests.support.tier_conformance import MIB, content, name, read

LENGTHS = (1, 4095, 4096, 4097, 64 * 1024 + 308, MIB - 1)


def aligned(data: bytes, behind: bytes = b"") -> memoryview:
    """A view of memory that direct transfers take, with `behind` right after it."""
    memory = mmap.mmap(-1, len(data) + len(behind) + 1)
    memory[: len(data) + len(behind)] = data + behind
    return memoryview(memory)[: len(data)]


def is_cached(file: Path, at: int) -> bool:
    """Whether the page cache has the byte at `at`. To be asked once of a file: asking makes the kernel read ahead."""
    fd = os.open(file, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


@pytest.fixture
def past_the_cache(tmp_path: Path) -> Path:
    """A folder whose file system really has direct transfers."""
    file = tmp_path / "probe"
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.write(fd, aligned(bytes(BLOCK)))
        finally:
            os.close(fd)
        if is_cached(file, 0):
            pytest.skip("files here are in memory anyway")
    except OSError as error:
        pytest.skip(f"no direct transfers here: {error}")
    return tmp_path / "nvme"


@pytest.mark.parametrize("length", [4096, 64 * 1024 + 308, MIB + 324])
@aio
async def test_a_blob_goes_to_the_disk_and_comes_back_without_the_page_cache(past_the_cache: Path, length: int) -> None:
    data = content(length)
    async with nvme(past_the_cache) as tier:
        await tier.put(name(1), aligned(data))
        assert not is_cached(past_the_cache / name(1), 0)
        await tier.put(name(2), aligned(data))
        target = aligned(bytes(length))
        await tier.get_into(name(2), target)
        assert target == data
        assert not is_cached(past_the_cache / name(2), 0)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("shift_put", "shift_get"), [(0, 0), (0, 1), (1, 0), (512, 8)])
@aio
async def test_memory_of_any_alignment_is_written_and_read(
    tmp_path: Path, length: int, shift_put: int, shift_get: int
) -> None:
    data = content(length)
    async with nvme(tmp_path) as tier:
        await tier.put(name(1), aligned(bytes(shift_put) + data)[shift_put:])
        assert (tmp_path / name(1)).read_bytes() == data
        target = aligned(bytes(shift_get + length))[shift_get:]
        await tier.get_into(name(1), target)
        assert target == data


@pytest.mark.parametrize("length", LENGTHS)
@aio
async def test_law_6_nothing_behind_the_memory_is_written_or_changed(tmp_path: Path, length: int) -> None:
    data = content(length)
    async with nvme(tmp_path) as tier:
        await tier.put(name(1), aligned(data, behind=b"a secret of another tenant" * 200))
        assert (tmp_path / name(1)).read_bytes() == data
        memory = mmap.mmap(-1, length + 2 * BLOCK)
        memory[:] = b"\xaa" * len(memory)
        with memoryview(memory)[:length] as target:
            await tier.get_into(name(1), target)
        assert memory[:length] == data
        assert memory[length:] == b"\xaa" * (2 * BLOCK)


@pytest.mark.parametrize("refused_from", [0, 8192])
@aio
async def test_what_the_kernel_does_not_take_directly_goes_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_from: int
) -> None:
    """`EINVAL` at the first direct call, or after some blocks went."""
    write, preadv = os.write, os.preadv
    flags: list[int] = []

    def picky_write(fd: int, data: Any) -> int:
        flags.append(_flags(fd) & os.O_DIRECT)
        if not flags[-1]:
            return write(fd, data)
        if len(flags) == 1 and refused_from:
            return write(fd, memoryview(data)[:refused_from])
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def picky_preadv(fd: int, buffers: Any, at: int) -> int:
        if _flags(fd) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return preadv(fd, buffers, at)

    data = content(100_000)
    async with nvme(tmp_path) as tier:
        monkeypatch.setattr(os, "write", picky_write)
        monkeypatch.setattr(os, "preadv", picky_preadv)
        await tier.put(name(1), aligned(data))
        assert await read(tier, name(1), len(data)) == data
    assert not flags[-1]


def _flags(fd: int) -> int:
    [line] = [one for one in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines() if one.startswith("flags")]
    return int(line.split()[1], 8)


@aio
async def test_a_file_system_without_direct_transfers_is_used_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, refused = os.open, []

    def without(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        fd = opened(path, flags & ~os.O_DIRECT, mode, dir_fd=dir_fd)
        if flags & os.O_DIRECT:  # as Linux does it: the file is there, and the call fails
            refused.append(path)
            os.close(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return fd

    monkeypatch.setattr(os, "open", without)
    data = content(100_000)
    async with nvme(tmp_path) as tier:
        assert not list((tmp_path / "tmp").iterdir())
        await tier.put(name(1), aligned(data))
        assert await read(tier, name(1), len(data)) == data
    assert refused == ["probe"]


@pytest.mark.parametrize("shrunk", [0, 1, 4096, 9000, 99_999])
def test_a_file_that_ends_early_says_how_far_it_went(tmp_path: Path, shrunk: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(content(100_000)[:shrunk])
    fd = os.open(file, os.O_RDONLY)
    try:
        assert read_whole(fd, aligned(bytes(100_000)), Pages()) == shrunk
    finally:
        os.close(fd)


def test_a_file_that_grew_gives_no_more_than_was_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(content(5000) + b"more")
    fd = os.open(file, os.O_RDONLY)
    target = aligned(bytes(5000))
    try:
        assert read_whole(fd, target, Pages()) == 5000
    finally:
        os.close(fd)
    assert target == content(5000)


@pytest.mark.parametrize("length", LENGTHS)
def test_slots_of_staging_are_memory_that_direct_transfers_take(length: int) -> None:
    arena = Arena(64 * MIB)
    windows, residents = arena.split(32 * MIB)
    for zone in (windows, residents):
        for slot in (zone.allocate(length), zone.allocate(length)):
            assert slot is not None
            assert slot.address % BLOCK == 0


def test_an_error_that_is_not_about_memory_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(error: int) -> Callable[..., int]:
        def fail(*_: object) -> int:
            raise OSError(error, os.strerror(error))

        return fail

    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        monkeypatch.setattr(os, "write", failing(errno.EIO))
        with pytest.raises(OSError, match="Input/output error"):
            write_whole(fd, aligned(content(5000)), direct=True)
        monkeypatch.setattr(os, "preadv", failing(errno.EIO))
        with pytest.raises(OSError, match="Input/output error"):
            read_whole(fd, aligned(bytes(5000)), Pages())
    finally:
        os.close(fd)
