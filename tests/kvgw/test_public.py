"""Public namespaces: read by those whom their owner names, written by the owner alone, never mistaken (I14)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvgw.client import Client
from kvgw.errors import FormatError, RequestRefused
from kvgw.reports import GetReport, Registered
from tests.support.admin import Admin
from tests.support.aio import aio
from tests.support.gateways import House, buffers_for, format_of, house, keys_of, payloads_of
from tests.support.manual_clock import ManualClock

PROMPTS = "owner/prompts"
PERMISSIONS = ["chunk:get", "chunk:put", "chunk:delete", "ns:read"]


@dataclass
class Town:
    """Tenants ``owner`` (with the public namespace ``prompts``), ``reader`` and ``stranger``."""

    admin: Admin
    house: House
    tokens: dict[str, str]

    def client(self, tenant: str, namespace: str = "") -> Client:
        return self.house.client(namespace, token=self.tokens[tenant])

    async def owned(self, count: int) -> tuple[Client, Registered]:
        """The owner's client, with chunks in the public namespace."""
        client = self.client("owner", "prompts")
        registered = await client.register(format_of())
        await client.put(registered, keys_of(count), payloads_of(registered, count))
        return client, registered


@asynccontextmanager
async def town(folder: Path, readers: list[str], kind: Any = "tcp") -> AsyncIterator[Town]:
    async with house(kind, folder, clock=ManualClock()) as made:
        admin = Admin(made.opened)
        tokens = {}
        for name in ("owner", "reader", "stranger"):
            await admin.own("POST", "/tenants", {"name": name})
            wanted = {"name": "t", "permissions": PERMISSIONS}
            tokens[name] = (await admin.own("POST", f"/tenants/{name}/tokens", wanted))["token"]
        policy = {"name": "prompts", "visibility": "public", "readers": readers}
        shown = await admin.own("POST", "/tenants/owner/namespaces", policy)
        assert shown["readers"] == readers
        yield Town(admin, made, tokens)


async def get(client: Client, registered: Registered, keys: list[bytes], public: list[str]) -> tuple[GetReport, Any]:
    buffers = buffers_for(registered, len(keys))
    report = await client.get(registered, keys, buffers, public=public)
    return report, {hit.index: (hit.namespace, bytes(buffers[hit.index])) for hit in report.hits}


@pytest.mark.parametrize("readers", [["reader"], ["*"]])
@aio
async def test_a_public_prefix_and_a_private_suffix_are_one_match(tmp_path: Path, readers: list[str]) -> None:
    async with town(tmp_path / "gw", readers) as made:
        await made.owned(3)
        reader = made.client("reader")
        registered = await reader.register(format_of())
        keys = keys_of(5)
        mine = payloads_of(registered, 5, seed=7)
        await reader.put(registered, keys[3:], mine[3:], parent=keys[2], depth=3)
        assert (await reader.match(registered, keys)).count == 0, "only who asks for it gets what is shared"
        match = await reader.match(registered, keys, public=[PROMPTS])
        assert (match.count, match.namespaces) == (5, (PROMPTS, PROMPTS, PROMPTS, "", ""))
        assert match.cached_tokens == 5 * 16
        report, got = await get(reader, registered, keys, [PROMPTS])
        theirs = payloads_of(registered, 5)
        assert got == {
            **{index: (PROMPTS, theirs[index]) for index in range(3)},
            **{index: ("", mine[index]) for index in (3, 4)},
        }, "a shared hit is told from one's own"
        assert report.cached_tokens == 5 * 16


@aio
async def test_what_is_ones_own_comes_before_what_is_shared(tmp_path: Path) -> None:
    async with town(tmp_path / "gw", ["reader"]) as made:
        await made.owned(1)
        reader = made.client("reader")
        registered = await reader.register(format_of())
        mine = payloads_of(registered, 1, seed=3)
        await reader.put(registered, keys_of(1), mine)
        _, got = await get(reader, registered, keys_of(1), [PROMPTS])
        assert got == {0: ("", mine[0])}


