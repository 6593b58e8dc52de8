"""A match that is answered from memory is answered at once, before any task: with every look that others get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from unittest import mock
from uuid import UUID

import pytest
from msgspec.structs import replace

from kvgw import wire
from kvgw.errors import Code, RequestRefused
from kvgw.gateway.turns import Turns
from kvgw.model import MatchReply, MatchRequest
from kvgw.server.connection import Connection
from kvgw.settings import LimitSettings
from kvgw.wire import Kind
from tenancy.access import Permission
from tests.support.aio import aio
from tests.support.gateways import SMALL, House, format_of, house, keys_of, payloads_of
from tests.support.raw_peer import RawPeer

KEYS = keys_of(5)
READER = frozenset({Permission.GET})
WRITER = frozenset({Permission.PUT})


@asynccontextmanager
async def remembering(made: House, token: str | None = None) -> AsyncIterator[tuple[RawPeer, MatchRequest]]:
    """A peer of a gateway that remembers `KEYS`, and what it asks to be told so; both have spoken before."""
    assert made.endpoint is not None
    client = made.client()
    registered = await client.register(format_of())
    await client.put(registered, KEYS, payloads_of(registered, len(KEYS)))
    await made.opened.crew.drain_everywhere()
    assert (await client.match(registered, KEYS)).count == len(KEYS)
    peer = await RawPeer.connect(made.endpoint)
    with closing(peer):
        await peer.hello(token or made.token)
        yield peer, MatchRequest([registered.fingerprint], KEYS, deadline_ms=5_000)


async def answer(peer: RawPeer, request: MatchRequest) -> MatchReply | Code:
    await peer.send(Kind.REQUEST, 7, request)
    received = await peer.receive()
    assert received is not None and received[0].request_id == 7
    if received[0].kind is Kind.DONE:
        return wire.decode(received[1], MatchReply)
    return wire.decode(received[1], wire.Failure).code


def no_task() -> mock._patch[mock.MagicMock]:
    return mock.patch.object(Connection, "_serve_request", side_effect=AssertionError("a task was woken"))


@aio
async def test_it_wakes_no_task_and_counts_like_any_other(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as made, remembering(made) as (peer, request):
        sample, rooms = made.opened.rooms.metrics.registry.get_sample_value, made.opened.rooms
        rooms.meter.take_usage()
        before = {name: sample(name[0], dict(name[1])) or 0.0 for name in COUNTED}
        with no_task():
            for _ in range(20):
                assert await answer(peer, request) == MatchReply(5, ["staging"] * 5)
        assert {name: (sample(name[0], dict(name[1])) or 0.0) - before[name] for name in COUNTED} == COUNTED
        (usage,) = rooms.meter.take_usage().values()
        counted = {meter: amount for (_, _, meter), amount in usage.items()}
        assert counted == {"lookups": 20, "matched_keys": 100, "matched_tokens": 1600}


COUNTED = {
    ("kvgw_requests_total", (("op", "match"), ("code", "ok"))): 20.0,
    ("kvgw_request_seconds_count", (("op", "match"),)): 20.0,
    ("kvgw_match_keys_total", (("outcome", "hit"),)): 100.0,
    ("kvgw_match_keys_total", (("outcome", "miss"),)): 0.0,
}


@aio
async def test_law5_not_after_a_delete_was_acknowledged(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as made, remembering(made) as (peer, request):
        client = made.client()
        registered = await client.register(format_of())
        with no_task():
            assert await answer(peer, request) == MatchReply(5, ["staging"] * 5)
        assert await client.delete(registered, KEYS[3:]) == 2
        told = await answer(peer, request)
        assert isinstance(told, MatchReply) and told.matched == 3, "law 5"


@aio
async def test_law6_not_to_a_credential_that_may_not_read(tmp_path: Path) -> None:
    async with house("tcp", tmp_path / "gw") as made:
        writer, _ = await made.new_token(WRITER)
        reader, _ = await made.new_token(READER)
        async with remembering(made, writer) as (peer, request):
            assert await answer(peer, request) is Code.NOT_FOUND
        async with remembering(made, reader) as (peer, request):
            with no_task():
                assert await answer(peer, request) == MatchReply(5, ["staging"] * 5)
            assert await answer(peer, replace(request, namespace="another")) is Code.NOT_FOUND


@aio
async def test_I18_not_when_the_credential_has_to_be_looked_at_again(tmp_path: Path) -> None:
    async with house("tcp", tmp_path / "gw") as made:
        token, _ = await made.new_token(READER)
        authenticator, refusal = made.opened.authenticator, RequestRefused("revoked", Code.UNAUTHENTICATED)
        async with remembering(made, token) as (peer, request):
            with no_task():
                assert isinstance(await answer(peer, request), MatchReply)
            with (
                mock.patch.object(authenticator, "holds", return_value=False),
                mock.patch.object(authenticator, "known", side_effect=refusal),
            ):
                assert await answer(peer, request) is Code.UNAUTHENTICATED


@aio
async def test_not_while_its_keys_are_gone_from_memory(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as made, remembering(made) as (peer, request):
        rooms, scope = made.opened.rooms, (await made.place()).scope
        rooms.keyring.forget(scope)
        with mock.patch.object(rooms.keyring, "_open", wraps=rooms.keyring._open) as opened:
            assert isinstance(await answer(peer, request), MatchReply)
            assert opened.call_count == 1, "it was asked for in earnest"
        with no_task():
            assert isinstance(await answer(peer, request), MatchReply)


@aio
async def test_I16_it_waits_for_its_turn_when_others_do(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as made, remembering(made) as (peer, request), AsyncExitStack() as crowd:
        turns = made.opened.rooms.turns
        while turns.has_room:
            await crowd.enter_async_context(turns.of(made.owner.tenant))
        with mock.patch("kvgw.gateway.turns.PATIENCE_SECONDS", 60):
            asked = asyncio.create_task(answer(peer, request))
            await asyncio.sleep(0.05)
            assert turns.waiting == 1 and not asked.done()
            await crowd.aclose()
            assert isinstance(await asked, MatchReply)


@aio
async def test_I16_what_was_done_at_once_counts_when_turns_are_taken() -> None:
    quiet, loud = UUID(int=1), UUID(int=2)
    turns, order = Turns(1), list[str]()
    assert turns.has_room
    turns.done_at_once(loud)

    async def work(tenant: UUID, name: str) -> None:
        async with turns.of(tenant):
            order.append(name)

    async with turns.of(UUID(int=3)), turns.of(UUID(int=4)):
        assert not turns.has_room
        tasks = [asyncio.create_task(work(loud, "loud")), asyncio.create_task(work(quiet, "quiet"))]
        await asyncio.sleep(0)
        assert turns.waiting == 2
    await asyncio.gather(*tasks)
    assert order == ["quiet", "loud"]


@pytest.mark.parametrize("limit", ["requests_per_second", "concurrent_requests"])
@aio
async def test_I16_it_is_counted_against_the_limits(tmp_path: Path, limit: str) -> None:
    settings = replace(SMALL, limits=LimitSettings(**{limit: 20}))
    async with house("unix", tmp_path / "gw", settings=settings) as made, remembering(made) as (peer, request):
        told = [await answer(peer, request) for _ in range(60)]
        if limit == "requests_per_second":
            assert Code.BUSY in told
        else:
            assert Code.BUSY not in told, "none of them is still inside"
