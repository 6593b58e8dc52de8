"""C13 and C19: after a shred an older catalog with all blobs opens nothing; and no key is ever told to anybody."""

from __future__ import annotations

import base64
import logging
import os
import shutil
import sqlite3
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from kvgw.errors import KvgwError, RequestRefused
from kvgw.model import Durability
from kvgw.runtime import SystemRng, ThreadWorkers
from kvgw.settings import CatalogSettings
from tenancy import generation
from tenancy.audit.chain import Act
from tenancy.errors import CatalogOutdated, TenancyError
from tenancy.keys.keyring import new_row
from tenancy.keys.rootkey import FileRootKey
from tenancy.keys.secret import SecretBytes
from tenancy.keys.wrapping import KeyContext, WrappingKey, unwrap
from tenancy.model import Scope
from tenancy.registry import KeyRow
from tests.support.admin import Admin
from tests.support.aio import aio, run
from tests.support.gateways import House, format_of, house, keys_of, payloads_of, read
from tests.support.several import Footing, on_footing

ACT = Act(actor="owner", action="key.test")
CHUNKS, BATCH = 1000, 50


async def fill(gateway: House, name: str, count: int, durability: Durability) -> list[bytes]:
    """Store `count` chunks in a namespace; their keys, all of which open."""
    client = gateway.client(name)
    registered = await client.register(format_of(128))
    keys = keys_of(count, name)
    for start in range(0, count, BATCH):
        part = keys[start : start + BATCH]
        payloads = payloads_of(registered, len(part), seed=start)
        assert (await client.put(registered, part, payloads, durability=durability)).stored == len(part)
    assert await opened_of(gateway, name, keys) == count
    return keys


async def opened_of(gateway: House, name: str, keys: Sequence[bytes]) -> int:
    """How many of the keys are hits."""
    client = gateway.client(name)
    hits = 0
    for start in range(0, len(keys), BATCH):
        try:
            registered = await client.register(format_of(128))
            found = (await read(client, registered, keys[start : start + BATCH]))[1]
        except RequestRefused:
            continue
        hits += sum(one is not None for one in found)
    return hits


def old_catalogs_are_let_in() -> Any:
    """Whoever put the older catalog back has also done away with the check that would refuse it."""
    return mock.patch.object(generation, "admit", lambda connection, known: None)


@pytest.mark.timeout(300)
def test_C13_an_older_catalog_with_all_blobs_opens_nothing(tmp_path: Path) -> None:
    """0 of 1,000 chunks; the namespace beside it, in the same files, still opens."""
    run(shred_and_put_back(tmp_path), 280)


async def shred_and_put_back(tmp_path: Path) -> None:
    folder, copy = tmp_path / "gw", tmp_path / "copy"
    async with house("embedded", folder) as gateway:
        scope = (await gateway.namespace("doomed")).scope
        keys = await fill(gateway, "doomed", CHUNKS, Durability.NVME)
        others = await fill(gateway, "default", BATCH, Durability.NVME)
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("keys", "*.sock"))
    old_file = (folder / "keys" / "namespaces" / f"{scope.namespace}.key").read_bytes()
    async with house("embedded", folder) as gateway:
        assert await opened_of(gateway, "doomed", keys[:BATCH]) == BATCH
        await gateway.opened.custodian.shred(scope, ACT)
        assert await opened_of(gateway, "doomed", keys) == 0
    shutil.copytree(copy, folder, dirs_exist_ok=True)
    for stale in ("catalog.db-wal", "catalog.db-shm"):
        (folder / stale).unlink(missing_ok=True)
    with pytest.raises(CatalogOutdated):
        async with house("embedded", folder):
            pass
    with old_catalogs_are_let_in():
        async with house("embedded", folder) as gateway:
            assert (await gateway.place("doomed")).state == "active", "the older catalog does not know"
            assert await opened_of(gateway, "doomed", keys) == 0
            assert await opened_of(gateway, "default", others) == BATCH
    await nothing_unwraps(folder, scope, old_file)


