"""Keys over the admin API: who may, what has to be typed again, what is recorded, and what the answers say."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvgw.model import Durability
from tests.support.admin import Admin
from tests.support.aio import aio
from tests.support.gateways import House, format_of, house, keys_of, payloads_of, read
from tests.support.manual_clock import ManualClock

OURS = "/tenants/-/namespaces/default"


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Admin, House]]:
    async with house("embedded", folder, clock=ManualClock()) as gateway:
        yield Admin(gateway.opened), gateway


async def refused(admin: Admin, method: str, path: str, body: object = None, **more: Any) -> tuple[int, str]:
    answer = await admin.ask(method, f"/v1{path}", body, peer=os.geteuid(), **more)
    assert not answer.is_success, answer.text
    return answer.status_code, answer.json()["error"]["message"]


async def actions(gateway: House) -> list[tuple[str, str]]:
    rows = await gateway.rows("SELECT action, target FROM audit_record ORDER BY seq")
    return [(action, target) for action, target in rows if not action.endswith(".create")]


@aio
async def test_a_rotation_is_in_force_here_at_once_and_is_recorded(tmp_path: Path) -> None:
    async with served(tmp_path) as (admin, gateway):
        client = gateway.client()
        registered = await client.register(format_of())
        first, second = payloads_of(registered, 2), payloads_of(registered, 2, seed=1)
        await client.put(registered, keys_of(2), first)
        rotated = await admin.own("POST", f"{OURS}/keys/rotate", {"key": "data"})
        await client.put(registered, keys_of(2, "new"), second)
        assert (await read(client, registered, keys_of(2) + keys_of(2, "new")))[1] == first + second
        wrapped = await admin.own("POST", f"{OURS}/keys/rotate", {"key": "namespace"})
        assert list(rotated["versions"]) == ["1"]
        assert list(wrapped["versions"]) == ["2"]
        shown = await admin.own("GET", f"{OURS}/keys")
        assert [(one["epoch"], one["live_chunks"]) for one in shown["epochs"]] == [(1, 2), (2, 2)]
        root = await admin.own("POST", "/keys/rotate")
        done = await admin.own("POST", "/keys/rewrap")
        assert (done["root_key"], done["versions"], done["failed"]) == (root["key_id"], 2, {})
        assert (await admin.own("GET", "/keys"))["wrapped"] == {root["key_id"]: 2}
        status, sentence = await refused(admin, "POST", "/keys/rewrap", query={"retire": "true"})
        assert (status, sentence.rpartition("=")[2]) == (400, root["key_id"])
        kept = {"retire": "true", "confirm": root["key_id"]}
        assert len((await admin.own("POST", "/keys/rewrap", query=kept))["retired"]) == 1
        gateway.opened.rooms.keyring.forget((await gateway.place()).scope)
        assert (await read(client, registered, keys_of(2) + keys_of(2, "new")))[1] == first + second
        assert await actions(gateway) == [
            ("key.rotate_data", "default"),
            ("key.rotate_namespace", "default"),
            ("key.rotate_root", root["key_id"]),
            ("key.rewrap", ""),
            ("key.rewrap", ""),
        ]


@aio
async def test_what_cannot_be_undone_wants_the_name_again(tmp_path: Path) -> None:
    async with served(tmp_path) as (admin, gateway):
        client = gateway.client()
        registered = await client.register(format_of())
        payloads = payloads_of(registered, 2)
        await client.put(registered, keys_of(2), payloads)
        await admin.own("POST", f"{OURS}/keys/rotate", {})
        raised = {"min_decrypt_epoch": 2}
        for confirm in (None, {"confirm": "other"}):
            for method, path, body in (
                ("PATCH", f"{OURS}/keys", raised),
                ("POST", f"{OURS}/shred", None),
                ("POST", "/tenants/-/shred", None),
            ):
                assert await refused(admin, method, path, body, query=confirm) == (
                    400,
                    "this cannot be undone: repeat the name as confirm=default",
                )
        assert (await read(client, registered, keys_of(2)))[1] == payloads
        assert [action for action, _ in await actions(gateway)] == ["key.rotate_data"]
        found = await admin.own("PATCH", f"{OURS}/keys", raised, query={"confirm": "default"})
        assert (found["min_decrypt_epoch"], found["min_encrypt_epoch"]) == (2, 2)
        assert (await read(client, registered, keys_of(2)))[1] == [None, None]
        await admin.own("PATCH", f"{OURS}/keys", {"min_decrypt_epoch": 1, "min_encrypt_epoch": 1})


@aio
async def test_a_protected_namespace_keeps_the_whole_tenant_from_being_shredded(tmp_path: Path) -> None:
    async with served(tmp_path) as (admin, gateway):
        for name in ("a", "b"):
            await gateway.namespace(name, durability=Durability.STAGED)
        await admin.own("PATCH", "/tenants/-/namespaces/b/keys", {"deletion_allowed": False})
        confirmed = {"confirm": "default"}
        assert (await refused(admin, "POST", "/tenants/-/shred", query=confirmed))[0] == 400
        assert (await refused(admin, "POST", "/tenants/-/namespaces/b/shred", query={"confirm": "b"}))[0] == 400
        assert {one.state for one in await gateway.opened.rooms.catalog.namespaces(gateway.owner.tenant)} == {"active"}
        await admin.own("PATCH", "/tenants/-/namespaces/b/keys", {"deletion_allowed": True})
        done = await admin.own("POST", "/tenants/-/shred", query=confirmed)
        assert done["shredded"] == ["a", "b", "default"]
        assert (await admin.own("GET", f"{OURS}/keys"))["destroyed"]
        assert [action for action, _ in await actions(gateway)] == ["key.policy"] * 2 + ["namespace.shred"] * 3
        stores = [file.suffix for file in (tmp_path / "keys" / "namespaces").iterdir()]
        assert sorted(stores) == ["", ".gone", ".gone", ".gone", ".key"], "what is left: the generation and the pepper"


@pytest.mark.parametrize(
    ("lacks", "method", "path", "body"),
    [
        ("key:rotate", "POST", f"{OURS}/keys/rotate", {"key": "data"}),
        ("key:rotate", "PATCH", f"{OURS}/keys", {"deletion_allowed": True}),
        ("shred", "POST", f"{OURS}/shred", None),
        ("shred", "POST", "/tenants/-/shred", None),
        ("operator", "POST", "/keys/rewrap", None),
        ("operator", "POST", "/keys/rotate", None),
        ("operator", "GET", "/keys", None),
    ],
)
@aio
async def test_each_act_needs_its_own_permission(
    tmp_path: Path, lacks: str, method: str, path: str, body: object
) -> None:
    async with served(tmp_path) as (admin, gateway):
        others = ["ns:read", "ns:admin", "tenant:admin", "key:rotate", "shred", "operator"]
        others.remove(lacks)
        made = await admin.own("POST", "/tenants/-/tokens", {"name": "t", "permissions": others})
        before = await gateway.rows("SELECT count(*) FROM audit_record")
        query = {"confirm": "default"}
        answer = await admin.ask(method, f"/v1{path}", body, token=made["token"], query=query)
        assert answer.status_code == 403, answer.text
        assert lacks in answer.text
        assert await gateway.rows("SELECT count(*) FROM audit_record") == before
        assert (await gateway.place()).state == "active"


@pytest.mark.parametrize("body", [{"key": "root"}, {"keys": "data"}, {"key": 1}, [], "data"])
@aio
async def test_bodies_are_read_strictly(tmp_path: Path, body: object) -> None:
    async with served(tmp_path) as (admin, _):
        assert (await refused(admin, "POST", f"{OURS}/keys/rotate", body))[0] == 422
        for wrong in ({"min_decrypt_epoch": 0}, {"min_encrypt_epoch": 2**31}, {"deletion_allowed": 1}):
            assert (await refused(admin, "PATCH", f"{OURS}/keys", wrong))[0] == 422