@aio
async def test_I14_who_is_not_named_gets_what_one_gets_of_nothing(tmp_path: Path) -> None:
    async with town(tmp_path / "gw", ["reader"]) as made:
        await made.owned(2)
        stranger = made.client("stranger")
        registered = await stranger.register(format_of())
        for reference in (
            PROMPTS,
            "owner/nothing",
            "nobody/prompts",
            "owner/default",
            "owner/../prompts",
            "OWNER/prompts",
        ):
            if reference.count("/") > 1:
                with pytest.raises(FormatError):
                    await stranger.match(registered, keys_of(2), public=[reference])
                continue
            match = await stranger.match(registered, keys_of(2), public=[reference])
            assert (match.count, match.reason) == (0, ""), reference
            report, got = await get(stranger, registered, keys_of(2), [reference])
            assert (got, report.reason) == ({}, ""), reference


@aio
async def test_I14_a_reader_neither_writes_nor_deletes_nor_lists(tmp_path: Path) -> None:
    async with town(tmp_path / "gw", ["*"]) as made:
        owner, owned = await made.owned(2)
        for claim in ("prompts", "owner/prompts"):
            intruder = made.client("reader", claim)
            with pytest.raises(RequestRefused):
                await intruder.register(format_of())
            with pytest.raises(RequestRefused):
                await intruder.delete(owned, keys_of(2))
            with pytest.raises(RequestRefused):
                await intruder.stat()
        for path in ("/v1/tenants/owner/namespaces", "/v1/tenants/owner/namespaces/prompts", "/v1/tenants/owner"):
            answer = await made.admin.ask("GET", path, token=made.tokens["reader"])
            assert answer.status_code == 404, path
        assert (await owner.match(owned, keys_of(2))).count == 2


@aio
async def test_I14_closing_a_namespace_ends_its_reading_within_seconds(tmp_path: Path) -> None:
    async with town(tmp_path / "gw", ["reader"]) as made:
        await made.owned(1)
        reader = made.client("reader")
        registered = await reader.register(format_of())
        assert (await reader.match(registered, keys_of(1), public=[PROMPTS])).count == 1
        await made.admin.own("PATCH", "/tenants/owner/namespaces/prompts", {"visibility": "private", "readers": []})
        await made.house.wait(3.0)
        assert (await reader.match(registered, keys_of(1), public=[PROMPTS])).count == 0
        contradiction = {"visibility": "public"}
        answer = await made.admin.ask("PATCH", "/v1/tenants/owner/namespaces/prompts", contradiction, peer=0)
        assert answer.status_code in (400, 401)


@aio
async def test_a_later_tenant_of_a_readers_name_is_no_reader(tmp_path: Path) -> None:
    async with town(tmp_path / "gw", ["later"]) as made:
        await made.owned(1)
        await made.admin.own("POST", "/tenants", {"name": "later"})
        wanted = {"name": "t", "permissions": PERMISSIONS}
        made.tokens["later"] = (await made.admin.own("POST", "/tenants/later/tokens", wanted))["token"]
        later = made.client("later")
        registered = await later.register(format_of())
        assert (await later.match(registered, keys_of(1), public=[PROMPTS])).count == 0, "ids count, not names"
        await made.admin.own("PATCH", "/tenants/owner/namespaces/prompts", {"readers": ["later"]})
        await made.house.wait(3.0)
        assert (await later.match(registered, keys_of(1), public=[PROMPTS])).count == 1, "named again, now it is"


@aio
async def test_a_format_that_the_owner_does_not_have_is_a_miss(tmp_path: Path) -> None:
    async with town(tmp_path / "gw", ["reader"]) as made:
        await made.owned(1)
        reader = made.client("reader")
        other = await reader.register(format_of(adapter="lora", adapter_digest=b"d" * 32))
        assert (await reader.match(other, keys_of(1), public=[PROMPTS])).count == 0


@aio
async def test_wrong_references_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async with house("embedded", tmp_path / "gw") as made:
        client = made.client()
        registered = await client.register(format_of())
        wrong: list[Any] = [
            "owner/prompts",
            ["owner"],
            ["/x"],
            ["x/"],
            ["a/b/c"],
            ["a" * 100 + "/" + "b" * 100],
            ["a/b"] * 5,
        ]
        for public in wrong:
            with pytest.raises(FormatError):
                await client.match(registered, keys_of(1), public=public)
