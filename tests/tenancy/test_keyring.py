"""The keyring: keys open where they belong and nowhere else, are remembered for a bounded time, and die for good."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID

import pytest

from tenancy.errors import KeyDamaged, KeyGone, KeyMismatch, KeyUnavailable, NamespaceUnknown, TenancyError
from tenancy.keys.keyring import CACHE_SECONDS, CACHED_NAMESPACES_MAX, Keyring
from tenancy.keys.keystore import FileKeyStore
from tenancy.keys.rootkey import FileRootKey
from tenancy.model import Scope
from tenancy.registry import KeyRow
from tenancy.sealing import BlobAddress, open_sealed, seal, sealed_length
from tests.support.aio import aio
from tests.support.manual_clock import ManualClock
from tests.tenancy.samples import FINGERPRINT, InlineWorkers, plaintext

ONE = Scope(UUID(int=1), UUID(int=2))
TWO = Scope(UUID(int=1), UUID(int=3))
OTHER_TENANT = Scope(UUID(int=9), UUID(int=2))


class Rows:
    """The catalog's part: wrapped keys by namespace."""

    def __init__(self) -> None:
        self.of: dict[Scope, list[KeyRow]] = {}
        self.asked = 0
        self.held: asyncio.Event | None = None

    async def wrapped_keys(self, scope: Scope) -> list[KeyRow]:
        self.asked += 1
        if scope not in self.of:
            raise NamespaceUnknown("the namespace does not exist")
        rows = self.of[scope]
        if self.held is not None:
            await self.held.wait()
        return rows


@dataclass
class Setup:
    ring: Keyring
    rows: Rows
    store: FileKeyStore
    clock: ManualClock
    keys: Path

    async def make(self, scope: Scope) -> None:
        self.rows.of[scope] = await self.ring.create(scope)


async def setup(keys: Path, rows: Rows | None = None) -> Setup:
    root = await FileRootKey.open_or_create(keys, InlineWorkers(), os.urandom)
    store = await FileKeyStore.open(keys, InlineWorkers())
    rows, clock = rows or Rows(), ManualClock()
    return Setup(Keyring(root, store, rows, clock, os.urandom), rows, store, clock, keys)


@aio
async def test_made_keys_open_and_differ(tmp_path: Path) -> None:
    here = await setup(tmp_path / "keys")
    await here.make(ONE)
    await here.make(TWO)
    one, two = await here.ring.keys(ONE), await here.ring.keys(TWO)
    assert sorted(one.data) == [1]
    secrets = [keys.data_key(1).reveal() for keys in (one, two)] + [keys.names.entry.reveal() for keys in (one, two)]
    assert len(set(secrets)) == 4
    assert {len(secret) for secret in secrets} == {32}
    with pytest.raises(KeyUnavailable, match="epoch 2"):
        one.data_key(2)
    again = await setup(tmp_path / "keys", here.rows)
    assert (await again.ring.keys(ONE)).data_key(1) == one.data_key(1)


@aio
async def test_no_key_is_in_the_rows_or_files(tmp_path: Path) -> None:
    here = await setup(tmp_path / "keys")
    await here.make(ONE)
    keys = await here.ring.keys(ONE)
    stored = b"".join(row.wrapped for row in here.rows.of[ONE])
    stored += b"".join(file.read_bytes() for file in (tmp_path / "keys" / "namespaces").iterdir())
    for secret in (keys.data_key(1), keys.names.entry, keys.names.chunk_id):
        assert secret.reveal() not in stored
        assert secret.reveal().hex() not in repr(keys)


@aio
async def test_keys_are_remembered_for_a_bounded_time(tmp_path: Path) -> None:
    here = await setup(tmp_path / "keys")
    await here.make(ONE)
    await here.ring.keys(ONE)
    here.clock.advance(CACHE_SECONDS - 1)
    await here.ring.keys(ONE)
    assert here.rows.asked == 1
    here.clock.advance(1)
    await here.ring.keys(ONE)
    assert here.rows.asked == 2


