"""Deleting a namespace or a tenant: rows, bytes, keys and name; and that what was kept aside does not open any more."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

from kvgw.errors import RequestRefused
from kvgw.reports import Registered
from storage.errors import TierUnavailable
from storage.tier import blob_name
from tenancy.deletion.deletions import Deletions
from tenancy.deletion.jobs import Job
from tenancy.deletion.receipt import faults
from tenancy.errors import CatalogUnavailable, KeyGone, KeyUnavailable, RegistryRefused
from tenancy.keys.kdf import committing_key
from tenancy.keys.secret import SecretBytes
from tenancy.policy import Policy
from tenancy.provision import create_namespace
from tests.support.admin import Admin
from tests.support.aio import aio
from tests.support.deletions import ALICE, delete, finished, job_of, put
from tests.support.gateways import House, format_of, house, keys_of, payloads_of, read
from tests.support.manual_clock import ManualClock

ALL = {"everything": True}
_SALT = 32


@aio
async def test_I15_a_namespace_is_deleted_and_its_name_used_again(tmp_path: Path) -> None:
    clock = ManualClock()
    async with house("embedded", tmp_path / "gw", clock=clock) as gateway:
        await gateway.namespace("work")
        client = gateway.client("work", on_error="raise")
        registered = await client.register(format_of())
        payloads = await put(client, registered, keys_of(3))
        before = await gateway.place("work")
        job = await delete(gateway, ALL, "work", query={"confirm": "work"})
        assert job["acknowledged"]
        with pytest.raises(RequestRefused):
            await client.match(registered, keys_of(3))
        again = await Admin(gateway.opened).ask(
            "POST", "/v1/tenants/-/namespaces/work/deletions", ALL, peer=os.geteuid(), query={"confirm": "work"}
        )
        assert again.status_code == 404, "it is on its way already"
        receipt = (await finished(gateway, job))["receipt"]
        assert {look["tier"] for look in receipt["looks"]} == {"staging", "nvme", "catalog", "keys"}
        assert receipt["key_destroyed_ms"]
        assert receipt["namespace"] == {"id": str(before.scope.namespace), "name": "work"}
        assert faults(msgspec.json.encode(receipt), gateway.opened.rooms.signer.public_key) == []
        await check_no_row(gateway, before.scope.namespace.hex)

        await gateway.namespace("work")
        after = await gateway.place("work")
        assert after.scope.namespace != before.scope.namespace, "a new namespace, not the old one"
        fresh = gateway.client("work", on_error="raise")
        renewed = await fresh.register(format_of())
        assert renewed.fingerprint != registered.fingerprint, "with keys of its own"
        assert (await fresh.match(renewed, keys_of(3))).count == 0, "what was there is not there any more"
        assert (await fresh.put(renewed, keys_of(3), payloads)).stored == 3
        assert (await read(fresh, renewed, keys_of(3)))[1] == payloads


async def check_no_row(gateway: House, namespace: str) -> None:
    """No table but those of records names the namespace (32 hexadecimal digits, as SQLite keeps it)."""
    tables = [name for (name,) in await gateway.rows("SELECT name FROM sqlite_master WHERE type = 'table'")]
    assert len(tables) > 15
    for table in tables:
        columns = [row[1] for row in await gateway.rows(f"PRAGMA table_info({table})")]
        column = "scope_id" if table == "quota" else "namespace_id"
        if column in columns and table not in ("audit_record", "deletion_job"):
            found = await gateway.rows(f"SELECT count(*) FROM {table} WHERE {column} = '{namespace}'")
            assert found == [(0,)], table


@aio
async def test_C13_what_was_copied_before_a_namespace_was_deleted_does_not_open(tmp_path: Path) -> None:
    """Law 5: the catalog and every blob as they were, and the key store as it is now."""
    folder = tmp_path / "gw"
    async with house("embedded", folder) as gateway:
        await gateway.namespace("work")
        client = gateway.client("work")
        registered = await client.register(format_of())
        await put(client, registered, keys_of(3))
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    async with house("embedded", folder) as gateway:
        await finished(gateway, await delete(gateway, ALL, "work", query={"confirm": "work"}))
    shutil.copytree(folder / "keys", copy / "keys", dirs_exist_ok=True)  # adds the mark that the key is destroyed
    for file in (copy / "keys").rglob("*.key"):
        if not (folder / file.relative_to(copy)).exists():
            file.unlink()
    (copy / "keys" / "namespaces" / "generation").unlink()  # else the older catalog is not even opened
    async with house("embedded", copy, check=False) as gateway:
        client = gateway.client("work")
        with pytest.raises(RequestRefused, match="destroyed"):
            await read(client, registered, keys_of(3))
        with pytest.raises(KeyGone):
            await gateway.opened.rooms.keyring.keys((await gateway.place("work")).scope)
        ((state,),) = await gateway.rows("SELECT count(*) FROM chunk")
        assert state == 3, "the control: rows and blobs are there, only the key is not"


@aio
async def test_a_deleted_chunk_opens_with_no_key_and_no_salt_that_any_file_still_holds(tmp_path: Path) -> None:
    """Law 5: the blob kept aside, every data key, and each 32 bytes of every file tried as its salt."""
    folder, kept = tmp_path / "gw", tmp_path / "kept"
    async with house("embedded", folder) as gateway:
        client = gateway.client()
        registered = await client.register(format_of())
        await put(client, registered, keys_of(2), user="alice")
        await put(client, registered, keys_of(2, "other"), seed=1)
        scope = (await gateway.place()).scope
        rows = await gateway.rows(
            "SELECT e.blob_id, c.salt FROM entry_label e0 JOIN entry e ON e.entry_key = e0.entry_key "
            "JOIN chunk c ON c.blob_id = e.blob_id"
        )
        assert len(rows) == 2
        blobs = [(folder / "nvme" / blob_name(scope.namespace, bytes(row[0]))).read_bytes() for row in rows]
        keys = await gateway.opened.rooms.keyring.keys(scope)
        data_keys = [secret.reveal() for secret in keys.data.values()]
        shutil.copytree(folder, kept)
        assert opens(blobs, data_keys, kept) == 2, "the control: before the deletion the files give the salts away"
        done = await finished(gateway, await delete(gateway, ALICE))
        assert done["state"] == "done"
        assert opens(blobs, data_keys, folder) == 0, "while the gateway still runs"
    assert opens(blobs, data_keys, folder) == 0


def opens(blobs: list[bytes], data_keys: list[bytes], folder: Path) -> int:
    """How many blobs open with one of the keys and a salt found anywhere in the catalog's files."""
    found = set()
    for file in folder.glob("catalog.db*"):
        data = file.read_bytes()
        for at in range(len(data) - _SALT + 1):
            salt = data[at : at + _SALT]
            if salt.count(0) > 8:  # 32 random bytes have not so many zeros, but a database has
                continue
            for index, blob in enumerate(blobs):
                if index not in found and any(_committed(key, salt, blob) for key in data_keys):
                    found.add(index)
    return len(found)


