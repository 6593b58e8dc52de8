"""``kvgw node forget``: what a gateway does about a node that never returns, and whom it lets ask for that."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace as replace_fields

from kvgw.errors import Code, RequestRefused
from kvgw.fence import LEASE_SECONDS
from kvgw.gateway import nodes
from kvgw.model import Durability, NodeForgetReply, NodeForgetRequest
from tenancy.access import Permission
from tests.support.aio import aio
from tests.support.gateways import House, format_of, house, keys_of, payloads_of, read
from tests.support.manual_clock import ManualClock
from tests.support.served import answer, kvgw
from tests.support.several import Footing, crash, on_footing, pass_time

pytestmark = [pytest.mark.timeout(120)]


async def forget(gateway: House, node: str, **changes: Any) -> NodeForgetReply:
    asked: Any = await gateway.opened.gateway.answer(gateway.owner, NodeForgetRequest(node, **changes))
    return asked


@pytest.mark.s3
@pytest.mark.postgres
@on_footing
async def test_a_node_that_never_returns_is_forgotten_from_the_command_line(shared: Footing) -> None:
    async with shared.gateway("a", clock=ManualClock()) as a:
        async with shared.gateway("b", clock=ManualClock()) as b:
            client, gone = b.client(), b.opened.rooms.catalog.node.node
            registered = await client.register(format_of())
            keys, payloads = keys_of(6), payloads_of(registered, 6)
            await client.put(registered, keys[:2], payloads[:2], durability=Durability.S3)
            await client.put(registered, keys[2:], payloads[2:])
            await b.opened.crew.drain_everywhere()
            await client.put(registered, [b"only-there"], payloads_of(registered, 1, 7))
            endpoint = ("--endpoint", str(a.endpoint))
            refused = await asyncio.to_thread(kvgw, "node", "forget", gone, *endpoint)
            assert (refused.returncode, f"'{gone}' is alive" in refused.stderr) == (1, True)
            await crash(b)
        await pass_time(a, 2 * LEASE_SECONDS)
        before = await a.client().stat()
        said = await asyncio.to_thread(answer, "node", "forget", gone, *endpoint)
        assert said == {"placements": 7, "entries": 1, "chunks": 1, "done": True}
        assert (await read(a.client(), registered, keys))[1] == payloads, "what is in S3 stays"
        now = await a.client().stat()
        assert (before.objects, now.objects) == (7, 6), "law 4: given back"
        assert await shared.rows(f"SELECT count(*) FROM placement WHERE node = '{gone}'") == [(0,)]
        unknown = await asyncio.to_thread(kvgw, "node", "forget", gone, *endpoint)
        assert (unknown.returncode, f"no node '{gone}' is known" in unknown.stderr) == (1, True)
        await shared.check_quota()


@aio
async def test_on_one_host_a_gateway_refuses_for_its_own_node_and_forgets_an_earlier_name(tmp_path: Path) -> None:
    clock = ManualClock()
    async with house("unix", tmp_path / "gw", clock=clock) as gateway:
        client = gateway.client()
        registered = await client.register(format_of())
        await client.put(registered, keys_of(5), payloads_of(registered, 5))
        own = gateway.opened.rooms.catalog.node.node
        with pytest.raises(RequestRefused, match=f"'{own}' is this gateway's own") as refusal:
            await forget(gateway, own)
        assert refusal.value.code is Code.BAD_REQUEST
        with pytest.raises(RequestRefused, match=f"no node 'nobody' is known; those that are: {own}"):
            await forget(gateway, "nobody")
        assert (await client.stat()).objects == 5
    renamed = replace_node(gateway, "renamed")
    async with house("unix", tmp_path / "gw", clock=clock, settings=renamed) as again:
        with mock.patch.object(nodes, "BATCH", 2), mock.patch.object(nodes, "TIME_SHARE", 0.0):
            pieces = [await forget(again, own)]
            while not pieces[-1].done:
                pieces.append(await forget(again, own, goes_on=True))
        assert [piece.placements for piece in pieces] == [2, 2, 1, 0], "piece by piece, as time allows"
        assert sum(piece.entries for piece in pieces) == sum(piece.chunks for piece in pieces) == 5
        assert (await again.client().stat()).objects == 0, "law 4"


def replace_node(gateway: House, name: str) -> Any:
    return replace_fields(gateway.opened.settings, node=name)


@aio
async def test_only_an_operator_forgets_a_node(tmp_path: Path) -> None:
    async with house("embedded", tmp_path / "gw") as gateway:
        caller = replace(gateway.owner, permissions=frozenset(Permission) - {Permission.OPERATOR})
        with pytest.raises(RequestRefused, match="lacks the permission operator"):
            await gateway.opened.gateway.answer(caller, NodeForgetRequest("other"))