@aio
async def test_keys_are_opened_once_for_all_who_wait(tmp_path: Path) -> None:
    here = await setup(tmp_path / "keys")
    await here.make(ONE)
    here.rows.held = asyncio.Event()
    waiting = [asyncio.create_task(here.ring.keys(ONE)) for _ in range(20)]
    while here.rows.asked == 0:
        await asyncio.sleep(0)
    here.rows.held.set()
    assert len({id(keys) for keys in await asyncio.gather(*waiting)}) == 1
    assert here.rows.asked == 1


@aio
async def test_a_failure_is_not_remembered(tmp_path: Path) -> None:
    here = await setup(tmp_path / "keys")
    for _ in range(2):
        with pytest.raises(NamespaceUnknown):
            await here.ring.keys(ONE)
    await here.make(ONE)
    await here.ring.keys(ONE)


@aio
async def test_the_number_of_remembered_namespaces_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CACHED_NAMESPACES_MAX >= 1000
    monkeypatch.setattr("tenancy.keys.keyring.CACHED_NAMESPACES_MAX", 1)
    here = await setup(tmp_path / "keys")
    await here.make(ONE)
    await here.make(TWO)
    for scope in (ONE, TWO, TWO, ONE):
        await here.ring.keys(scope)
    assert here.rows.asked == 3


@aio
async def test_what_was_forgotten_is_opened_anew(tmp_path: Path) -> None:
    here = await setup(tmp_path / "keys")
    await here.make(ONE)
    await here.ring.keys(ONE)
    await here.store.destroy(ONE.namespace)
    await here.ring.keys(ONE)
    here.ring.forget(ONE)
    with pytest.raises(KeyGone):
        await here.ring.keys(ONE)


@aio
async def test_keys_forgotten_while_they_are_opened_are_not_remembered(tmp_path: Path) -> None:
    here = await setup(tmp_path / "keys")
    await here.make(ONE)
    real = here.store.read
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def slow(namespace: UUID) -> object:
        versions = await real(namespace)
        reached.set()
        await go_on.wait()
        return versions

    here.store.read = slow  # type: ignore[method-assign,assignment]
    opening = asyncio.create_task(here.ring.keys(ONE))
    await reached.wait()
    await here.store.destroy(ONE.namespace)
    here.ring.forget(ONE)
    go_on.set()
    await opening
    with pytest.raises(KeyGone):
        await here.ring.keys(ONE)


# Rows where they do not belong


@aio
async def test_C14_a_row_opens_in_its_own_place_only(tmp_path: Path) -> None:
    here = await setup(tmp_path / "keys")
    await here.make(ONE)
    await here.make(TWO)
    data, identity = here.rows.of[ONE]
    moved = {
        "another namespace": (TWO, [data, identity]),
        "another epoch": (ONE, [replace(data, epoch=2), identity]),
        "another purpose": (ONE, [KeyRow("data", 1, identity.wrapped), KeyRow("id", 0, data.wrapped)]),
    }
    for place, (scope, rows) in moved.items():
        fresh = await setup(tmp_path / "keys")
        fresh.rows.of[scope] = rows
        with pytest.raises(KeyMismatch):
            await fresh.ring.keys(scope)
        assert place


@aio
async def test_C14_a_namespace_key_file_opens_under_its_own_tenant_and_name_only(tmp_path: Path) -> None:
    here = await setup(tmp_path / "keys")
    await here.make(ONE)
    await here.make(TWO)
    fresh = await setup(tmp_path / "keys")
    fresh.rows.of[OTHER_TENANT] = here.rows.of[ONE]
    with pytest.raises(KeyMismatch):
        await fresh.ring.keys(OTHER_TENANT)
    folder = tmp_path / "keys" / "namespaces"
    shutil.copy(folder / f"{ONE.namespace}.key", folder / f"{TWO.namespace}.key")
    with pytest.raises(KeyMismatch):
        await (await setup(tmp_path / "keys", here.rows)).ring.keys(TWO)


