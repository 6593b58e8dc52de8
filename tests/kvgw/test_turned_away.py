"""Who is turned away in a crowd: answered at once and before any task, whatever it does with the answer (L03)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from unittest import mock

import pytest
from msgspec.structs import replace

from kvgw import wire
from kvgw.errors import Code, Outage, RequestRefused
from kvgw.model import MatchReply, MatchRequest
from kvgw.server.connection import Connection
from kvgw.server.limits import Limits
from kvgw.settings import LimitSettings
from kvgw.wire import Kind
from tests.support.aio import aio
from tests.support.encrypted import tls_house
from tests.support.gateways import SMALL, House, format_of, house, keys_of, limited_house
from tests.support.raw_peer import RawPeer, frame_bytes

FULL = replace(SMALL, limits=LimitSettings(concurrent_requests=1))


@asynccontextmanager
async def crowded(gateway: House) -> AsyncIterator[tuple[RawPeer, MatchRequest, ExitStack]]:
    """A peer of a gateway whose only place is taken, what it asks for in vain, and what ends when there is room."""
    assert gateway.endpoint is not None
    registered = await gateway.client().register(format_of())
    peer = await RawPeer.connect(gateway.endpoint)
    await peer.hello(gateway.token)
    with ExitStack() as crowd, closing(peer):
        crowd.enter_context(gateway.opened.rooms.limiter.admitted(await gateway.place()))
        yield peer, MatchRequest([registered.fingerprint], keys_of(3), deadline_ms=5_000), crowd


async def refused(peer: RawPeer, request_id: int) -> None:
    received = await peer.receive()
    assert received is not None
    assert (received[0].kind, received[0].request_id) == (Kind.ERROR, request_id)
    failure = wire.decode(received[1], wire.Failure)
    assert (failure.code, failure.retry_after_ms > 0) == (Code.BUSY, True)


@aio
async def test_L03_a_refusal_wakes_no_task_and_its_connection_is_served_when_there_is_room(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw", settings=FULL) as gateway:
        async with crowded(gateway) as (peer, request, crowd):
            with mock.patch.object(Connection, "_serve_request", side_effect=AssertionError("a task was woken")):
                for number in range(50):
                    await peer.send(Kind.REQUEST, number, request)
                    await refused(peer, number)
            sample = gateway.opened.rooms.metrics.registry.get_sample_value
            assert sample("kvgw_requests_total", {"op": "match", "code": "busy"}) == 50
            assert sample("kvgw_limited_total", {"limit": "concurrency"}) == 50
            crowd.close()
            await peer.send(Kind.REQUEST, 50, request)
            received = await peer.receive()
            assert received is not None
            assert (received[0].kind, received[0].request_id) == (Kind.DONE, 50)
            assert wire.decode(received[1], MatchReply).matched == 0
        totals = gateway.opened.rooms.meter.take_minutes()
        assert sum(counts.get("limited", 0) for counts in totals.values()) == 50


@aio
async def test_L03_each_of_several_requests_at_once_is_answered_however_they_come(tmp_path: Path) -> None:
    """Together in one piece, and byte by byte: no frame is lost between who refuses and who serves."""
    async with house("unix", tmp_path / "gw", settings=FULL) as gateway, crowded(gateway) as (peer, request, _):
        await peer.send_bytes(b"".join(frame_bytes(Kind.REQUEST, number, request) for number in range(20)))
        for number in range(20):
            await refused(peer, number)
        for byte in frame_bytes(Kind.REQUEST, 20, request):
            await peer.send_bytes(bytes([byte]))
            await asyncio.sleep(0)
        await refused(peer, 20)
        await peer.send(Kind.REQUEST, 21, replace(request, keys=keys_of(500)))  # larger than what is read ahead
        await refused(peer, 21)
        header = b"\xc1"
        await peer.send_bytes(wire.encode_prefix(wire.Frame(Kind.REQUEST, 22, len(header))) + header)
        assert (await peer.failure()).code is Code.BAD_REQUEST, "a crowd is no reason to hear something else"
        await peer.send(Kind.REQUEST, 23, request)
        await refused(peer, 23)


@aio
async def test_L03_who_does_not_read_its_refusals_is_heard_no_further_and_loses_none(tmp_path: Path) -> None:
    """Law 9: what is owed to it is one answer, and what it goes on to say stays in the kernel."""
    async with house("unix", tmp_path / "gw", settings=FULL) as gateway, crowded(gateway) as (peer, request, _):
        sample = gateway.opened.rooms.metrics.registry.get_sample_value
        sent = 0
        while sent == await heard(sample, sent):
            assert sent < 20_000, "it is heard for ever"
            await peer.send(Kind.REQUEST, sent, request)
            sent += 1
        assert sent > 100
        for number in range(sent):
            await refused(peer, number)
        assert sent == await heard(sample, sent)


async def heard(sample: Callable[[str, dict[str, str]], float | None], wanted: int) -> int:
    """How many matches were refused, once it is as many as wanted, or has not become so many for a while."""
    until = time.monotonic() + 0.5
    while True:
        count = int(sample("kvgw_requests_total", {"op": "match", "code": "busy"}) or 0)
        if count >= wanted or time.monotonic() > until:
            return count
        await asyncio.sleep(0)


@aio
async def test_who_is_turned_away_again_and_again_is_not_idle(tmp_path: Path) -> None:
    limits = Limits(connections=8, idle_s=0.6)
    async with (
        limited_house(tmp_path / "gw", limits, settings=FULL, check=False) as gateway,
        crowded(gateway) as (peer, request, _),
    ):
        for number in range(10):
            await peer.send(Kind.REQUEST, number, request)
            await refused(peer, number)
            await asyncio.sleep(0.1)
        assert await peer.ended(), "and when it is, it is let go"


@aio
async def test_a_credential_that_has_ended_hears_that_and_not_how_full_it_is(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw", settings=FULL) as gateway, crowded(gateway) as (peer, request, _):
        await peer.send(Kind.REQUEST, 1, request)
        await refused(peer, 1)
        with mock.patch.object(type(gateway.opened.authenticator), "holds", return_value=False):
            revoked = mock.patch.object(
                Connection, "_identify", side_effect=RequestRefused("revoked", Code.UNAUTHENTICATED)
            )
            with revoked:
                await peer.send(Kind.REQUEST, 2, request)
                assert (await peer.failure()).code is Code.UNAUTHENTICATED


@aio
async def test_L03_inside_tls_a_refusal_is_the_same(tmp_path: Path) -> None:
    async with tls_house(tmp_path / "gw", settings=FULL) as gateway:
        client = gateway.client()
        registered = await client.register(format_of())
        with gateway.opened.rooms.limiter.admitted(await gateway.place()):
            for _ in range(3):
                with pytest.raises(Outage, match="requests are being served") as busy:
                    await client.match(registered, keys_of(1), on_error="raise")
                assert (busy.value.code, busy.value.retry_after_s > 0) == (Code.BUSY, True)
        assert (await client.match(registered, keys_of(1), on_error="raise")).count == 0