async def nothing_unwraps(folder: Path, scope: Scope, old_file: bytes) -> None:
    """With the root key, every record in the keys folder, and the older catalog's rows in hand."""
    workers = ThreadWorkers(1)
    root = await FileRootKey.open(folder / "keys", workers, SystemRng().token)
    everything = b"".join(file.read_bytes() for file in sorted((folder / "keys").rglob("*")) if file.is_file())
    assert old_file[-48:] not in everything
    with sqlite3.connect(folder / "catalog.db") as catalog:
        rows = [
            KeyRow(*row)
            for row in catalog.execute(
                "SELECT purpose, epoch, wrapped FROM namespace_key WHERE namespace_id = ?", (scope.namespace.hex,)
            )
        ]
    assert len(rows) == 2
    context = KeyContext(scope.tenant, scope.namespace, "namespace", 1)
    for at in range(len(everything)):
        if not everything.startswith(b"KVKW", at):
            continue
        record = everything[at : at + 8 + int.from_bytes(everything[at + 6 : at + 8], "big") + 116]
        with pytest.raises(TenancyError):
            secret = await root.unwrap(record, context)
            wrapping = WrappingKey(str(scope.namespace), 1, secret)
            unwrap(wrapping, rows[0].wrapped, KeyContext(scope.tenant, scope.namespace, "data", 1))
    workers.close()


@pytest.mark.postgres
@pytest.mark.s3
@on_footing
async def test_C13_a_restored_database_server_opens_nothing(shared: Footing) -> None:
    """PostgreSQL from before the shred, and every object still in S3."""
    async with shared.gateway("a") as gateway:
        scope = (await gateway.namespace("doomed")).scope
        keys = await fill(gateway, "doomed", 4 * BATCH, Durability.S3)
        others = await fill(gateway, "default", BATCH, Durability.S3)
    copy = f"{shared.database}_copy"
    shared.server.sql(f'CREATE DATABASE "{copy}" TEMPLATE "{shared.database}"')
    async with shared.gateway("a") as gateway:
        await gateway.opened.custodian.shred(scope, ACT)
    url = shared.url().replace(shared.database, copy)
    settings = replace(shared.settings(), catalog=CatalogSettings(url=url, pool=4))
    with pytest.raises(CatalogOutdated):
        async with shared.gateway("a", settings=settings):
            pass
    with old_catalogs_are_let_in():
        async with shared.gateway("a", settings=settings) as gateway:
            assert (await gateway.place("doomed")).state == "active"
            assert await opened_of(gateway, "doomed", keys) == 0
            assert await opened_of(gateway, "default", others) == BATCH


# C19