def _committed(key: bytes, salt: bytes, blob: bytes) -> bool:
    label = b"kvgw/v1/blob+AEAD_AES_256_GCM\0"
    return committing_key(SecretBytes(key), label, salt, blob[:96]).commitment == blob[128:160]


@aio
async def test_a_tenant_goes_with_all_of_its_namespaces(tmp_path: Path) -> None:
    async with house("embedded", tmp_path / "gw") as gateway:
        admin = Admin(gateway.opened)
        tenant = (await admin.own("POST", "/tenants", {"name": "acme"}))["id"]
        await admin.own("POST", "/tenants/acme/namespaces", {"name": "second"})
        token = (await admin.own("POST", "/tenants/acme/tokens", {"name": "t", "permissions": ["ns:read"]}))["token"]
        assert (await admin.ask("GET", "/v1/tenants/-", token=token)).status_code == 200
        for confirm in ({}, {"confirm": "acmee"}):
            wrong = await admin.ask("POST", "/v1/tenants/acme/deletions", peer=os.geteuid(), query=confirm)
            assert wrong.status_code == 400
        job = await admin.own("POST", "/tenants/acme/deletions", query={"confirm": "acme"})
        assert (job["state"], job["acknowledged"], job["tenant"]) == ("erasing", True, tenant)
        done = await finished(gateway, job, tenant)
        receipt = done["receipt"]
        jobs = await admin.own("GET", f"/tenants/{tenant}/deletions")
        assert sorted(one["kind"] for one in jobs) == ["namespace", "namespace", "tenant"]
        assert {part["job"] for part in receipt["parts"]} == {one["id"] for one in jobs if one["kind"] == "namespace"}
        assert faults(msgspec.json.encode(receipt), gateway.opened.rooms.signer.public_key) == []
        assert [name for _, name in await gateway.opened.rooms.catalog.tenants()] == ["default"]
        again = (await admin.own("POST", "/tenants", {"name": "acme"}))["id"]
        assert again != tenant
        assert (await admin.own("GET", "/tenants/acme/deletions")) == [], "the new tenant does not see the old one's"
        first = await admin.ask(
            "POST", "/v1/tenants/default/deletions", peer=os.geteuid(), query={"confirm": "default"}
        )
        assert first.status_code == 400


