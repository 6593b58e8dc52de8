"""What a narrow credential must not become, and what nobody may learn or hold from another (I02, I03, I14, F10)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any
from unittest import mock

import httpx2
import pytest
from msgspec.structs import replace

from kvgw.cli.app import main
from kvgw.cli.output import print_table
from kvgw.datadir import ADMIN_SOCKET
from kvgw.endpoint import TcpEndpoint
from kvgw.errors import RequestRefused
from kvgw.model import NamespaceCreateRequest, NamespacesReply, NamespacesRequest
from kvgw.server.http import CONNECTIONS_MAX
from kvgw.server.serve import serving
from kvgw.settings import ServerSettings
from tenancy import registry
from tenancy import tokens as tenancy_tokens
from tenancy.deletion.deletions import JOBS_MAX
from tests.kvgw.test_admin_access import two_tenants
from tests.kvgw.test_public import PROMPTS, get, town
from tests.support.admin import Admin
from tests.support.aio import aio
from tests.support.gateways import SMALL, format_of, house, keys_of, payloads_of, world_of

TENANT_ADMIN = ["ns:read", "ns:admin", "tenant:admin", "shred"]


async def narrow_token(admin: Admin, patterns: list[str]) -> str:
    wanted = {"name": "narrow", "permissions": TENANT_ADMIN, "namespaces": patterns, "default_namespace": "a-x"}
    return str((await admin.own("POST", "/tenants/ours/tokens", wanted))["token"])


@aio
async def test_a_token_gives_no_more_namespaces_than_its_maker_has(tmp_path: Path) -> None:
    """Law 6 inside a tenant: patterns are a bound like permissions, in a new token and in a successor."""
    async with two_tenants(tmp_path / "gw") as (admin, _, _):
        narrow = await narrow_token(admin, ["a-*"])
        broad = await admin.own("POST", "/tenants/ours/tokens", {"name": "broad", "permissions": ["ns:read"]})

        async def made(namespaces: list[str]) -> int:
            body = {"name": "new", "permissions": ["ns:read"], "namespaces": namespaces}
            return (await admin.ask("POST", "/v1/tenants/-/tokens", body, token=narrow)).status_code

        for within in (["a-x"], ["a-*"], ["a-b*", "a-*-c"]):
            assert await made(within) == 201, within
        for beyond in (["*"], ["a*"], ["b-x"], ["*a-x"], ["a-x", "*"]):
            assert await made(beyond) == 403, beyond
        answer = await admin.ask("POST", f"/v1/tenants/-/tokens/{broad['id']}/rotate", {}, token=narrow)
        assert answer.status_code == 403, "whoever rotates a token has its successor's text"
        assert "token" not in answer.json()


@aio
async def test_a_narrow_token_does_not_delete_the_whole_tenant(tmp_path: Path) -> None:
    async with two_tenants(tmp_path / "gw") as (admin, _, _):
        narrow = await narrow_token(admin, ["a-*"])
        answer = await admin.ask("POST", "/v1/tenants/-/deletions", token=narrow, query={"confirm": "ours"})
        assert answer.status_code == 403
        assert [one["name"] for one in await admin.own("GET", "/tenants/ours/namespaces")] == ["default"]


@aio
async def test_a_successor_begins_no_sooner_than_the_token_it_replaces(tmp_path: Path) -> None:
    async with two_tenants(tmp_path / "gw") as (admin, house_, _):
        later = house_.now_ms() + 3_600_000
        wanted = {"name": "later", "permissions": ["ns:read"], "not_before_ms": later}
        old = await admin.own("POST", "/tenants/ours/tokens", wanted)
        new = await admin.own("POST", f"/tenants/ours/tokens/{old['id']}/rotate", {})
        assert new["not_before_ms"] == later
        assert new["expires_ms"] > later
        assert (await admin.ask("GET", "/v1/tenants/-", token=new["token"])).status_code == 401


@aio
async def test_the_audit_log_does_not_tell_which_tenants_there_are(tmp_path: Path) -> None:
    """I03: a tenant that names readers learns neither their ids nor whether they exist."""
    async with two_tenants(tmp_path / "gw") as (admin, _, tokens):
        theirs = (await admin.own("GET", "/tenants/theirs"))["id"]
        for reader in ("theirs", "nobody"):
            body = {"visibility": "public", "readers": [reader]}
            answer = await admin.ask("PATCH", "/v1/tenants/-/namespaces/default", body, token=tokens["admin"])
            assert answer.status_code == 200, answer.text
        answer = await admin.ask("GET", "/v1/audit", token=tokens["admin"], query={"action": "namespace.policy"})
        assert theirs not in answer.text
        nobody, known = (one["detail"] for one in answer.json())
        assert '"readers":"theirs"' in known
        assert '"readers":"nobody"' in nobody


@aio
async def test_as_many_readers_as_there_may_be_are_audited(tmp_path: Path) -> None:
    async with two_tenants(tmp_path / "gw") as (admin, _, _):
        names = [f"{number:02}" + "r" * 62 for number in range(38)]
        for name in names:
            await admin.own("POST", "/tenants", {"name": name})
        body = {
            "visibility": "public",
            "readers": names,
            "hold_bytes": 2**60,
            "nvme_bytes": 2**60,
            "limit_bytes": 2**60,
        }
        shown = await admin.own("PATCH", "/tenants/ours/namespaces/default", body)
        assert shown["readers"] == names


@aio
async def test_over_the_wire_a_narrow_token_lists_its_own_and_who_makes_is_named(tmp_path: Path) -> None:
    async with house("tcp", tmp_path / "gw") as made:
        admin = Admin(made.opened)
        await admin.own("POST", "/tenants", {"name": "ours"})
        narrow = await narrow_token(admin, ["a-*"])
        caller = await made.opened.authenticator.token(narrow)
        await made.opened.gateway.answer(caller, NamespaceCreateRequest("a-x"))
        listed = await made.opened.gateway.answer(caller, NamespacesRequest())
        assert isinstance(listed, NamespacesReply)
        assert [one.name for one in listed.namespaces] == ["a-x"]
        (record, *_) = await admin.own("GET", "/audit", query={"tenant": "ours", "action": "namespace.create"})
        assert record["target"] == "a-x"
        assert record["actor"].startswith("token:"), "F10: who asked did it, not the gateway"


@aio
async def test_of_two_changes_at_once_none_takes_back_the_other(tmp_path: Path) -> None:
    """A namespace that was closed to its readers stays closed, whoever changes a TTL in the same moment."""
    async with two_tenants(tmp_path / "gw") as (admin, _, _):
        where = "/tenants/ours/namespaces/default"
        await admin.own("PATCH", where, {"visibility": "public", "readers": ["*"]})
        changes: list[dict[str, Any]] = [
            {"visibility": "private", "readers": []},
            {"default_ttl": "1h"},
            {"limit_objects": 7},
            {"limit_bytes": 2**30},
        ]
        answers = await asyncio.gather(*(admin.ask("PATCH", f"/v1{where}", one, peer=os.geteuid()) for one in changes))
        assert {one.status_code for one in answers} <= {200, 400}
        assert answers[0].status_code == 200
        shown = await admin.own("GET", where)
        for change, answer in zip(changes, answers, strict=True):
            if answer.status_code == 200:
                assert {name: shown[name] for name in change} == change
            else:
                assert "say it again" in answer.text


# Public namespaces


@aio
async def test_I14_a_suspended_owner_publishes_nothing(tmp_path: Path) -> None:
    async with town(tmp_path / "gw", ["reader"]) as made:
        await made.owned(1)
        reader = made.client("reader")
        registered = await reader.register(format_of())
        assert (await reader.match(registered, keys_of(1), public=[PROMPTS])).count == 1
        await made.admin.own("PATCH", "/tenants/owner", {"state": "suspended"})
        await made.house.wait(3.0)
        assert (await reader.match(registered, keys_of(1), public=[PROMPTS])).count == 0
        assert await get(reader, registered, keys_of(1), [PROMPTS]) != {}
        await made.admin.own("PATCH", "/tenants/owner", {"state": "active"})
        await made.house.wait(3.0)
        assert (await reader.match(registered, keys_of(1), public=[PROMPTS])).count == 1


@aio
async def test_what_is_wrong_with_an_owners_keys_costs_a_reader_nothing_of_its_own(tmp_path: Path) -> None:
    """Law 6: another tenant's key store trouble, or its shredding, is no outage of the reader's."""
    async with town(tmp_path / "gw", ["reader"]) as made:
        await made.owned(2)
        reader = made.client("reader")
        registered = await reader.register(format_of())
        mine = payloads_of(registered, 1, seed=3)
        await reader.put(registered, keys_of(1), mine)
        assert (await reader.match(registered, keys_of(2), public=[PROMPTS])).count == 2
        rooms = made.house.opened.rooms
        owner = await rooms.catalog.tenant("owner")
        assert owner is not None
        place = await rooms.catalog.namespace(owner, "prompts")
        assert place is not None
        # As another gateway does it: this one still remembers that the namespace is active.
        await rooms.keyring.destroy_for_good(place.scope)
        match = await reader.match(registered, keys_of(2), public=[PROMPTS])
        assert match.count == 1, "its own, and nothing of what is gone"
        _, got = await get(reader, registered, keys_of(2), [PROMPTS])
        assert got == {0: ("", mine[0])}


@aio
async def test_a_reader_does_not_end_its_owners_leases(tmp_path: Path) -> None:
    async with town(tmp_path / "gw", ["reader"]) as made:
        owner, owned = await made.owned(2)
        reader = made.client("reader")
        registered = await reader.register(format_of())
        await owner.match(owned, keys_of(2), lease_ms=60_000)
        leases = made.house.opened.rooms.leases
        assert leases.count() == 2
        await get(reader, registered, keys_of(2), [PROMPTS])
        assert leases.count() == 2, "law 6"
        await get(owner, owned, keys_of(1), [])
        assert leases.count() == 1, "the owner's own reading ends them"


@aio
async def test_I04_references_that_are_not_ones_own_to_read_cost_the_same_questions(tmp_path: Path) -> None:
    """Law 6: neither a tenant nor a private namespace shows by how often the catalog is asked, at first or again."""
    async with town(tmp_path / "gw", ["reader"]) as made:
        await made.owned(1)
        own = made.client("owner")
        await own.register(format_of())  # the owner's own use must not make its private namespace known
        stranger = made.client("stranger")
        registered = await stranger.register(format_of())
        await stranger.match(registered, keys_of(1))
        database = made.house.opened.rooms.catalog._database
        asked: list[Any] = []
        plain = database.read

        async def counted(body: Any, sight: Any) -> Any:
            asked.append(body)
            return await plain(body, sight)

        database.read = counted  # type: ignore[method-assign]
        costs = set()
        for reference in (PROMPTS, "owner/default", "owner/nothing", "nobody/prompts"):
            each = []
            for _ in range(3):
                asked.clear()
                await stranger.match(registered, keys_of(1), public=[reference])
                each.append(len(asked))
            costs.add(tuple(each))
        assert len(costs) == 1, costs


# HTTP


@aio
async def test_F01_a_name_that_no_database_takes_is_nobodys(tmp_path: Path) -> None:
    """A NUL never reaches PostgreSQL, which would refuse it as a failure of its own; SQLite is asked no less."""
    async with two_tenants(tmp_path / "gw") as (admin, made, _):
        uid = os.geteuid()
        database = made.opened.rooms.catalog._database
        plain, asked = database.read, 0

        async def counted(body: Any, sight: Any) -> Any:
            nonlocal asked
            asked += 1
            return await plain(body, sight)

        with mock.patch.object(database, "read", counted):
            for path in ("/v1/tenants/%00", "/v1/tenants/a%00b/namespaces", "/v1/tenants/%00/namespaces/%00"):
                assert (await admin.ask("GET", path, peer=uid)).status_code == 404
            assert asked == 0
            answer = await admin.ask("GET", "/v1/tenants/theirs/namespaces/%00", peer=uid)
            assert (answer.status_code, asked) == (404, 1), "the tenant alone was asked for"
            for name in ("actor", "action"):
                answer = await admin.ask("GET", "/v1/audit", query={"tenant": "*", name: "\0"}, peer=uid)
                assert answer.status_code == 422
            assert (await admin.ask("DELETE", "/v1/tenants/-/tokens/%00", peer=uid)).status_code == 422
            assert asked == 1


@pytest.mark.parametrize(
    "head", [b"POST /v1/tenants HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", b"GET / HTTP/1.1\r\n"]
)
@aio
async def test_peers_that_never_end_their_requests_shut_nobody_out(tmp_path: Path, head: bytes) -> None:
    """Law 9: neither over TCP nor on the gateway's own socket, which is its user's way in when all else is taken."""
    settings = replace(SMALL, server=ServerSettings(http="127.0.0.1:0"))
    async with serving(settings, tmp_path / "gw", world=world_of()) as served:
        assert isinstance(served.http, TcpEndpoint)
        peers = []
        for _ in range(CONNECTIONS_MAX + 4):
            _, writer = await asyncio.open_connection(served.http.host, served.http.port)
            writer.write(head)
            await writer.drain()
            peers.append(writer)
        base = f"http://{served.http.host}:{served.http.port}"
        async with httpx2.AsyncClient(base_url=base, timeout=5.0) as client:
            assert (await client.get("/livez")).status_code == 200
        transport = httpx2.AsyncHTTPTransport(uds=str(tmp_path / "gw" / ADMIN_SOCKET))
        async with httpx2.AsyncClient(transport=transport, base_url="http://kvgw", timeout=5.0) as client:
            assert (await client.get("/v1/tenants")).status_code == 200
        for writer in peers:
            writer.transport.abort()


# Deletions


@aio
async def test_a_tenants_deletions_that_wait_are_bounded_and_never_hide_that_of_a_namespace(tmp_path: Path) -> None:
    """Law 9; and an engine's token that asks for more and more does not keep its tenant's namespaces from going."""
    async with two_tenants(tmp_path / "gw") as (admin, made, tokens):
        body = {"age": {"moment": "created", "older_than": "1d"}}
        where = "/v1/tenants/-/namespaces/default/deletions"
        for _ in range(JOBS_MAX):
            assert (await admin.ask("POST", where, body, token=tokens["engine"])).status_code == 200
        answer = await admin.ask("POST", where, body, token=tokens["engine"])
        assert answer.status_code == 400
        assert f"at most {JOBS_MAX} may wait" in answer.text
        await admin.own("POST", "/tenants/theirs/namespaces/default/deletions", body)
        rooms = made.opened.rooms
        ours = await rooms.catalog.tenant("ours")
        assert ours is not None
        await admin.own(
            "POST", "/tenants/ours/namespaces/default/deletions", {"everything": True}, query={"confirm": "default"}
        )
        assert (await rooms.deletions.unfinished(ours))[0].kind == "namespace"


# Terminals


def test_F10_what_a_tenant_chose_is_neither_markup_nor_steers_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Keys of [/x]", ["model"], [["[/closing]"], ["[red]a"], ["b\x1b[31m\nFORGED"]])
    shown = capsys.readouterr().out
    for text in ("[/x]", "[/closing]", "[red]a", "b\\x1b[31m\\nFORGED"):
        assert text in shown
    assert "\x1b" not in shown


def test_an_error_that_looks_like_markup_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("kvgw.cli.app.app", side_effect=RequestRefused("'[/x]' is no name")), pytest.raises(SystemExit):
        main()
    assert "'[/x]' is no name" in capsys.readouterr().err


# What grows


@aio
async def test_namespaces_and_ended_tokens_of_a_tenant_are_bounded(tmp_path: Path) -> None:
    """Law 9: what a tenant's own admin makes without end ends; what is refused leaves no keys in the store."""
    async with two_tenants(tmp_path / "gw") as (admin, made, tokens):
        where = "/v1/tenants/-/namespaces"

        def key_files() -> int:
            return sum(file.is_file() for file in (tmp_path / "gw" / "keys").rglob("*"))

        with mock.patch.object(registry, "NAMESPACES_PER_TENANT_MAX", 3):
            for name in ("b", "c"):
                assert (await admin.ask("POST", where, {"name": name}, token=tokens["admin"])).status_code == 201
            kept = key_files()
            answer = await admin.ask("POST", where, {"name": "d"}, token=tokens["admin"])
            assert answer.status_code == 400
            assert "has 3 namespaces" in answer.text
            assert key_files() == kept
        with mock.patch.object(tenancy_tokens, "ENDED_KEPT_MAX", 4):
            for number in range(8):
                one = await admin.own(
                    "POST", "/tenants/theirs/tokens", {"name": f"t{number}", "permissions": ["ns:read"]}
                )
                await admin.own("DELETE", f"/tenants/theirs/tokens/{one['id']}")
                assert made.clock is not None
                made.clock.advance(0.002)
            last = await admin.own("POST", "/tenants/theirs/tokens", {"name": "last", "permissions": ["ns:read"]})
            listed = await admin.own("GET", "/tenants/theirs/tokens")
            assert [one["name"] for one in listed] == ["last", "t7", "t6", "t5", "t4"]
            assert (await admin.ask("GET", "/v1/tenants/-", token=last["token"])).status_code == 200


@aio
async def test_a_reader_runs_up_its_own_usage_and_not_its_owners(tmp_path: Path) -> None:
    """Law 6: whoever asks is counted, for hits and for misses."""
    async with town(tmp_path / "gw", ["reader"]) as made:
        await made.owned(2)
        reader = made.client("reader")
        registered = await reader.register(format_of())
        await get(reader, registered, keys_of(3), [PROMPTS])
        await made.house.opened.crew.books.write_down_usage()
        (theirs,) = await made.admin.own("GET", "/tenants/owner/usage")
        assert not [name for name in theirs["meters"] if name.startswith("get")]
        (own,) = await made.admin.own("GET", "/tenants/reader/usage")
        counted = {name: count for name, count in own["meters"].items() if name.startswith("get")}
        assert counted == {"gets": 1, "get_chunks": 2, "get_missed": 1, "get_bytes_staging": 2 * registered.chunk_bytes}
