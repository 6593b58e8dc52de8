"""Who may ask what over HTTP: every route of the table, with every kind of wrong credential (I02, I03, I05)."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvgw.admin.app import OPEN_ROUTES
from kvgw.wiring import opened
from tests.support.admin import FILLED_IN, Admin
from tests.support.aio import aio
from tests.support.gateways import SMALL, House, world_of
from tests.support.manual_clock import ManualClock


@asynccontextmanager
async def two_tenants(folder: Path) -> AsyncIterator[tuple[Admin, House, dict[str, str]]]:
    """A gateway with the tenants ``ours`` and ``theirs``; tokens of ours by kind."""
    clock = ManualClock()
    async with opened(SMALL, folder, world=world_of(clock)) as gateway:
        admin, house = Admin(gateway), House(gateway, "embedded", None, gateway.first_token or "", clock)
        for name in ("ours", "theirs"):
            await admin.own("POST", "/tenants", {"name": name})
        kinds = {
            "engine": ["chunk:get", "chunk:put", "chunk:delete"],
            "admin": ["ns:read", "ns:admin", "tenant:admin", "audit:read", "metrics:read", "key:rotate", "shred"],
        }
        tokens = {
            kind: (await admin.own("POST", "/tenants/ours/tokens", {"name": kind, "permissions": permissions}))["token"]
            for kind, permissions in kinds.items()
        }
        short = {"name": "short", "permissions": ["ns:read"], "expires_in": "1s"}
        tokens["expired"] = (await admin.own("POST", "/tenants/ours/tokens", short))["token"]
        gone = await admin.own("POST", "/tenants/ours/tokens", {"name": "gone", "permissions": ["ns:read"]})
        await admin.own("DELETE", f"/tenants/ours/tokens/{gone['id']}")
        tokens["revoked"] = gone["token"]
        clock.advance(2.0)
        yield admin, house, tokens


def filled(path: str, **values: str) -> str:
    """A path with its parameters filled in."""
    known = {**FILLED_IN, **values}
    return re.sub(r"\{(\w+)\}", lambda found: known.get(found[1], "0" * 32), path)


@aio
async def test_I02_every_route_needs_a_credential_that_has_its_permission(tmp_path: Path) -> None:
    async with two_tenants(tmp_path / "gw") as (admin, _, tokens):
        routes = admin.routes()
        assert {path for _, path in routes} > OPEN_ROUTES, "the table is not empty"
        for method, path in routes:
            if path in OPEN_ROUTES:
                continue
            where = filled(path)
            for token in (
                None,
                "",
                "kvgw_",
                "x" * 4096,
                tokens["engine"][:-1] + "!",
                tokens["expired"],
                tokens["revoked"],
            ):
                answer = await admin.ask(method, where, token=token)
                assert answer.status_code == 401, f"{method} {path} with {token!r:.20}: {answer.text}"
                assert answer.headers["www-authenticate"] == "Bearer"
            answer = await admin.ask(method, where, peer=os.geteuid() + 1)
            assert answer.status_code == 401, f"{method} {path} of another user over the socket"
            answer = await admin.ask(method, where, body={} if method in ("POST", "PATCH", "PUT") else None,
                                     token=tokens["engine"])  # fmt: skip
            assert answer.status_code in (403, 422), f"{method} {path} with an engine's token: {answer.text}"


@aio
async def test_I03_another_tenant_and_none_at_all_get_the_same_answer(tmp_path: Path) -> None:
    async with two_tenants(tmp_path / "gw") as (admin, _, tokens):
        for method, path in admin.routes():
            if "{tenant}" not in path or method in ("POST", "PATCH", "PUT"):
                continue
            theirs = await admin.ask(method, filled(path, tenant="theirs"), token=tokens["admin"])
            nobodys = await admin.ask(method, filled(path, tenant="nobody"), token=tokens["admin"])
            assert theirs.status_code in (403, 404), f"{method} {path}: {theirs.text}"
            assert (theirs.status_code, theirs.content) == (nobodys.status_code, nobodys.content), path
            assert dict(theirs.headers) == dict(nobodys.headers)


@aio
async def test_an_operators_verb_is_no_tenants(tmp_path: Path) -> None:
    async with two_tenants(tmp_path / "gw") as (admin, _, tokens):
        token = tokens["admin"]
        for method, path, body in (
            ("GET", "/v1/tenants", None),
            ("POST", "/v1/tenants", {"name": "mine"}),
            ("PATCH", "/v1/tenants/ours", {"limits": {}}),
            ("PATCH", "/v1/tenants/-", {"state": "active"}),
        ):
            assert (await admin.ask(method, path, body, token=token)).status_code == 403
        assert len(await admin.own("GET", "/tenants")) == 3


@aio
async def test_I05_a_tenant_that_a_request_claims_is_not_believed(tmp_path: Path) -> None:
    async with two_tenants(tmp_path / "gw") as (admin, _, tokens):
        token = tokens["admin"]
        spoofed = {"x-tenant-id": "theirs", "x-kvgw-tenant": "theirs", "cache-salt": "theirs"}
        mine = await admin.ask("GET", "/v1/tenants/-", token=token, headers=spoofed, query={"tenant": "theirs"})
        assert mine.json()["name"] == "ours"
        for body in ({"name": "n", "tenant": "theirs"}, {"name": "n", "tenant_id": "theirs"}):
            answer = await admin.ask("POST", "/v1/tenants/-/namespaces", body, token=token)
            assert answer.status_code == 422
        twice = b'{"name": "mine", "name": "theirs"}'
        answer = await admin.ask("POST", "/v1/tenants/-/namespaces", raw=twice, token=token,
                                 headers={"content-type": "application/json"})  # fmt: skip
        assert answer.status_code == 400
        assert "named twice" in answer.text
        assert [one["name"] for one in await admin.own("GET", "/tenants/ours/namespaces")] == ["default"]
        assert [one["name"] for one in await admin.own("GET", "/tenants/theirs/namespaces")] == ["default"]


@aio
async def test_a_token_gives_no_more_than_its_maker_has(tmp_path: Path) -> None:
    async with two_tenants(tmp_path / "gw") as (admin, _, tokens):

        async def made(permissions: list[str], **more: Any) -> Any:
            body = {"name": "new", "permissions": permissions, **more}
            return await admin.ask("POST", "/v1/tenants/-/tokens", body, token=tokens["admin"])

        assert (await made(["ns:read", "metrics:read"])).status_code == 201
        assert (await made(["chunk:get"])).status_code == 403, "it cannot read chunks, nor let others"
        assert (await made(["operator"])).status_code == 403
        dangerous = await admin.ask(
            "POST",
            "/v1/tenants/ours/tokens",
            {"name": "both", "permissions": ["shred", "chunk:get"]},
            peer=os.geteuid(),
        )
        assert dangerous.status_code == 400
        assert "make two" in dangerous.text
        for wrong in (
            {"expires_in": "366d"},
            {"expires_in": "-1d"},
            {"expires_in": "1e9d"},
            {"namespaces": ["../x"]},
            {"namespaces": []},
            {"namespaces": ["a"] * 16},
            {"default_namespace": "a/b"},
            {"name": "a\nb"},
            {"name": "\u202e"},
            {"not_before_ms": -1},
            {"not_before_ms": "10"},
        ):
            answer = await made(["ns:read"], **wrong)
            assert answer.status_code in (400, 422), f"{wrong}: {answer.text}"


@aio
async def test_I17_no_secret_of_a_token_is_kept(tmp_path: Path) -> None:
    async with two_tenants(tmp_path / "gw") as (admin, house, tokens):
        for text in tokens.values():
            secret = text.split("_", 2)[2]
            for table in ("api_token", "audit_record"):
                for row in await house.rows(f"SELECT * FROM {table}"):
                    assert secret[:16] not in repr(row)
        listed = await admin.own("GET", "/tenants/ours/tokens")
        assert all("token" not in one and "digest" not in one for one in listed)