@aio
async def test_a_tenant_on_its_way_out_gets_no_namespace(tmp_path: Path) -> None:
    async with house("embedded", tmp_path / "gw") as gateway:
        admin = Admin(gateway.opened)
        tenant = (await admin.own("POST", "/tenants", {"name": "acme"}))["id"]
        job = await admin.own("POST", "/tenants/acme/deletions", query={"confirm": "acme"})
        rooms = gateway.opened.rooms
        with pytest.raises(RegistryRefused, match="on its way out"):
            await create_namespace(
                rooms.catalog, rooms.keyring, rooms.rng.token, gateway.now_ms(), UUID(tenant), "late", Policy()
            )
        receipt = (await finished(gateway, job, tenant))["receipt"]
        assert len(receipt["parts"]) == 1


@aio
async def test_a_put_in_flight_while_its_namespace_goes_leaves_nothing(tmp_path: Path) -> None:
    clock = ManualClock()
    async with house("embedded", tmp_path / "gw", clock=clock, check=False) as gateway:
        await gateway.namespace("work")
        client = gateway.client("work")
        registered = await client.register(format_of())
        scope = (await gateway.place("work")).scope
        rooms = gateway.opened.rooms
        job: dict[str, Any] = {}
        real = rooms.catalog.commit

        async def commit(*arguments: Any) -> Any:
            job.update(await delete(gateway, ALL, "work", query={"confirm": "work"}))
            return await real(*arguments)

        rooms.catalog.commit = commit  # type: ignore[method-assign]
        with pytest.raises(RequestRefused):
            await client.put(registered, keys_of(1), payloads_of(registered, 1))
        rooms.catalog.commit = real  # type: ignore[method-assign]
        folder = tmp_path / "gw" / "nvme" / "v1" / str(scope.namespace)
        assert [path for path in folder.rglob("*") if path.is_file()], "its bytes are on disk, and no row names them"
        await gateway.opened.crew.go_on_deleting()
        waiting = await job_of(gateway, job)
        assert (waiting["state"], waiting["sentence"]) == ("erasing", "waits: 1 PUTs in flight")
        clock.advance(120)
        await finished(gateway, job)
        assert not [path for path in folder.rglob("*") if path.is_file()]


@aio
async def test_a_deletion_of_a_part_ends_with_the_whole(tmp_path: Path) -> None:
    async with house("embedded", tmp_path / "gw") as gateway:
        await gateway.namespace("work")
        client = gateway.client("work")
        await put(client, await client.register(format_of()), keys_of(2), user="alice")
        part = await delete(gateway, ALICE, "work")
        whole = await delete(gateway, ALL, "work", query={"confirm": "work"})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvgw.maintenance.erasing.STEPS_MAX", 0)
            await gateway.opened.crew.go_on_deleting()  # neither has had a turn
        erasing = gateway.opened.crew.erasing
        for _ in range(2):
            (one,) = [job for job in await unfinished(gateway) if job.job_id.hex() == whole["id"]]
            await erasing.advance(one, leads=True)
            if not await unfinished(gateway):
                break
        ended = await job_of(gateway, part)
        assert (ended["state"], ended["receipt"]) == ("done", None)
        assert whole["id"] in ended["sentence"]
        assert (await job_of(gateway, whole))["receipt"]["blobs"]["count"] == 2
        await gateway.opened.crew.go_on_deleting()


async def unfinished(gateway: House) -> list[Job]:
    return await gateway.opened.rooms.deletions.unfinished(gateway.owner.tenant)


