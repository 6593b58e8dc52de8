"""The store of namespace keys: whole or not at all, and destroyed is another answer than lost."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenancy.errors import KeyDamaged, KeyExposed, KeyGone, KeyUnavailable
from tenancy.keys import keystore
from tenancy.keys.keystore import VERSIONS_MAX, FileKeyStore, KeyStore
from tenancy.keys.wrapping import RECORD_BYTES_MAX
from tests.support.aio import run
from tests.support.crashing import crash_before_call, crash_points
from tests.tenancy.samples import InlineWorkers

NAMESPACE = UUID(int=2)
OTHER = UUID(int=3)
ONE = {1: b"first record"}
TWO = {1: b"first record again", 2: b"second record"}


def open_store(keys: Path) -> FileKeyStore:
    return run(FileKeyStore.open(keys, InlineWorkers()))


@pytest.fixture
def store(tmp_path: Path) -> FileKeyStore:
    return open_store(tmp_path)


def path_of(tmp_path: Path, namespace: UUID = NAMESPACE) -> Path:
    return tmp_path / "namespaces" / f"{namespace}.key"


def test_versions_come_back(store: KeyStore, tmp_path: Path) -> None:
    assert run(store.create(NAMESPACE, ONE)) == ONE
    assert run(open_store(tmp_path).read(NAMESPACE)) == ONE
    run(store.replace(NAMESPACE, TWO))
    assert run(open_store(tmp_path).read(NAMESPACE)) == TWO
    assert os.listdir(tmp_path / "namespaces") == [f"{NAMESPACE}.key"]
    assert stat.S_IMODE((tmp_path / "namespaces").stat().st_mode) == 0o700
    assert stat.S_IMODE(path_of(tmp_path).stat().st_mode) == 0o600


def test_the_file_is_the_documented_one_byte_for_byte(store: FileKeyStore, tmp_path: Path) -> None:
    run(store.create(NAMESPACE, {2: b"bb", 1: b"a"}))
    assert path_of(tmp_path).read_bytes() == b"KVNK\x01\0\0\x02" + b"\0\0\0\x01\0\x01a" + b"\0\0\0\x02\0\x02bb"


def test_the_first_key_stands(store: FileKeyStore) -> None:
    run(store.create(NAMESPACE, ONE))
    assert run(store.create(NAMESPACE, TWO)) == ONE
    assert run(store.read(NAMESPACE)) == ONE


def test_racing_creations_agree(store: FileKeyStore) -> None:
    seen: list[object] = []

    def create(number: int) -> None:
        seen.append(run(store.create(NAMESPACE, {1: b"record %d" % number})))

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert all(versions == seen[0] for versions in seen)


def test_a_destroyed_key_is_gone_for_good(store: FileKeyStore, tmp_path: Path) -> None:
    run(store.create(NAMESPACE, ONE))
    run(store.create(OTHER, ONE))
    run(store.destroy(NAMESPACE))
    run(store.destroy(NAMESPACE))
    assert not path_of(tmp_path).exists()
    for attempt in (
        lambda: run(store.read(NAMESPACE)),
        lambda: run(store.create(NAMESPACE, ONE)),
        lambda: run(store.replace(NAMESPACE, ONE)),
        lambda: run(open_store(tmp_path).read(NAMESPACE)),
    ):
        with pytest.raises(KeyGone, match=f"key of namespace {NAMESPACE} was destroyed"):
            attempt()
    assert not path_of(tmp_path).exists(), "a refused attempt left a key behind"
    assert run(store.read(OTHER)) == ONE


def test_a_lost_key_is_unavailable_and_not_gone(store: FileKeyStore, tmp_path: Path) -> None:
    run(store.create(NAMESPACE, ONE))
    path_of(tmp_path).unlink()
    for attempt in (lambda: run(store.read(NAMESPACE)), lambda: run(store.replace(NAMESPACE, TWO))):
        with pytest.raises(KeyUnavailable, match="no mark that it was destroyed; restore the keys folder"):
            attempt()


def test_destroying_overwrites_every_copy_before_it_removes_it(store: FileKeyStore, tmp_path: Path) -> None:
    run(store.create(NAMESPACE, ONE))
    path = path_of(tmp_path)
    draft = path.with_name(path.name + ".new")
    draft.write_bytes(b"left by a crash")
    handles = [path.open("rb"), draft.open("rb")]  # an open handle still reaches the bytes of a removed file
    run(store.destroy(NAMESPACE))
    for handle in handles:
        with handle:
            content = handle.read()
        assert content
        assert content == bytes(len(content))
    assert os.listdir(tmp_path / "namespaces") == [f"{NAMESPACE}.gone"]


def test_replacing_overwrites_the_old_bytes(store: FileKeyStore, tmp_path: Path) -> None:
    run(store.create(NAMESPACE, ONE))
    with path_of(tmp_path).open("rb") as old:
        run(store.replace(NAMESPACE, TWO))
        assert old.read() == bytes(8 + 6 + len(ONE[1]))


def clear(tmp_path: Path) -> None:
    for name in os.listdir(tmp_path / "namespaces"):
        (tmp_path / "namespaces" / name).unlink()


def test_a_crash_while_creating_leaves_a_whole_key_or_none(store: FileKeyStore, tmp_path: Path) -> None:
    def check(number: int) -> None:
        try:
            assert run(open_store(tmp_path).read(NAMESPACE)) == ONE
        except KeyUnavailable:
            assert not path_of(tmp_path).exists(), f"crash {number}"
        assert run(store.create(NAMESPACE, ONE)) == ONE
        assert os.listdir(tmp_path / "namespaces") in (
            [f"{NAMESPACE}.key"],
            [f"{NAMESPACE}.key", f"{NAMESPACE}.key.new"],
        )

    survived = crash_points(lambda: clear(tmp_path), lambda: run(store.create(NAMESPACE, ONE)), check)
    assert survived >= 6


def test_a_crash_while_replacing_leaves_the_old_key_or_the_new_one(store: FileKeyStore, tmp_path: Path) -> None:
    def prepare() -> None:
        clear(tmp_path)
        run(store.create(NAMESPACE, ONE))

    def check(number: int) -> None:
        assert run(open_store(tmp_path).read(NAMESPACE)) in (ONE, TWO), f"crash {number}"
        run(store.replace(NAMESPACE, TWO))
        assert run(store.read(NAMESPACE)) == TWO

    assert crash_points(prepare, lambda: run(store.replace(NAMESPACE, TWO)), check) >= 8


def test_a_crash_while_destroying_never_brings_a_key_back(store: FileKeyStore, tmp_path: Path) -> None:
    def prepare() -> None:
        clear(tmp_path)
        run(store.create(NAMESPACE, ONE))

    def check(number: int) -> None:
        try:
            assert run(store.read(NAMESPACE)) == ONE, f"crash {number}"
            assert not path_of(tmp_path).with_suffix(".gone").exists()
        except KeyGone:
            pass
        run(store.destroy(NAMESPACE))
        assert not path_of(tmp_path).exists()
        with pytest.raises(KeyGone):
            run(store.read(NAMESPACE))

    assert crash_points(prepare, lambda: run(store.destroy(NAMESPACE)), check) >= 9


@pytest.mark.parametrize("call", range(1, 12))
def test_a_destruction_that_the_disk_refuses_is_not_reported_as_done(
    call: int, store: FileKeyStore, tmp_path: Path
) -> None:
    run(store.create(NAMESPACE, ONE))
    try:
        with crash_before_call(call, OSError(5, "Input/output error")):
            run(store.destroy(NAMESPACE))
    except KeyUnavailable as error:
        assert "Input/output error" in str(error)
    else:
        pytest.fail(f"call {call} failed and destroy returned")


def test_a_store_that_others_can_reach_is_refused(store: FileKeyStore, tmp_path: Path) -> None:
    run(store.create(NAMESPACE, ONE))
    path_of(tmp_path).chmod(0o644)
    with pytest.raises(KeyExposed, match=r"has permissions 0644.*chmod 0600"):
        run(store.read(NAMESPACE))
    path_of(tmp_path).chmod(0o600)
    (tmp_path / "namespaces").chmod(0o755)
    with pytest.raises(KeyExposed, match=r"has permissions 0755.*chmod 0700"):
        run(store.read(NAMESPACE))


GOOD = keystore.encode_versions(TWO)
edits = st.tuples(st.integers(0, len(GOOD)), st.integers(0, len(GOOD)), st.binary(max_size=8))


@settings(max_examples=2000)
@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(b"KVNK\x01\0\0\x01".__add__), edits))
def test_c16_the_parser_takes_exactly_what_the_writer_writes(case: bytes | tuple[int, int, bytes]) -> None:
    data = case if isinstance(case, bytes) else GOOD[: case[0]] + case[2] + GOOD[case[1] :]
    try:
        versions = keystore.parse_versions(Path("n.key"), data)
    except KeyDamaged as error:
        assert "n.key is not a whole namespace key file" in str(error)
    else:
        assert keystore.encode_versions(versions) == data


def test_a_file_beyond_any_key_file_is_not_read(store: FileKeyStore, tmp_path: Path) -> None:
    run(store.create(NAMESPACE, ONE))
    with path_of(tmp_path).open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(KeyDamaged, match=r"has more than .* bytes and cannot be a key file"):
        run(store.read(NAMESPACE))


@pytest.mark.parametrize(
    "versions",
    [
        {},
        {0: b"x"},
        {2**32: b"x"},
        {1: b""},
        {1: bytes(RECORD_BYTES_MAX + 1)},
        dict.fromkeys(range(1, VERSIONS_MAX + 2), b"x"),
    ],
    ids=["none", "version 0", "version too high", "empty record", "long record", "too many"],
)
def test_impossible_versions_are_refused(versions: dict[int, bytes], store: FileKeyStore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be from|has 1 to"):
        run(store.create(NAMESPACE, versions))
    assert os.listdir(tmp_path / "namespaces") == []


def test_the_longest_file_comes_back(store: FileKeyStore) -> None:
    versions = dict.fromkeys(range(1, VERSIONS_MAX + 1), bytes(RECORD_BYTES_MAX))
    assert run(store.create(NAMESPACE, versions)) == versions
