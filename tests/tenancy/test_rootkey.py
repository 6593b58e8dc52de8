"""The root key's file: made once, private, recognised by its id, and never silently replaced."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from pathlib import Path
from uuid import UUID

import pytest

from tenancy.errors import KeyDamaged, KeyExposed, KeyMismatch, KeyUnavailable, TenancyError
from tenancy.keys.rootkey import FileRootKey, RootKey
from tenancy.keys.secret import SecretBytes
from tenancy.keys.wrapping import KeyContext
from tests.support.aio import run
from tests.support.crashing import crash_points
from tests.tenancy.samples import InlineWorkers

CONTEXT = KeyContext(UUID(int=1), UUID(int=2), "namespace", 1)
KEY = SecretBytes(b"\x5a" * 32)
WORKERS = InlineWorkers()


def open_root(keys: Path) -> FileRootKey:
    return run(FileRootKey.open(keys, WORKERS, os.urandom))


def create_root(keys: Path) -> FileRootKey:
    return run(FileRootKey.open_or_create(keys, WORKERS, os.urandom))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    create_root(tmp_path / "keys")
    return tmp_path / "keys"


def test_a_fresh_start_makes_a_private_key_once(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    first: RootKey = create_root(keys)
    data = (keys / "root.key").read_bytes()
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    assert stat.S_IMODE((keys / "root.key").stat().st_mode) == 0o600
    assert os.listdir(keys) == ["root.key"]
    assert len(data) == 56
    assert data[:8] == b"KVRK\x01\0\0\0"
    assert data[8:24].hex() == first.key_id
    assert create_root(keys).key_id == open_root(keys).key_id == first.key_id
    assert (keys / "root.key").read_bytes() == data


def test_keys_come_back_after_a_restart(keys: Path) -> None:
    record = run(open_root(keys).wrap(KEY, CONTEXT))
    assert run(open_root(keys).unwrap(record, CONTEXT)) == KEY


def test_racing_starts_make_one_key(tmp_path: Path) -> None:
    seen: list[str] = []
    threads = [threading.Thread(target=lambda: seen.append(create_root(tmp_path / "keys").key_id)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len(set(seen)) == 1


def test_a_missing_root_key_is_not_replaced_when_namespaces_depend_on_it(keys: Path) -> None:
    (keys / "root.key").unlink()
    (keys / "namespaces").mkdir(mode=0o700)
    (keys / "namespaces" / f"{UUID(int=2)}.key").touch()
    with pytest.raises(KeyUnavailable, match=r"root.key is missing, but .*namespaces holds keys .* restore it"):
        create_root(keys)
    assert not (keys / "root.key").exists()


def test_open_does_not_make_a_key(tmp_path: Path) -> None:
    with pytest.raises(KeyUnavailable, match=r"cannot open .*keys: No such file"):
        open_root(tmp_path / "keys")
    (tmp_path / "keys").mkdir(mode=0o700)
    with pytest.raises(KeyUnavailable, match=r"there is no root key .*root\.key; restore it"):
        open_root(tmp_path / "keys")
    assert os.listdir(tmp_path / "keys") == []


@pytest.mark.parametrize(
    ("name", "mode", "wanted"), [(".", 0o750, "0700"), (".", 0o701, "0700"), ("root.key", 0o640, "0600")]
)
def test_a_key_that_others_can_reach_is_refused(keys: Path, name: str, mode: int, wanted: str) -> None:
    (keys / name).chmod(mode)
    with pytest.raises(KeyExposed, match=f"has permissions {mode:04o}.*chmod {wanted} "):
        open_root(keys)
    with pytest.raises(KeyExposed):
        create_root(keys)


def test_a_key_of_another_user_is_refused(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(KeyExposed, match=r"belongs to user \d+, but this process runs as user 4711; .*chown 4711"):
        open_root(keys)


def test_a_link_or_folder_in_place_of_the_key_is_refused(keys: Path) -> None:
    path = keys / "root.key"
    path.rename(keys / "elsewhere")
    path.symlink_to(keys / "elsewhere")
    with pytest.raises(KeyUnavailable, match=r"cannot read .*root\.key"):
        open_root(keys)
    path.unlink()
    path.mkdir(mode=0o700)
    with pytest.raises(KeyDamaged, match="not a plain file"):
        open_root(keys)
    path.rmdir()
    os.mkfifo(path, 0o600)
    with pytest.raises(KeyDamaged, match="not a plain file"):
        open_root(keys)


@pytest.mark.parametrize("length", [0, 1, 55, 57, 1_000_000])
def test_a_key_file_of_another_length_is_refused(keys: Path, length: int) -> None:
    path = keys / "root.key"
    path.write_bytes((path.read_bytes() * 20_000)[:length])
    with pytest.raises(KeyDamaged, match=r"has (0|1|55|more than 56) bytes.*restore it from its backup"):
        open_root(keys)


def test_c03_every_single_bit_flip_of_the_key_file_is_refused(keys: Path) -> None:
    path = keys / "root.key"
    good = path.read_bytes()
    for position in range(len(good)):
        for bit in range(8):
            flipped = bytearray(good)
            flipped[position] ^= 1 << bit
            path.write_bytes(flipped)
            with pytest.raises(KeyDamaged, match="restore it from its backup"):
                open_root(keys)


def test_a_wrong_key_file_is_recognised_and_named(keys: Path, tmp_path: Path) -> None:
    root = open_root(keys)
    record = run(root.wrap(KEY, CONTEXT))
    other = create_root(tmp_path / "other")
    with pytest.raises(KeyMismatch, match=f"wrapped by key '{root.key_id}' .*, not by key '{other.key_id}'"):
        run(other.unwrap(record, CONTEXT))
    run(root.check())
    shutil.copy(tmp_path / "other" / "root.key", keys / "root.key")
    with pytest.raises(
        KeyMismatch, match=f"holds root key {other.key_id}, but the running process uses .*{root.key_id}"
    ):
        run(root.check())
    (keys / "root.key").unlink()
    with pytest.raises(KeyUnavailable):
        run(root.check())
    assert run(root.unwrap(record, CONTEXT)) == KEY, "the key in memory still works"


def test_a_crash_at_any_point_of_the_first_start_is_repaired_by_the_next(tmp_path: Path) -> None:
    keys = tmp_path / "keys"

    def prepare() -> None:
        shutil.rmtree(keys, ignore_errors=True)

    def check(number: int) -> None:
        published = (keys / "root.key").read_bytes() if (keys / "root.key").exists() else None
        root = create_root(keys)
        assert published in (None, (keys / "root.key").read_bytes()), f"crash {number} lost a published key"
        assert run(root.unwrap(run(open_root(keys).wrap(KEY, CONTEXT)), CONTEXT)) == KEY

    assert crash_points(prepare, lambda: create_root(keys), check) >= 8


def test_an_error_of_the_disk_is_told_apart_from_a_missing_key(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "open", broken)
    with pytest.raises(KeyUnavailable, match=r"cannot open .*: Input/output error; check"):
        open_root(keys)


def test_c19_no_key_byte_in_a_repr_or_an_error(keys: Path) -> None:
    key = (keys / "root.key").read_bytes()[24:]
    texts = [repr(open_root(keys)), str(vars(open_root(keys)))]
    (keys / "root.key").write_bytes((keys / "root.key").read_bytes()[:8] + bytes(16) + key)
    with pytest.raises(TenancyError) as refused:
        open_root(keys)
    texts.append(repr(refused.value))
    for at in range(len(key) - 3):
        window = key[at : at + 4]
        assert not any(window.hex() in text or repr(window)[2:-1] in text for text in texts)
