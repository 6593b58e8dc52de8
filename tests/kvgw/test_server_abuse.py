"""Peers that break off, lie, trickle or storm: each costs its own connection, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import psutil
import pytest

from kvgw import wire
from kvgw.client import Client
from kvgw.errors import Code
from kvgw.model import GetRequest, MatchReply, MatchRequest, Outcome, PutOutcome, PutReply, PutRequest, StatRequest
from kvgw.reports import Registered
from kvgw.server.limits import Limits
from kvgw.wire import Frame, Kind, Wanted
from tests.support.aio import aio
from tests.support.gateways import (
    MIB,
    House,
    format_of,
    house,
    keys_of,
    limited_house,
    payloads_of,
    read,
)
from tests.support.gateways import (
    Kind as Transport,
)
from tests.support.manual_clock import ManualClock
from tests.support.raw_peer import RawPeer, frame_bytes

SHORT = Limits(connections=8, hello_s=0.2, discard_s=0.3, bytes_per_second_min=MIB)
"""Patience of a gateway that a test can wait for."""


@asynccontextmanager
async def peer_of(gateway: House, token: str | None = None) -> AsyncIterator[RawPeer]:
    assert gateway.endpoint is not None
    peer = await RawPeer.connect(gateway.endpoint)
    try:
        received = await peer.hello(token or gateway.token)
        assert received is not None
        assert received[0].kind is Kind.WELCOME, received
        yield peer
    finally:
        peer.close()


async def prepared(gateway: House, chunk_bytes: int = 4096) -> tuple[Client, Registered, list[bytes]]:
    client = gateway.client()
    registered = await client.register(format_of(chunk_bytes))
    payloads = payloads_of(registered, 4)
    await client.put(registered, keys_of(4), payloads)
    return client, registered, payloads


async def still_serves(client: Client, registered: Registered, payloads: list[bytes]) -> None:
    assert (await read(client, registered, keys_of(4)))[1] == payloads, "other clients are served throughout"


def put_of(registered: Registered, name: str, count: int = 2, **options: int) -> PutRequest:
    return PutRequest(registered.fingerprint, keys_of(count, name), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@aio
async def test_R45_peers_that_break_off_anywhere_leave_nothing(tmp_path: Path, kind: Transport) -> None:
    async with house(kind, tmp_path / "gw") as gateway:
        assert gateway.endpoint is not None
        client, registered, payloads = await prepared(gateway)
        await gateway.check_clean()
        files = psutil.Process().num_fds()
        whole = frame_bytes(Kind.REQUEST, 1, put_of(registered, "broken"))
        data = frame_bytes(Kind.DATA, 1, index=0, payload_bytes=4096) + payloads[0]
        exchange = [*range(0, len(whole), 7), len(whole), *range(len(whole) + 1, len(whole) + len(data), 397)]
        for end in exchange:
            peer = await RawPeer.connect(gateway.endpoint)
            await peer.hello(gateway.token)
            await peer.send_bytes((whole + data)[:end])
            peer.reset()
        for end in range(0, wire.PREFIX.size + 8, 3):
            peer = await RawPeer.connect(gateway.endpoint)
            await peer.send_bytes(frame_bytes(Kind.HELLO, 0, wire.Hello(wire.VERSIONS, "raw"))[:end])
            peer.reset()
        await still_serves(client, registered, payloads)
        await gateway.check_clean()
        assert (await client.match(registered, keys_of(2, "broken"))).count == 0
        assert psutil.Process().num_fds() <= files, "descriptors are back to start"


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@aio
async def test_R45_a_whole_put_whose_answer_nobody_reads(tmp_path: Path, kind: Transport) -> None:
    async with house(kind, tmp_path / "gw") as gateway:
        assert gateway.endpoint is not None
        client, registered, payloads = await prepared(gateway)
        for turn in range(25):
            peer = await RawPeer.connect(gateway.endpoint)
            await peer.hello(gateway.token)
            await peer.send(Kind.REQUEST, 1, put_of(registered, f"turn{turn}", 1))
            await peer.send(Kind.DATA, 1, index=0, payload_bytes=4096)
            await peer.send_bytes(payloads_of(registered, 1, seed=turn + 5)[0])
            peer.reset()
        await gateway.check_clean()
        await still_serves(client, registered, payloads)
        stat = await client.stat()
        assert stat.objects == stat.chunks == stat.entries, "each put happened as a whole or not at all"


@aio
async def test_R45_three_hundred_probes_are_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with house("tcp", tmp_path / "gw") as gateway:
        assert gateway.endpoint is not None
        client, registered, payloads = await prepared(gateway)
        for probe in range(300):
            peer = await RawPeer.connect(gateway.endpoint)
            peer.reset() if probe % 2 else peer.close()
        await still_serves(client, registered, payloads)
        await gateway.check_clean()
        assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


WRONG_DATA = {
    "other index": {"index": 1, "payload_bytes": 4096},
    "short": {"index": 0, "payload_bytes": 4095},
    "long": {"index": 0, "payload_bytes": 4097},
    "empty": {"index": 0, "payload_bytes": 0},
    "offset": {"index": 0, "offset": 1, "payload_bytes": 4096},
}


@pytest.mark.parametrize("wrong", WRONG_DATA)
@aio
async def test_data_that_was_not_asked_for_ends_the_put(tmp_path: Path, wrong: str) -> None:
    async with house("unix", tmp_path / "gw") as gateway:
        client, registered, payloads = await prepared(gateway)
        async with peer_of(gateway) as peer:
            await peer.send(Kind.REQUEST, 1, put_of(registered, "new"))
            received = await peer.receive()
            assert received is not None
            assert wire.decode(received[1], Wanted).indices == [0, 1]
            await peer.send(Kind.DATA, 1, **WRONG_DATA[wrong])
            failure = await peer.failure()
            assert failure.code in (Code.BAD_REQUEST, Code.LENGTH_MISMATCH)
            if failure.code is Code.LENGTH_MISMATCH:
                assert "4096" in failure.message
                assert str(WRONG_DATA[wrong]["payload_bytes"]) in failure.message, "R17: both numbers"
            assert await peer.ended()
        await gateway.check_clean()
        assert (await client.match(registered, keys_of(2, "new"))).count == 0
        await still_serves(client, registered, payloads)


@aio
async def test_a_put_that_trickles_or_stops_gives_up_its_window(tmp_path: Path) -> None:
    async with limited_house(tmp_path / "gw", SHORT) as gateway:
        client, registered, payloads = await prepared(gateway, 256 * 1024)
        for sent in (b"", frame_bytes(Kind.DATA, 1, index=0, payload_bytes=256 * 1024) + bytes(1000)):
            async with peer_of(gateway) as peer:
                await peer.send(Kind.REQUEST, 1, put_of(registered, "slow", deadline_ms=200_000))
                await peer.receive()
                await peer.send_bytes(sent)
                started = time.monotonic()
                assert await peer.ended(), "law 9: a peer that stops loses its connection"
                assert time.monotonic() - started < 0.2 + 0.25 + 1.5, "long before its deadline"
        await gateway.check_clean()
        await still_serves(client, registered, payloads)


@aio
async def test_Q14_a_get_that_nobody_reads_gives_up_its_window(tmp_path: Path) -> None:
    async with limited_house(tmp_path / "gw", SHORT) as gateway:
        client, registered, payloads = await prepared(gateway, MIB)
        peers = []
        for _ in range(3):
            assert gateway.endpoint is not None
            peers.append(await RawPeer.connect(gateway.endpoint))
            await peers[-1].hello()
            await peers[-1].send(Kind.REQUEST, 1, GetRequest(registered.fingerprint, keys_of(4), deadline_ms=200_000))
        await gateway.check_clean(within_s=6)  # 0.2 s + 1 MiB at the slowest allowed speed, for each
        await still_serves(client, registered, payloads)
        for peer in peers:
            peer.close()


@aio
async def test_errors_that_nobody_reads_end_the_connection(tmp_path: Path) -> None:
    async with limited_house(tmp_path / "gw", SHORT) as gateway:
        client, registered, payloads = await prepared(gateway)
        async with peer_of(gateway) as peer:
            wrong = frame_bytes(Kind.REQUEST, 1, StatRequest("missing"))
            with pytest.raises(ConnectionError):
                async with asyncio.timeout(10):
                    while True:
                        await peer.send_bytes(wrong * 100)
        await gateway.check_clean()
        await still_serves(client, registered, payloads)


@aio
async def test_a_connection_begins_with_hello_and_soon(tmp_path: Path) -> None:
    async with limited_house(tmp_path / "gw", replace(SHORT, owner_uid=os.geteuid() + 1)) as gateway:
        assert gateway.endpoint is not None
        first_words = {
            "request": (frame_bytes(Kind.REQUEST, 1, StatRequest()), Code.BAD_REQUEST),
            "hello with payload": (frame_bytes(Kind.HELLO, 0, payload_bytes=1), Code.BAD_REQUEST),
            "no hello inside": (frame_bytes(Kind.HELLO, 0, StatRequest()), Code.BAD_REQUEST),
            "too long": (wire.encode_prefix(Frame(Kind.HELLO, 0, 5000)), Code.BAD_REQUEST),
            "http": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", Code.BAD_REQUEST),
            "no token": (frame_bytes(Kind.HELLO, 0, wire.Hello((1, 1), "raw")), Code.UNAUTHENTICATED),
            "wrong token": (frame_bytes(Kind.HELLO, 0, wire.Hello((1, 1), "raw", "kvgw_x")), Code.UNAUTHENTICATED),
            "older": (frame_bytes(Kind.HELLO, 0, wire.Hello((0, 0), "raw", gateway.token)), Code.UNSUPPORTED_VERSION),
            "newer": (frame_bytes(Kind.HELLO, 0, wire.Hello((2, 3), "raw", gateway.token)), Code.UNSUPPORTED_VERSION),
        }
        for name, (words, code) in first_words.items():
            peer = await RawPeer.connect(gateway.endpoint)
            await peer.send_bytes(words)
            failure = await peer.failure()
            assert failure.code is code, name
            if code is Code.UNSUPPORTED_VERSION:
                assert "1 to 1" in failure.message, "R23: both ranges"
            assert await peer.ended()
            peer.close()
        silent = await RawPeer.connect(gateway.endpoint)
        started = time.monotonic()
        assert await silent.ended()
        assert 0.1 < time.monotonic() - started < 2
        silent.close()


@aio
async def test_I18_a_revoked_or_expired_token_ends_within_five_seconds(tmp_path: Path) -> None:
    clock = ManualClock()
    async with house("tcp", tmp_path / "gw", clock=clock) as gateway:
        revoked, token_id = await gateway.new_token()
        expiring, _ = await gateway.new_token(expires_ms=clock.now_ms() + 60_000)
        _, registered, _ = await prepared(gateway)
        async with peer_of(gateway, revoked) as one, peer_of(gateway, expiring) as other:
            request = MatchRequest([registered.fingerprint], keys_of(4))
            for peer in (one, other):
                await peer.send(Kind.REQUEST, 1, request)
                received = await peer.receive()
                assert received is not None
                assert wire.decode(received[1], MatchReply).matched == 4
            await gateway.opened.rooms.catalog.revoke_token(gateway.owner.tenant, token_id, clock.now_ms())
            await gateway.wait(5.0)
            await one.send(Kind.REQUEST, 2, request)
            assert (await one.failure()).code is Code.UNAUTHENTICATED, "I18: also on a connection that was there"
            await gateway.wait(55.0)
            await other.send(Kind.REQUEST, 2, request)
            assert (await other.failure()).code is Code.UNAUTHENTICATED
        for token in (revoked, expiring):
            peer = await RawPeer.connect(gateway.endpoint)  # type: ignore[arg-type]
            await peer.hello(token)
            assert await peer.ended()
            peer.close()
        client = gateway.client(token=revoked)
        with pytest.raises(Exception, match="not valid"):
            await client.match(registered, keys_of(1))


@aio
async def test_the_connection_outlives_a_refused_request(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as gateway:
        _, registered, payloads = await prepared(gateway)
        async with peer_of(gateway) as peer:
            await peer.send_bytes(wire.encode_prefix(Frame(Kind.REQUEST, 3, 4)) + b"what")
            assert (await peer.failure()).code is Code.BAD_REQUEST
            await peer.send(Kind.REQUEST, 4, PutRequest(registered.fingerprint, [b"k", b"k"]))
            assert "repeats" in (await peer.failure()).message
            await peer.send(Kind.REQUEST, 5, put_of(registered, "new", 1))
            received = await peer.receive()
            assert received is not None
            await peer.send(Kind.DATA, 5, index=0, payload_bytes=4096)
            await peer.send_bytes(payloads[0])
            received = await peer.receive()
            assert received is not None
            assert received[0].request_id == 5
            assert wire.decode(received[1], PutReply).outcomes == [PutOutcome.STORED]


@aio
async def test_what_travels_for_a_put_that_failed_is_discarded_in_step(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as gateway:
        client, registered, payloads = await prepared(gateway)
        staging = gateway.opened.rooms.staging
        busy = mock.patch.object(type(staging), "window", side_effect=_busy)
        async with peer_of(gateway) as peer:
            with busy:
                await peer.send(Kind.REQUEST, 1, put_of(registered, "new"))
                assert await peer.receive()
                for index in range(2):
                    await peer.send(Kind.DATA, 1, index=index, payload_bytes=4096)
                    await peer.send_bytes(payloads[index])
                assert (await peer.failure()).code is Code.BUSY
            await peer.send(Kind.REQUEST, 2, MatchRequest([registered.fingerprint], keys_of(4)))
            received = await peer.receive()
            assert received is not None
            assert wire.decode(received[1], MatchReply).matched == 4, "the connection is still in step"
        with busy:
            report = await client.put(registered, keys_of(2, "new"), payloads[:2])
        assert (report.outcome, report.outcomes) == (Outcome.OUTAGE, (PutOutcome.FAILED,) * 2)
        assert "no room" in report.reason, "the reason reaches the client"


def _busy(*_: object) -> None:
    from storage.errors import StagingBusy

    raise StagingBusy("no room")


@aio
async def test_more_connections_than_allowed_wait_their_turn(tmp_path: Path) -> None:
    async with limited_house(tmp_path / "gw", replace(SHORT, connections=2, hello_s=5.0)) as gateway:
        assert gateway.endpoint is not None
        held = [await RawPeer.connect(gateway.endpoint) for _ in range(2)]
        for peer in held:
            await peer.hello()
        client = gateway.client()
        waiting = asyncio.create_task(client.register(format_of()))
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        held[0].close()
        assert (await waiting).chunk_bytes == 4096
        held[1].close()