class Secrets:
    """Every secret that was in this process's hands while the context lasted."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()

    def __enter__(self) -> Secrets:
        real = SecretBytes.__init__

        def remembering(secret: SecretBytes, value: bytes | bytearray) -> None:
            self.seen.add(bytes(value))
            real(secret, value)

        self._patch = mock.patch.object(SecretBytes, "__init__", remembering)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    def windows(self) -> Iterator[bytes]:
        """Each 8 bytes of each secret, as they are and as text shows them."""
        for secret in self.seen:
            for at in range(len(secret) - 7):
                window = secret[at : at + 8]
                yield window
                yield window.hex().encode()
                yield repr(window)[2:-1].encode()
            for shift in range(3):
                coded = base64.b64encode(secret[shift:]).rstrip(b"=")
                yield from (coded[at : at + 10] for at in range(0, len(coded) - 13, 4))

    def in_(self, data: bytes) -> list[bytes]:
        return [window for window in self.windows() if window in data or window.upper() in data.upper()]


@aio
async def test_C19_no_key_is_logged_raised_answered_or_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A life of keys with every kind of failure, at the most talkative level of every logger."""
    caplog.set_level(logging.DEBUG)
    told: list[str] = []
    folder = tmp_path / "gw"
    with Secrets() as secrets:
        async with house("embedded", folder) as gateway:
            admin = Admin(gateway.opened)
            await fill(gateway, "default", 2, Durability.NVME)
            await gateway.namespace("other")
            for method, path, body, query in (
                ("POST", "/tenants/-/namespaces/default/keys/rotate", {"key": "data"}, None),
                ("POST", "/tenants/-/namespaces/default/keys/rotate", {"key": "namespace"}, None),
                ("POST", "/keys/rotate", None, None),
                ("POST", "/keys/rewrap", None, {"retire": "true", "confirm": "wrong"}),
                ("POST", "/keys/rewrap", None, None),
                ("GET", "/keys", None, None),
                ("GET", "/tenants/-/namespaces/default/keys", None, None),
                ("PATCH", "/tenants/-/namespaces/default/keys", {"min_decrypt_epoch": 99}, {"confirm": "default"}),
                ("POST", "/tenants/-/namespaces/other/shred", None, {"confirm": "other"}),
                ("GET", "/tenants/-/namespaces/other/keys", None, None),
            ):
                answer = await admin.ask(method, f"/v1{path}", body, query=query, peer=os.geteuid())
                assert answer.status_code < 500, answer.text
                told.append(answer.text)
            told += await failures(gateway, folder)
            told += map(str, await gateway.rows("SELECT action, detail FROM audit_record"))
            told.append(
                repr(gateway.opened) + repr(await gateway.opened.rooms.keyring.keys((await gateway.place()).scope))
            )
    out = capfd.readouterr()
    everything = "\n".join([caplog.text, out.out, out.err, *told])
    assert len(secrets.seen) > 12
    assert "key.rotate_data" in everything, "the audit log was read"
    assert secrets.in_(everything.encode()) == []
    assert secrets.in_(everything.encode() + b"xx" + next(iter(secrets.seen)).hex().encode()), (
        "the search would find it"
    )
    for file in folder.rglob("*"):
        if file.is_file() and not file.name.startswith("root"):
            assert secrets.in_(file.read_bytes()) == [], file


async def failures(gateway: House, folder: Path) -> list[str]:
    """What errors say, with their causes and the lines of their tracebacks, when keys are wrong in every way."""
    store = folder / "keys" / "namespaces"
    scope = (await gateway.place()).scope
    key_file, (pepper,) = store / f"{scope.namespace}.key", store.glob("00000000-*.key")
    whole, told = key_file.read_bytes(), []
    for wrong in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), pepper.read_bytes(), None):
        if wrong is None:
            key_file.unlink()
        else:
            key_file.write_bytes(wrong)
        told += await said(gateway, scope)
    key_file.write_bytes(whole)
    key_file.chmod(0o600)
    stranger = WrappingKey("stranger", 1, SecretBytes(os.urandom(32)))
    for wrong_rows in (
        [
            KeyRow(row.purpose, row.epoch + 1, row.wrapped)
            for row in await gateway.opened.rooms.catalog.wrapped_keys(scope)
        ],
        [new_row(stranger, scope, "data", 1, os.urandom)],
        [KeyRow("data", 1, b"KVKW")],
    ):
        answer = mock.AsyncMock(return_value=wrong_rows)
        with mock.patch.object(gateway.opened.rooms.catalog, "wrapped_keys", answer):
            told += await said(gateway, scope)
    assert len(told) >= 20
    return told


async def said(gateway: House, scope: Scope) -> list[str]:
    """What each act on a namespace's keys says when it fails."""
    gateway.opened.rooms.keyring.forget(scope)
    told = []
    for attempt in (
        lambda: gateway.opened.rooms.keyring.keys(scope),
        lambda: gateway.opened.custodian.rotate_data_key(scope, ACT),
        lambda: gateway.opened.custodian.rotate_namespace_key(scope, ACT),
        lambda: gateway.opened.custodian.rewrap(ACT, scope.tenant),
        lambda: gateway.client(on_error="raise").register(format_of(128)),
    ):
        try:
            told.append(repr(await attempt()))
        except (TenancyError, KvgwError) as error:
            told.append("".join(traceback.format_exception(error)) + repr(error.args))
    return told
