"""The right to be deleted, end to end: canaries and blob names sought in every tier; and leaks that are planted."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvgw.client import Client
from kvgw.fence import LEASE_SECONDS
from kvgw.model import Durability
from kvgw.reports import Registered
from storage.tier import blob_name
from tenancy.model import Scope
from tests.support.admin import Admin
from tests.support.aio import aio
from tests.support.deletions import (
    ALICE,
    CANARY,
    delete,
    finished,
    found_in_bucket,
    found_in_files,
    found_in_memory,
    job_of,
    put,
)
from tests.support.gateways import House, format_of, house, keys_of, read, take_up_backlog
from tests.support.manual_clock import ManualClock
from tests.support.several import Footing, crash, on_footing, pass_time
from tests.tenancy.statement_lint import linted_statements

ALL = {"everything": True}
BODIES = {"label": ALICE, "namespace": ALL}
CONFIRMED = {"query": {"confirm": "work"}}


async def stored(gateway: House) -> tuple[Client, Registered]:
    """Alice's canaries in a namespace of their own, and another person's beside them."""
    await gateway.namespace("work")
    client = gateway.client("work")
    return client, await client.register(format_of())


async def blobs_of(gateway: House, scope: Scope) -> list[str]:
    """Names of all blobs of the namespace that have a row."""
    rows = await gateway.rows("SELECT namespace_id, blob_id FROM chunk")
    mine = {scope.namespace, scope.namespace.hex}
    return [blob_name(scope.namespace, bytes(blob)) for namespace, blob in rows if namespace in mine]


def needles_of(names: list[str], contents: list[bytes]) -> list[bytes]:
    """What must not be found: plaintext, the blobs' names, and the middle of each blob's sealed bytes."""
    return [CANARY, *(name.rpartition("/")[2].encode() for name in names), *(one[1000:1064] for one in contents)]


@pytest.mark.parametrize("kind", [pytest.param("label", marks=pytest.mark.slow), "namespace"])
@aio
async def test_S22_on_sqlite_and_nvme(tmp_path: Path, kind: str) -> None:
    """Law 5. What is sealed may stay in given-back memory until it is used again; what is not sealed may not."""
    folder = tmp_path / "gw"
    async with house("unix", folder) as gateway:
        client, registered = await stored(gateway)
        payloads = await put(client, registered, keys_of(4), user="alice")
        assert (await read(client, registered, keys_of(4)))[1] == payloads
        scope = (await gateway.place("work")).scope
        names = await blobs_of(gateway, scope)
        contents = [(folder / "nvme" / name).read_bytes() for name in names]
        needles = needles_of(names, contents)
        quarantined = blob_name(scope.namespace, bytes.fromhex(names[0][-32:]))
        await gateway.opened.rooms.catalog.quarantine(
            scope, bytes.fromhex(quarantined[-32:]), "nvme", gateway.opened.rooms.catalog.node.node, gateway.now_ms()
        )
        assert len(found_in_files(folder, needles[1:])) >= 4, "the control: before, they are found"
        assert found_in_memory(gateway, needles[5:])
        job = await delete(gateway, BODIES[kind], "work", **CONFIRMED)
        receipt = (await finished(gateway, job))["receipt"]
        assert {look["tier"] for look in receipt["looks"]} >= {"staging", "nvme", "catalog"}
        assert found_in_memory(gateway, [CANARY]) == []
        in_records = [needle for needle in needles if needle.decode("latin-1") in str(receipt).lower()]
        assert CANARY not in in_records
        # The receipt itself names what is gone, and it is kept in the catalog.
        files = [one for one in found_in_files(folder, needles) if "catalog.db" not in one]
        assert files == []
        assert found_in_files(folder, [CANARY, *needles[5:]]) == []


@pytest.mark.s3
@pytest.mark.postgres
@pytest.mark.timeout(180)
@pytest.mark.parametrize("versioned", [False, True])
def test_S22_on_postgres_and_s3(postgres: Any, seaweed: Any, tmp_path: Path, versioned: bool) -> None:
    """Law 5: two gateways, write-back, promotion, old versions and an upload that was never completed."""

    async def body(shared: Footing) -> None:
        bucket, prefix = seaweed.bucket, f"{shared.database}/"
        async with shared.gateway("a", clock=ManualClock()) as a, shared.gateway("b", clock=ManualClock()) as b:
            client, registered = await stored(a)
            payloads = await put(client, registered, keys_of(3), user="alice", durability=Durability.S3)
            await a.opened.crew.drain_everywhere()
            elsewhere = b.client("work")
            await elsewhere.register(format_of())
            assert (await read(elsewhere, registered, keys_of(3)))[1] == payloads
            await take_up_backlog(b.opened.crew)  # now b has them on its own disk too
            scope = (await a.place("work")).scope
            names = await blobs_of(a, scope)
            contents = [(tmp_path / "b" / "nvme" / name).read_bytes() for name in names]
            needles = needles_of(names, contents)
            with seaweed.client() as s3:
                if versioned:
                    s3.put_object(Bucket=bucket, Key=prefix + names[0], Body=contents[0])  # a second version
                s3.create_multipart_upload(Bucket=bucket, Key=prefix + names[1])
            assert len(found_in_bucket(seaweed, prefix, needles)) >= 4, "the control: before, they are found"
            job = await delete(a, ALL, "work", **CONFIRMED)
            receipt = (await finished([a, b], job))["receipt"]
            nodes = {look["node"] for look in receipt["looks"] if look["tier"] == "nvme"}
            assert nodes == {one.opened.rooms.catalog.node.node for one in (a, b)}, "each gateway looked for itself"
            assert {look["tier"] for look in receipt["looks"]} == {"staging", "nvme", "s3", "catalog", "keys"}
            for gateway in (a, b):
                assert found_in_memory(gateway, [CANARY]) == []
                assert found_in_files(gateway.opened.folder, needles) == []
            assert found_in_bucket(seaweed, prefix, needles) == []
            assert found_in_bucket(seaweed, f"{prefix}v1/", [str(scope.namespace).encode()]) == []
            await shared.check_quota()
            assert await shared.rows(f"SELECT count(*) FROM chunk WHERE namespace_id = '{scope.namespace}'") == [(0,)]

    with seaweed.client() as s3:
        status = "Enabled" if versioned else "Suspended"
        s3.put_bucket_versioning(Bucket=seaweed.bucket, VersioningConfiguration={"Status": status})
    on_footing(body)(postgres, seaweed, tmp_path)


@asynccontextmanager
async def verifying(gateway: House, kind: str) -> AsyncIterator[tuple[dict[str, Any], str, bytes]]:
    """A job whose bytes are gone and whose verification is next; the name and the bytes of one of its blobs."""
    client, registered = await stored(gateway)
    await put(client, registered, keys_of(2), user="alice")
    await gateway.opened.crew.drain_everywhere()
    name = (await blobs_of(gateway, (await gateway.place("work")).scope))[0]
    content = (gateway.opened.folder / "nvme" / name).read_bytes()
    job = await delete(gateway, BODIES[kind], "work", **CONFIRMED)
    while (await one_step(gateway, job))["state"] != "verifying":
        continue
    yield job, name, content


async def plant(gateway: House, where: str, name: str, content: bytes, server: Any, prefix: str) -> None:
    """Leave in a tier what a deletion should have taken."""
    rooms = gateway.opened.rooms
    if where == "staging":

        async def fill(view: memoryview) -> None:
            view[:] = content

        async with rooms.staging.read(gateway.owner.tenant, name, len(content), 1.0, fill):
            pass
    elif where == "nvme":
        path = gateway.opened.folder / "nvme" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    elif where == "nvme, being written":
        (gateway.opened.folder / "nvme" / "tmp" / f"{name[-32:]}.0").write_bytes(content)
    elif where == "s3":
        with server.client() as s3:
            s3.put_object(Bucket=server.bucket, Key=prefix + name, Body=content)
    elif where == "s3, an upload":
        with server.client() as s3:
            s3.create_multipart_upload(Bucket=server.bucket, Key=prefix + name)
    elif where == "s3, an old version":
        with server.client() as s3:
            s3.put_object(Bucket=server.bucket, Key=prefix + name, Body=content)
            s3.delete_object(Bucket=server.bucket, Key=prefix + name)
    else:
        raise AssertionError(where)


LEAKS = {
    "label": {"staging": "staging", "nvme, being written": "nvme", "s3, an old version": "s3"},
    "namespace": {"nvme": "nvme", "s3": "s3", "s3, an upload": "s3"},
}


@pytest.mark.s3
@pytest.mark.postgres
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [pytest.param("label", marks=pytest.mark.slow), "namespace"])
def test_S23_a_leak_in_any_tier_makes_verification_fail_and_names_it(
    postgres: Any, seaweed: Any, tmp_path: Path, kind: str
) -> None:
    """A receipt is worth something only if it cannot be had while something is left."""

    async def body(shared: Footing) -> None:
        prefix, clock = f"{shared.database}/", ManualClock()
        async with shared.gateway("a", clock=clock) as a:
            for where, tier in LEAKS[kind].items():
                async with verifying(a, kind) as (job, name, content):
                    await plant(a, where, name, content, seaweed, prefix)
                    failed = await one_step(a, job)
                    assert failed["state"] == "failed", where
                    assert failed["receipt"] is None
                    assert f"in {tier} of node" in failed["sentence"], where
                    assert name[-32:] in failed["sentence"], where
                    await a.opened.crew.go_on_deleting()
                    assert (await job_of(a, job))["state"] == "failed", "not tried again at once"
                    if where == "nvme, being written":  # whoever writes it ends
                        (a.opened.folder / "nvme" / "tmp" / f"{name[-32:]}.0").unlink()
                    await pass_time(a, 2)
                    done = await finished(a, job)
                    assert done["receipt"]["attempts"] == 2, where
                    if kind == "label":
                        other = await delete(a, ALL, "work", **CONFIRMED)
                        await finished(a, other)
            assert found_in_bucket(seaweed, f"{prefix}v1/", [b"v1/"]) == []

    with seaweed.client() as s3:
        s3.put_bucket_versioning(Bucket=seaweed.bucket, VersioningConfiguration={"Status": "Enabled"})
    on_footing(body)(postgres, seaweed, tmp_path)


async def one_step(gateway: House, job: dict[str, Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvgw.maintenance.erasing.STEPS_MAX", 1)
        await gateway.opened.crew.go_on_deleting()
    return await job_of(gateway, job)


@aio
async def test_S23_a_row_that_is_left_makes_verification_fail(tmp_path: Path) -> None:
    async with (
        house("embedded", tmp_path / "gw", clock=ManualClock(), check=False) as gateway,
        verifying(gateway, "label") as (job, name, _),
    ):
        client = gateway.client("work")
        await put(client, await client.register(format_of()), keys_of(1), seed=7)
        columns = [row[1] for row in await gateway.rows("PRAGMA table_info(chunk)")]
        copied = {"blob_id": f"X'{name[-32:]}'", "state": "'deleting'"}
        chosen = ", ".join(copied.get(column, column) for column in columns)
        await gateway.opened.rooms.catalog._database.write(
            lambda connection: connection.exec_driver_sql(f"INSERT INTO chunk SELECT {chosen} FROM chunk LIMIT 1")
        )
        failed = await one_step(gateway, job)
        assert failed["state"] == "failed"
        assert "in catalog of node" in failed["sentence"]
        assert name[-32:] in failed["sentence"]


@aio
async def test_S23_a_key_that_comes_back_makes_verification_fail(tmp_path: Path) -> None:
    clock = ManualClock()
    async with house("embedded", tmp_path / "gw", clock=clock) as gateway:
        await gateway.namespace("spare")
        spare = (await gateway.place("spare")).scope.namespace
        async with verifying(gateway, "namespace") as (job, name, _):
            gone = name.split("/")[1]
            keys = tmp_path / "gw" / "keys" / "namespaces"
            (keys / f"{gone}.gone").unlink()
            shutil.copy(keys / f"{spare}.key", keys / f"{gone}.key")
            failed = await one_step(gateway, job)
            assert failed["state"] == "failed"
            assert f"in keys of node {gateway.opened.rooms.catalog.node.node}: the key of" in failed["sentence"]
            clock.advance(5)
            assert (await finished(gateway, job))["receipt"]["attempts"] == 2
            assert not (keys / f"{gone}.key").exists(), "destroyed once more"


@pytest.mark.s3
@pytest.mark.postgres
@pytest.mark.timeout(120)
@on_footing
async def test_another_gateway_takes_a_job_over_from_one_that_died(shared: Footing) -> None:
    there = ManualClock()
    async with shared.gateway("b", clock=there) as b:
        async with shared.gateway("a", clock=ManualClock()) as a:
            client, registered = await stored(a)
            await put(client, registered, keys_of(3), user="alice", durability=Durability.S3)
            await a.opened.crew.drain_everywhere()
            assert await a.opened.crew._leads("deletions", 10.0)
            job = await delete(a, ALICE, "work")
            await b.opened.crew.go_on_deleting()
            assert (await job_of(b, job))["state"] == "erasing", "one of them leads, and it is not this one"
            await crash(a)
        await pass_time(b, 2 * LEASE_SECONDS + 30)
        await b.opened.crew.go_on_deleting()
        waiting = await job_of(b, job)
        assert waiting["state"] == "erasing"
        assert "kvgw node forget" in waiting["sentence"], "the dead one's disk still has them, and only it can delete"
        async with shared.gateway("a", clock=there) as a:
            done = await finished([b, a], job)
            assert {look["node"] for look in done["receipt"]["looks"] if look["tier"] == "nvme"} == {
                one.opened.rooms.catalog.node.node for one in (a, b)
            }


@pytest.mark.s3
@pytest.mark.postgres
@pytest.mark.timeout(120)
@on_footing
async def test_no_receipt_before_every_living_gateway_has_looked(shared: Footing) -> None:
    async with shared.gateway("a", clock=ManualClock()) as a, shared.gateway("b", clock=ManualClock()) as b:
        client, registered = await stored(a)
        payloads = await put(client, registered, keys_of(2), user="alice", durability=Durability.S3)
        elsewhere = b.client("work")
        await elsewhere.register(format_of())
        assert (await read(elsewhere, registered, keys_of(2)))[1] == payloads
        names = await blobs_of(a, (await a.place("work")).scope)
        job = await delete(a, ALICE, "work")
        for _ in range(4):
            await a.opened.crew.go_on_deleting()
        assert (await job_of(a, job))["state"] == "erasing"
        assert all(b.opened.rooms.staging.holds(name) for name in names), "b still has them in memory"
        await finished([a, b], job)
        assert b.opened.rooms.staging.names() == []
        answer = await Admin(b.opened).own("GET", f"/tenants/-/deletions/{job['id']}")
        assert answer["receipt"]["blobs"]["count"] == 2, "any gateway tells"


@pytest.mark.s3
@pytest.mark.postgres
@pytest.mark.timeout(120)
@on_footing
async def test_every_kind_of_selector_on_postgres(shared: Footing) -> None:
    """Under row-level security, every statement with its tenant (I08)."""
    clock = ManualClock()
    async with shared.gateway("a", clock=clock) as a:
        client = a.client()
        registered = await client.register(format_of(256))
        tuned = await client.register(format_of(256, adapter="hers", adapter_digest=b"a" * 32))
        fingerprint = registered.fingerprint.hex()
        trunk, branch = keys_of(4, "trunk"), keys_of(2, "branch")
        await put(client, registered, trunk, seed=1)
        await put(client, registered, branch, seed=2, parent=trunk[1], depth=2)
        await put(client, registered, keys_of(3), seed=3, user="alice")
        await put(client, registered, keys_of(2, "old"), seed=4)
        await put(client, tuned, keys_of(2), seed=5)
        with linted_statements():
            bodies = (
                {"prefix": {"format": fingerprint, "key": trunk[1].hex()}},
                {"keys": {"format": fingerprint, "keys": [trunk[0].hex(), b"none".hex()]}},
                ALICE,
                {"format": {"field": "adapter", "value": "hers"}},
            )
            counts = [(await delete(a, body))["entries"] for body in bodies]
            await pass_time(a, 100)
            await put(client, registered, keys_of(1, "new"), seed=6)
            counts.append((await delete(a, {"age": {"moment": "created", "older_than": "50s"}}))["entries"])
            assert counts == [5, 1, 3, 2, 2]
            for _ in range(3):
                await a.opened.crew.go_on_deleting()
            admin = Admin(a.opened)
            assert {one["state"] for one in await admin.own("GET", "/tenants/-/deletions")} == {"done"}
            tenant = (await admin.own("POST", "/tenants", {"name": "acme"}))["id"]
            job = await admin.own("POST", "/tenants/acme/deletions", query={"confirm": "acme"})
            assert len((await finished(a, job, tenant))["receipt"]["parts"]) == 1
        assert await shared.rows("SELECT count(*) FROM chunk") == [(1,)]
        assert (await client.match(registered, keys_of(1, "new"))).count == 1
        await shared.check_quota()