@aio
async def test_a_protected_namespace_is_not_deleted(tmp_path: Path) -> None:
    async with house("embedded", tmp_path / "gw") as gateway:
        await gateway.namespace("work")
        scope = (await gateway.place("work")).scope
        await gateway.opened.rooms.catalog._database.write(
            lambda connection: connection.exec_driver_sql(
                f"UPDATE namespace SET deletion_allowed = 0 WHERE namespace_id = '{scope.namespace.hex}'"
            )
        )
        answer = await Admin(gateway.opened).ask(
            "POST", "/v1/tenants/-/namespaces/work/deletions", ALL, peer=os.geteuid(), query={"confirm": "work"}
        )
        assert answer.status_code == 400
        assert "deletion_allowed" in answer.text
        assert (await gateway.place("work")).state == "active"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", [pytest.param("label", marks=pytest.mark.slow), "namespace"])
@aio
async def test_S02_whatever_call_of_a_deletion_fails_the_job_comes_to_its_end(tmp_path: Path, kind: str) -> None:
    """Laws 1 and 5: call N fails, for every N; nothing that was acknowledged is read, and the receipt is right."""
    clock = ManualClock()
    body, more = (ALICE, {}) if kind == "label" else (ALL, {"query": {"confirm": "work"}})
    async with house("embedded", tmp_path / "gw", clock=clock, check=False) as gateway:
        fails_at = 0
        while True:
            fails_at += 1
            await gateway.namespace("work")
            client = gateway.client("work")
            registered = await client.register(format_of(256))
            await put(client, registered, keys_of(3), seed=fails_at, user="alice")
            with pytest.MonkeyPatch.context() as patch:
                count = break_call(patch, gateway, fails_at)
                job, acknowledged = await asked(gateway, body, more)
                if acknowledged:
                    assert await visible(gateway, registered) == 0, f"law 5, call {fails_at}"
                for _ in range(3):
                    await gateway.opened.crew._attempt("deletions", gateway.opened.crew.go_on_deleting)
            if job:
                await gateway.wait(400)  # past every pause
                done = await finished(gateway, job)
                assert done["receipt"]["counts"] == {"entries": 3, "chunks": 3, "bytes": 3 * 528}, fails_at
                assert faults(msgspec.json.encode(done["receipt"]), gateway.opened.rooms.signer.public_key) == []
            if not job or kind == "label":
                await finished(gateway, await delete(gateway, ALL, "work", query={"confirm": "work"}))
            if count() < fails_at:
                break
        assert fails_at > 10, "the control: there were calls to fail"
        files = [path for path in (tmp_path / "gw" / "nvme" / "v1").rglob("*") if path.is_file()]
        assert files == []


def break_call(patch: pytest.MonkeyPatch, gateway: House, fails_at: int) -> Callable[[], int]:
    """Let call number `fails_at` of those that a deletion makes fail; how many there were is told."""
    calls = 0
    rooms = gateway.opened.rooms

    def breaking(target: Any, name: str, error: Exception) -> None:
        real = getattr(target, name)

        async def maybe(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise error
            return await real(*arguments)

        patch.setattr(target, name, maybe)

    breaking(Deletions, "_write", CatalogUnavailable("planted"))
    breaking(Deletions, "begin", CatalogUnavailable("planted"))
    breaking(Deletions, "scrub", CatalogUnavailable("planted"))
    breaking(type(rooms.catalog), "purge", CatalogUnavailable("planted"))
    breaking(type(rooms.keyring), "advance", KeyUnavailable("planted"))
    breaking(type(rooms.keyring), "destroy_for_good", KeyUnavailable("planted"))
    breaking(type(rooms.keyring), "is_gone", KeyUnavailable("planted"))
    breaking(type(rooms.tiers["nvme"]), "delete", TierUnavailable("planted"))
    breaking(type(rooms.tracers["nvme"]), "clear", TierUnavailable("planted"))
    return lambda: calls


async def asked(gateway: House, body: dict[str, Any], more: dict[str, Any]) -> tuple[Any, bool]:
    """Ask for a deletion; the job that there is now, if any, and whether it was acknowledged."""
    admin = Admin(gateway.opened)
    answer = await admin.ask("POST", "/v1/tenants/-/namespaces/work/deletions", body, peer=os.geteuid(), **more)
    assert answer.status_code in (200, 503), answer.text
    waiting = [one for one in await admin.own("GET", "/tenants/-/deletions") if one["state"] != "done"]
    return (waiting[0] if waiting else None), answer.status_code == 200


async def visible(gateway: House, registered: Registered) -> int:
    try:
        return (await gateway.client("work").match(registered, keys_of(3))).count
    except RequestRefused:  # the namespace is gone
        return 0
