"""Root keys that were replaced: they open until they are destroyed, wherever a rotation was interrupted."""

from __future__ import annotations

import base64
import os
import shutil
from pathlib import Path
from uuid import UUID

import pytest

from tenancy.errors import KeyDamaged, KeyMismatch, KeyRefused, KeyUnavailable, TenancyError
from tenancy.keys.environmentroot import EnvironmentRootKey
from tenancy.keys.rootkey import FileRootKey, RootKey
from tenancy.keys.secret import SecretBytes
from tenancy.keys.wrapping import KeyContext, wrapped_by
from tests.support.aio import aio, run
from tests.support.crashing import crash_points
from tests.tenancy.samples import InlineWorkers

CONTEXT = KeyContext(UUID(int=1), UUID(int=2), "namespace", 1)
KEY = SecretBytes(b"\x5a" * 32)


async def opened(keys: Path) -> FileRootKey:
    return await FileRootKey.open(keys, InlineWorkers(), os.urandom)


async def made(keys: Path) -> FileRootKey:
    return await FileRootKey.open_or_create(keys, InlineWorkers(), os.urandom)


@aio
async def test_a_new_root_key_wraps_and_the_old_one_opens(tmp_path: Path) -> None:
    root = await made(tmp_path / "keys")
    old, record = root.key_id, await root.wrap(KEY, CONTEXT)
    new = await root.rotate()
    assert new == root.key_id != old
    assert await root.unwrap(record, CONTEXT) == KEY
    assert wrapped_by(await root.wrap(KEY, CONTEXT)) == new
    again = await opened(tmp_path / "keys")
    assert again.key_id == new
    assert await again.unwrap(record, CONTEXT) == KEY


@aio
async def test_a_running_gateway_takes_over_the_key_that_a_copied_folder_brings(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "a", tmp_path / "b"
    root = await made(here)
    shutil.copytree(here, elsewhere)
    other = await opened(elsewhere)
    new = await root.rotate()
    record = await root.wrap(KEY, CONTEXT)
    with pytest.raises(KeyMismatch, match=new):
        await other.unwrap(record, CONTEXT)
    shutil.copytree(here, elsewhere, dirs_exist_ok=True)
    assert await other.unwrap(record, CONTEXT) == KEY, "looked for at once"
    assert wrapped_by(await other.wrap(KEY, CONTEXT)) == new, "nothing new is wrapped by the old one"


@aio
async def test_a_folder_of_something_else_is_never_taken_over(tmp_path: Path) -> None:
    root = await made(tmp_path / "keys")
    await made(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "root.key", tmp_path / "keys" / "root.key")
    for attempt in (root.check(), root.wrap(KEY, CONTEXT)):
        with pytest.raises(KeyMismatch, match="put that one back"):
            await attempt


@aio
async def test_only_what_nothing_needs_is_destroyed(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    root = await made(keys)
    first = root.key_id
    second = await root.rotate()
    record = await root.wrap(KEY, CONTEXT)
    third = await root.rotate()
    assert await root.retire({second}) == [first]
    assert await root.unwrap(record, CONTEXT) == KEY
    assert await root.retire({third}) == [second]
    assert await root.retire(()) == [], "the one that wraps stays"
    with pytest.raises(KeyMismatch, match=second):
        await root.unwrap(record, CONTEXT)
    assert os.listdir(keys) == ["root.key"]


def test_C12_a_rotation_that_crashes_anywhere_loses_no_root_key(tmp_path: Path) -> None:
    keys, records = tmp_path / "keys", []

    def prepare() -> None:
        shutil.rmtree(keys, ignore_errors=True)
        records[:] = [run(run(made(keys)).wrap(KEY, CONTEXT))]

    def check(number: int) -> None:
        root = run(opened(keys))
        assert run(root.unwrap(records[0], CONTEXT)) == KEY, f"crash {number}"
        run(root.rotate())
        newest = run(root.wrap(KEY, CONTEXT))
        run(root.retire({root.key_id}))
        again = run(opened(keys))
        assert run(again.unwrap(newest, CONTEXT)) == KEY, f"crash {number}"
        assert [name for name in os.listdir(keys) if name.endswith(".key")] == ["root.key"]

    assert crash_points(prepare, lambda: run(run(opened(keys)).rotate()), check) > 8


@aio
async def test_a_lost_root_key_beside_old_ones_is_no_fresh_start(tmp_path: Path) -> None:
    root = await made(tmp_path / "keys")
    await root.rotate()
    (tmp_path / "keys" / "root.key").unlink()
    with pytest.raises(KeyUnavailable, match="keys before it are there"):
        await made(tmp_path / "keys")


# From the environment

ONE, TWO = bytes(range(32)), bytes(range(32, 64))


@aio
async def test_the_environments_first_key_wraps_and_all_of_them_open() -> None:
    old: RootKey = EnvironmentRootKey(ONE.hex(), os.urandom)
    record = await old.wrap(KEY, CONTEXT)
    both = EnvironmentRootKey(f"{base64.b64encode(TWO).decode()}, {ONE.hex()}", os.urandom)
    assert await both.unwrap(record, CONTEXT) == KEY
    assert wrapped_by(await both.wrap(KEY, CONTEXT)) == both.key_id != old.key_id
    await both.check()
    assert await both.retire(()) == []
    with pytest.raises(KeyRefused, match="KVGW_ROOT_KEY"):
        await both.rotate()
    with pytest.raises(KeyMismatch):
        await EnvironmentRootKey(TWO.hex(), os.urandom).unwrap(record, CONTEXT)


@pytest.mark.parametrize(
    "text", ["", "secret-word", ONE.hex()[:-2], ONE.hex() + "00", f"{ONE.hex()},", ",".join([ONE.hex()] * 9), "é" * 32]
)
def test_the_environments_key_is_32_bytes_and_is_never_repeated(text: str) -> None:
    with pytest.raises(KeyDamaged) as refused:
        EnvironmentRootKey(text, os.urandom)
    error: BaseException | None = refused.value
    while error is not None:
        assert not text or text[:16] not in str(error)
        error = error.__context__ or error.__cause__
    assert issubclass(KeyDamaged, TenancyError)
