"""Backup, restore, wipe, and the guard against an older catalog that comes back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvgw.cli import upkeep
from kvgw.datadir import FolderLocked
from kvgw.errors import Outage, RequestRefused
from tenancy.errors import CatalogOutdated, KeyUnavailable, RegistryRefused
from tests.support.aio import aio
from tests.support.gateways import SMALL, format_of, house, keys_of, payloads_of

KEYS = keys_of(3)


async def _stored(folder: Path) -> list[bytes]:
    """Store three chunks in a new gateway's default namespace; every row of the catalog that must not be copied."""
    async with house("unix", folder) as gateway, gateway.client(on_error="raise") as client:
        registered = await client.register(format_of())
        assert (await client.put(registered, KEYS, payloads_of(registered, 3))).stored == 3
        catalog = gateway.opened.rooms.catalog
        rows = await catalog._database.read(
            lambda connection: connection.exec_driver_sql("SELECT salt, chunk_id, tag_root FROM chunk").all()
        )
    return [value for row in rows for value in row]


@aio
async def test_a_copy_holds_no_chunk_no_salt_and_no_key(tmp_path: Path) -> None:
    secrets = await _stored(tmp_path / "data")
    lines = await upkeep._copy(SMALL, tmp_path / "data")
    text = "\n".join(lines)
    assert '"table":"namespace"' in text
    assert '"table":"chunk"' not in text
    assert len(secrets) == 9
    for secret in secrets:
        assert upkeep.copies._plain(secret) not in text
    for file in (tmp_path / "data" / "keys").rglob("*"):
        if file.is_file() and file.stat().st_size >= 32:
            assert upkeep.copies._plain(file.read_bytes()) not in text


@aio
async def test_a_copy_is_made_while_the_gateway_runs_and_put_back_as_a_cold_cache(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    async with house("unix", folder) as gateway, gateway.client(on_error="raise") as client:
        registered = await client.register(format_of())
        await client.put(registered, KEYS, payloads_of(registered, 3))
        lines = await upkeep._copy(SMALL, folder)
    with pytest.raises(RequestRefused, match="has tenants already"):
        await upkeep._put_back(SMALL, folder, lines)
    for file in folder.glob("catalog.db*"):
        file.unlink()
    assert await upkeep._put_back(SMALL, folder, lines) == len(lines) - 1
    async with house("unix", folder) as gateway, gateway.client(on_error="raise") as client:
        registered = await client.register(format_of())
        assert (await client.match(registered, KEYS)).count == 0
        assert (await client.stat()).stored_bytes == 0
        assert (await client.put(registered, KEYS, payloads_of(registered, 3))).stored == 3


@aio
async def test_S20_an_older_catalog_that_comes_back_is_refused_until_it_is_wiped(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    await _stored(folder)
    older = shutil.copy(folder / "catalog.db", tmp_path)
    async with house("unix", folder) as gateway, gateway.client(on_error="raise") as client:
        registered = await client.register(format_of())
        assert await client.delete(registered, KEYS[:1]) == 1
    for file in folder.glob("catalog.db*"):
        file.unlink()
    shutil.copy(older, folder / "catalog.db")
    with pytest.raises(CatalogOutdated, match="kvgw wipe"):
        async with house("unix", folder):
            raise AssertionError("law 5: a deleted chunk could be read again")
    chunks, blobs = await upkeep._wipe(SMALL, folder)
    assert chunks == 3
    assert blobs >= 2
    async with house("unix", folder) as gateway, gateway.client(on_error="raise") as client:
        registered = await client.register(format_of())
        assert (await client.match(registered, KEYS)).count == 0
        assert (await client.stat()).objects == 0, "law 4"


@aio
async def test_a_lost_catalog_begins_anew_beside_its_old_keys(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    await _stored(folder)
    async with house("unix", folder) as gateway, gateway.client(on_error="raise") as client:
        await client.delete(await client.register(format_of()), KEYS[:1])
    for file in folder.glob("catalog.db*"):
        file.unlink()
    async with house("unix", folder) as gateway, gateway.client(on_error="raise") as client:
        assert (await client.match(await client.register(format_of()), KEYS)).count == 0


@aio
async def test_a_delete_is_not_acknowledged_before_the_guard_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house("unix", tmp_path / "data") as gateway, gateway.client(on_error="raise") as client:
        registered = await client.register(format_of())
        await client.put(registered, KEYS, payloads_of(registered, 3))

        async def unreachable(_: int) -> None:
            raise KeyUnavailable("the key store does not answer")

        monkeypatch.setattr(gateway.opened.rooms.keyring, "advance", unreachable)
        with pytest.raises(Outage, match="key store"):
            await client.delete(registered, KEYS[:1])
        assert (await client.match(registered, KEYS)).count == 0, "deleted all the same: it is merely not acknowledged"


@aio
async def test_wipe_and_restore_refuse_a_running_gateway(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "data"):
        with pytest.raises(FolderLocked):
            await upkeep._wipe(SMALL, tmp_path / "data")
        with pytest.raises(FolderLocked):
            await upkeep._put_back(SMALL, tmp_path / "data", [])


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([], "no copy"),
        (["hello"], "no copy"),
        (['{"format":"other","version":1,"revision":"0003","created_ms":1}'], "'other'"),
        (['{"format":"kvgw-backup","version":9,"revision":"0003","created_ms":1}'], "version 9"),
        (['{"format":"kvgw-backup","version":1,"revision":"0001","created_ms":1}'], "revision 0001"),
        (["HEAD", '{"table":"chunk","values":{}}'], "line 2"),
        (["HEAD", '{"table":"tenant","values":{"tenant_id":"x"}}'], "line 2"),
        (["HEAD", "[]"], "line 2"),
    ],
)
def test_a_copy_that_cannot_be_read_is_refused_by_line(lines: list[str], sentence: str) -> None:
    head = upkeep.copies.header("0003", 1)
    with pytest.raises(RegistryRefused, match=sentence):
        list(upkeep.copies.read([head if line == "HEAD" else line for line in lines], "0003"))
