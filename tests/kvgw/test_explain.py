"""Why there was no hit: every answer, over every transport's own gateway code, and nothing about anybody else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace as replace_fields

from kvgw.errors import RequestRefused
from kvgw.gateway.explain import SHOWN_MAX
from kvgw.maintenance.sweep import TOMBSTONE_DAYS
from kvgw.model import Difference, Durability, ExplainReply, ExplainRequest, KeyAnswer, PutOutcome, Why
from tenancy import explaining
from tenancy.access import Permission
from tenancy.model import Node
from tests.kvgw.maintenance_bench import Works, works
from tests.support.admin import Admin
from tests.support.aio import aio
from tests.support.gateways import format_of, keys_of

DAY = 86_400


async def why(one: Works, *keys: str) -> list[Why]:
    reply = await one.client.explain(one.registered, [key.encode() for key in keys])
    return [answer.why for answer in reply.answers]


async def answer(one: Works, key: str) -> KeyAnswer:
    (found,) = (await one.client.explain(one.registered, [key.encode()])).answers
    return found


async def run(one: Works, statement: str) -> None:
    await one.rooms.catalog._database.write(lambda connection: connection.exec_driver_sql(statement))


def test_both_rooms_know_the_same_reasons() -> None:
    assert [one.value for one in Why] == [one.value for one in explaining.Why]


@aio
async def test_visible_and_never_stored(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        await one.put(2)
        assert await why(one, "key-0", "nobody", "key-1") == [Why.VISIBLE, Why.UNKNOWN, Why.VISIBLE]


@aio
async def test_deleted_until_the_catalog_forgets(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        await one.put(1)
        await one.client.delete(one.registered, keys_of(1))
        assert await answer(one, "key-0") == KeyAnswer(Why.DELETED, one.rooms.time.now_ms())
        await one.wait(TOMBSTONE_DAYS * DAY + 60)
        await one.crew.sweep_everywhere()
        assert await answer(one, "key-0") == KeyAnswer(Why.UNKNOWN, 0)
        await one.put(1)
        assert await why(one, "key-0") == [Why.VISIBLE]


@aio
async def test_expired_before_and_after_the_sweep(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        await one.put(1, ttl=60.0)
        due_ms = one.rooms.time.now_ms() + 60_000
        await one.wait(61)
        assert await answer(one, "key-0") == KeyAnswer(Why.EXPIRED, due_ms)
        await one.crew.sweep_everywhere()
        assert await answer(one, "key-0") == KeyAnswer(Why.EXPIRED, one.rooms.time.now_ms())


@aio
async def test_evicted(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        await one.put(1)
        ((blob,),) = await rows(one, "SELECT blob_id FROM chunk")
        assert await one.rooms.catalog.evict_nvme(one.scope, [blob], one.rooms.time.now_ms()) == [blob]
        assert await why(one, "key-0") == [Why.EVICTED]


async def rows(one: Works, statement: str) -> list[Any]:
    return await one.rooms.catalog._database.read(
        lambda connection: [tuple(row) for row in connection.exec_driver_sql(statement)]
    )


@aio
async def test_lost_with_a_staging_and_found_damaged(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        await one.put(1, durability=Durability.NVME)
        await run(one, "UPDATE placement SET state = 'quarantined'")
        await run(one, "UPDATE chunk SET home_boot = 'gone'")
        assert await why(one, "key-0") == [Why.LOST], "no bytes anywhere, and nobody who might have them"
        await one.crew.sweep_everywhere()
        assert await why(one, "key-0") == [Why.LOST]


@aio
async def test_elsewhere_is_not_lost(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        await one.put(1)
        node = one.rooms.catalog.node
        with mock.patch.object(one.rooms.catalog, "node", Node("another", "boot")):
            assert await why(one, "key-0") == [Why.ELSEWHERE], "on the disk of another node, whose process lives"
        assert one.rooms.catalog.node == node


@aio
async def test_a_closed_epoch(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        await one.put(1)
        await run(one, "UPDATE namespace SET epoch = 2, min_encrypt_epoch = 2, min_decrypt_epoch = 2")
        assert await why(one, "key-0") == [Why.EPOCH_CLOSED]


@aio
async def test_over_quota_until_it_is_stored(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        await one.put(1)
        await run(one, "UPDATE quota SET limit_objects = 1")
        assert await one.put(2) == [PutOutcome.HAVE, PutOutcome.OVER_QUOTA]
        assert await why(one, "key-0", "key-1", "key-2") == [Why.VISIBLE, Why.OVER_QUOTA, Why.UNKNOWN]
        await run(one, "UPDATE quota SET limit_objects = 9")
        await one.put(2)
        assert await why(one, "key-1") == [Why.VISIBLE]
        await one.client.delete(one.registered, keys_of(2))
        assert await why(one, "key-1") == [Why.DELETED], "what came later counts"


@pytest.mark.parametrize("table", ["namespace", "tenant"])
@aio
async def test_a_suspended_namespace_or_tenant(tmp_path: Path, table: str) -> None:
    async with works(tmp_path) as one:
        await one.put(1)
        await run(one, f"UPDATE {table} SET state = 'suspended'")
        reply = await one.client.explain(one.registered, keys_of(2))
        assert [each.why for each in reply.answers] == [Why.NAMESPACE_SUSPENDED] * 2
        assert reply.sentence == f"the {table} is suspended"


@aio
async def test_an_unknown_format_names_the_fields_in_which_the_nearest_differs(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        await one.client.register(format_of(4096, model="far/away", weights=b"x" * 32, engine="other"))
        asked = replace(one.registered.kv_format, kv_dtype="bfloat16", weights=b"v" * 32)
        reply = await one.client.explain(replace(one.registered, kv_format=asked), keys_of(2))
        assert [each.why for each in reply.answers] == [Why.FORMAT_UNKNOWN] * 2
        assert reply.differences == [
            Difference("weights", (b"v" * 32).hex(), (b"w" * 32).hex()),
            Difference("kv_dtype", "bfloat16", "float16"),
        ]
        assert "nearest of 2 formats" in reply.sentence
        long = replace(one.registered.kv_format, layout="l" * 1000)
        (difference,) = (await one.client.explain(replace(one.registered, kv_format=long), keys_of(1))).differences
        assert len(difference.asked) == SHOWN_MAX + 1
        same = await one.client.explain(replace(one.registered, kv_format=replace(asked, model="y")), keys_of(1))
        assert {each.field for each in same.differences} == {"model", "weights", "kv_dtype"}


@aio
async def test_I03_nothing_is_said_of_another_namespace(tmp_path: Path) -> None:
    """Law 6."""
    async with works(tmp_path) as one:
        admin = Admin(one.gateway)
        await admin.own("POST", "/tenants/-/namespaces", {"name": "other"})
        await one.put(2)
        form = one.registered.kv_format.canonical()
        caller = replace(one.gateway.authenticator.owner(), namespaces=("other",), default_namespace="other")
        request = ExplainRequest(keys_of(2), form, None, "other")
        reply = await one.gateway.gateway.answer(caller, request)
        assert isinstance(reply, ExplainReply)
        assert [each.why for each in reply.answers] == [Why.FORMAT_UNKNOWN] * 2
        assert (reply.differences, reply.sentence) == ([], "the namespace has no format at all")
        told = set()
        for name in ("default", "nobodys"):
            with pytest.raises(RequestRefused) as refused:
                await one.gateway.gateway.answer(caller, replace_fields(request, namespace=name))
            told.add(str(refused.value))
        assert len(told) == 1, "forbidden and missing look alike"
        with pytest.raises(RequestRefused, match="lacks the permission chunk:get"):
            await one.gateway.gateway.answer(replace(caller, permissions=frozenset({Permission.PUT})), request)
        with pytest.raises(RequestRefused, match="name the KV format"):
            await one.gateway.gateway.answer(caller, ExplainRequest(keys_of(1)))


@aio
async def test_the_admin_route_says_the_same(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        await one.put(1)
        admin = Admin(one.gateway)
        keys = [key.hex() for key in keys_of(2)]
        where = "/tenants/-/namespaces/default/explain"
        for form in (
            {"fingerprint": one.registered.fingerprint.hex()},
            {"canonical": one.registered.kv_format.canonical().hex()},
        ):
            found = await admin.own("POST", where, {"keys": keys, **form})
            assert [each["why"] for each in found["answers"]] == ["visible", "unknown"]
            assert [each["key"] for each in found["answers"]] == keys
        unknown = await admin.own("POST", where, {"keys": keys, "fingerprint": "ab" * 32})
        assert [each["why"] for each in unknown["answers"]] == ["format_unknown"] * 2