@aio
async def test_a_bit_changed_in_a_row_is_noticed(tmp_path: Path) -> None:
    here = await setup(tmp_path / "keys")
    await here.make(ONE)
    data, identity = here.rows.of[ONE]
    for at in range(len(data.wrapped)):
        altered = bytearray(data.wrapped)
        altered[at] ^= 1
        here.ring.forget(ONE)
        here.rows.of[ONE] = [replace(data, wrapped=bytes(altered)), identity]
        with pytest.raises((KeyMismatch, KeyDamaged)):
            await here.ring.keys(ONE)


@pytest.mark.parametrize("kept", ["data", "id"])
@aio
async def test_a_namespace_that_lacks_a_key_is_unavailable(tmp_path: Path, kept: str) -> None:
    here = await setup(tmp_path / "keys")
    await here.make(ONE)
    here.rows.of[ONE] = [row for row in here.rows.of[ONE] if row.purpose == kept]
    with pytest.raises(KeyUnavailable, match=str(ONE.namespace)):
        await here.ring.keys(ONE)


@aio
async def test_the_wrong_root_key_is_named(tmp_path: Path) -> None:
    here = await setup(tmp_path / "keys")
    await here.make(ONE)
    shutil.copytree(tmp_path / "keys" / "namespaces", tmp_path / "saved")
    shutil.rmtree(tmp_path / "keys")
    await setup(tmp_path / "keys")
    shutil.rmtree(tmp_path / "keys" / "namespaces")
    shutil.copytree(tmp_path / "saved", tmp_path / "keys" / "namespaces")
    other = await setup(tmp_path / "keys", here.rows)
    with pytest.raises(KeyMismatch) as caught:
        await other.ring.keys(ONE)
    new = other.ring._root.key_id
    old = here.ring._root.key_id
    assert old in str(caught.value)
    assert new in str(caught.value)
    assert "bring back the key" in str(caught.value)


# Shredding


@aio
async def test_C13_after_destruction_nothing_opens_even_with_everything_else_restored(tmp_path: Path) -> None:
    here = await setup(tmp_path / "keys")
    await here.make(ONE)
    keys = await here.ring.keys(ONE)
    plain = plaintext(1000)
    place = BlobAddress(ONE.tenant, ONE.namespace, 1, len(plain), 1_700_000_000_000, FINGERPRINT, 16)
    blob = bytearray(sealed_length(len(plain), 16))
    sealed = seal(keys.data_key(1), keys.names.chunk_id, place, b"s" * 32, memoryview(plain), memoryview(blob))
    backup_of_rows = list(here.rows.of[ONE])

    await here.store.destroy(ONE.namespace)

    restored = await setup(tmp_path / "keys")
    restored.rows.of[ONE] = backup_of_rows
    with pytest.raises(KeyGone):
        await restored.ring.keys(ONE)
    assert [file.suffix for file in (tmp_path / "keys" / "namespaces").iterdir()] == [".gone"]
    with pytest.raises(KeyGone):
        await restored.ring.create(ONE)
    # What is left on this machine: the root key, the rows, the blob. No key among them opens it.
    await restored.make(TWO)
    left = [(tmp_path / "keys" / "root.key").read_bytes()[-32:]]
    left += [(await restored.ring.keys(TWO)).data_key(1).reveal()]
    for candidate in left:
        target = bytearray(len(plain))
        with pytest.raises(TenancyError):
            open_sealed(
                type(keys.data_key(1))(candidate), place, b"s" * 32, sealed, memoryview(blob), memoryview(target)
            )
        assert target == bytes(len(plain))


@aio
async def test_losing_the_key_file_is_not_the_same_as_destroying_it(tmp_path: Path) -> None:
    here = await setup(tmp_path / "keys")
    await here.make(ONE)
    (tmp_path / "keys" / "namespaces" / f"{ONE.namespace}.key").unlink()
    with pytest.raises(KeyUnavailable, match="restore the keys folder"):
        await here.ring.keys(ONE)
