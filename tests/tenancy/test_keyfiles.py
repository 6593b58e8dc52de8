"""Secret files are synced in the order that survives a power loss, and a file that exists is never created over."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tenancy.errors import KeyUnavailable
from tenancy.keys import keyfiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keyfiles.make_folder(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that matter for durability, with the names of their files, in order."""
    seen: list[str] = []

    def recorded(name: str, describe: Callable[..., str]) -> None:
        real = getattr(os, name)

        def call(*arguments: object, **options: object) -> object:
            result = real(*arguments, **options)
            seen.append(f"{name} {describe(*arguments)}")
            return result

        monkeypatch.setattr(os, name, call)

    def opened(descriptor: int, *rest: object) -> str:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    for name in ("fsync", "pwrite"):
        recorded(name, opened)
    for name in ("link", "replace", "unlink"):
        recorded(name, lambda *paths, **options: " ".join(Path(path).name for path in paths))
    return seen


def test_create_syncs_the_bytes_before_the_name_and_the_name_before_it_returns(folder: Path, steps: list[str]) -> None:
    keyfiles.create(folder / "a", b"new")
    assert steps == ["fsync a.new", "link a.new a", "unlink a.new", "fsync keys"]
    assert keyfiles.read(folder / "a", 3) == b"new"


def test_replace_overwrites_the_old_bytes_only_when_the_new_ones_are_durable(folder: Path, steps: list[str]) -> None:
    keyfiles.create(folder / "a", b"old")
    steps.clear()
    keyfiles.replace(folder / "a", b"new")
    assert steps == ["fsync a.new", "replace a.new a", "fsync keys", "pwrite a (deleted)", "fsync a (deleted)"]
    assert keyfiles.read(folder / "a", 3) == b"new"


def test_erase_overwrites_before_it_removes(folder: Path, steps: list[str]) -> None:
    keyfiles.create(folder / "a", b"old")
    steps.clear()
    keyfiles.erase(folder / "a")
    assert steps == ["pwrite a", "fsync a", "unlink a", "fsync keys"]
    assert keyfiles.names(folder) == []
    keyfiles.erase(folder / "a")
    assert steps[4:] == ["fsync keys"], "a repetition still makes the removal durable"


def test_a_new_folder_is_synced_into_its_parent(tmp_path: Path, steps: list[str]) -> None:
    keyfiles.make_folder(tmp_path / "keys")
    keyfiles.make_folder(tmp_path / "keys")
    assert steps == [f"fsync {tmp_path.name}"]


def test_create_never_replaces(folder: Path) -> None:
    keyfiles.create(folder / "a", b"first")
    with pytest.raises(KeyUnavailable, match=r"cannot create .*/a: File exists"):
        keyfiles.create(folder / "a", b"second")
    assert keyfiles.read(folder / "a", 6) == b"first"


def test_replace_needs_a_file(folder: Path) -> None:
    with pytest.raises(KeyUnavailable, match=r"cannot replace .*/a: No such file"):
        keyfiles.replace(folder / "a", b"new")
    assert not keyfiles.exists(folder / "a")


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keyfiles.make_folder(tmp_path / "keys")
        keyfiles.create(tmp_path / "keys" / "a", b"new")
    finally:
        os.umask(before)
    with keyfiles.exclusive(tmp_path / "keys"):
        assert keyfiles.read(tmp_path / "keys" / "a", 3) == b"new"


def test_no_descriptor_is_left_open(folder: Path) -> None:
    def open_now() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_now()
    (folder / "b").mkdir()
    for _ in range(5):
        keyfiles.create(folder / "a", b"new")
        keyfiles.replace(folder / "a", b"newer")
        keyfiles.read(folder / "a", 9)
        with keyfiles.exclusive(folder):
            keyfiles.erase(folder / "a")
        with pytest.raises(Exception, match="not a plain file"):
            keyfiles.read(folder / "b", 9)
    assert open_now() == before
