"""A client whose gateway is absent, frozen, killed or foreign: reads are misses that say so, within their deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import kvgw
from kvgw import wire
from kvgw.breaker import BreakerOptions, BreakerState
from kvgw.client import Client, ClientOptions
from kvgw.endpoint import UnixEndpoint
from kvgw.errors import Code, KvgwError, Outage, RequestRefused
from kvgw.model import Outcome, PutOutcome
from kvgw.reports import Registered
from kvgw.transport import SocketTransport
from kvgw.wire import Frame, Kind
from tests.support.aio import aio
from tests.support.gateways import buffers_for, format_of, house, keys_of, payloads_of, read
from tests.support.manual_clock import ManualClock
from tests.support.raw_peer import RawPeer, frame_bytes

REGISTERED = Registered(format_of(), "", b"f" * 32)
NEVER_OPENS = BreakerOptions(failures=10**6)

Script = Callable[[RawPeer], Coroutine[Any, Any, None]]


@asynccontextmanager
async def gateway_that(folder: Path, script: Script) -> AsyncIterator[str]:
    """A listener that treats each connection as `script` says."""
    path = folder / "fake.sock"
    tasks: list[asyncio.Task[None]] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)

        async def serve(sock: socket.socket) -> None:
            with sock, contextlib.suppress(ConnectionError):
                await script(RawPeer(sock))

        async def accept() -> None:
            while True:
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
                sock.setblocking(False)
                tasks.append(asyncio.create_task(serve(sock)))

        accepting = asyncio.create_task(accept())
        try:
            yield f"unix:{path}"
        finally:
            for task in (accepting, *tasks):
                task.cancel()
            await asyncio.gather(accepting, *tasks, return_exceptions=True)


async def frozen(_: RawPeer) -> None:
    await asyncio.Event().wait()


def answering(*frames: bytes) -> Script:
    """Says welcome, waits for a request, and answers with these bytes."""

    async def script(peer: RawPeer) -> None:
        await peer.receive()
        await peer.send(Kind.WELCOME, 0, wire.Welcome(1, "0", "node", "tenant", "default"))
        await peer.receive()
        for frame in frames:
            await peer.send_bytes(frame)
        await asyncio.Event().wait()

    return script


async def all_reads_miss(client: Client, *, within_s: float) -> str:
    """Every read fails open and says why; what is no read raises `Outage`."""
    buffers = buffers_for(REGISTERED, 2)
    started = time.monotonic()
    match = await client.match(REGISTERED, keys_of(2))
    get = await client.get(REGISTERED, keys_of(2), buffers)
    put = await client.put(REGISTERED, keys_of(2), payloads_of(REGISTERED, 2))
    touched = await client.touch(REGISTERED, keys_of(2))
    assert time.monotonic() - started < within_s
    assert {one.outcome for one in (match, get, put, touched)} == {Outcome.OUTAGE}
    assert (match.count, get.hits, touched.count) == (0, (), 0)
    assert put.outcomes == (PutOutcome.FAILED,) * 2
    for must_raise in (client.delete(REGISTERED, keys_of(1)), client.stat(), client.register(format_of())):
        with pytest.raises(Outage):
            await must_raise
    with pytest.raises(Outage):
        await client.match(REGISTERED, keys_of(1), on_error="raise")
    return match.reason


@pytest.mark.parametrize("endpoint", ["unix:{}/none.sock", "tcp:127.0.0.1:1", "tcp:name.invalid:1"])
@aio
async def test_an_absent_gateway_is_an_outage_that_names_it(tmp_path: Path, endpoint: str) -> None:
    where = endpoint.format(tmp_path)
    async with kvgw.connect(where, options=ClientOptions(breaker=NEVER_OPENS)) as client:
        assert where in await all_reads_miss(client, within_s=5.0)


@aio
async def test_R07_a_frozen_gateway_costs_the_deadline_then_nothing(tmp_path: Path) -> None:
    clock = ManualClock()
    async with gateway_that(tmp_path, frozen) as endpoint:
        transport = SocketTransport(UnixEndpoint(endpoint.removeprefix("unix:")), None)
        client = Client(transport, ClientOptions(read_deadline_s=0.1, write_deadline_s=0.1), clock=clock)
        for _ in range(3):
            started = time.monotonic()
            match = await client.match(REGISTERED, keys_of(1))
            assert match.outcome is Outcome.OUTAGE
            assert 0.09 < time.monotonic() - started < 0.1 + 0.15, "R07: never longer than the deadline"
        assert client.breaker is BreakerState.OPEN
        started = time.monotonic()
        await all_reads_miss(client, within_s=0.05)
        assert time.monotonic() - started < 0.1, "an open breaker answers at once"
        clock.advance(1.3)
        assert client.breaker is BreakerState.HALF_OPEN
        started = time.monotonic()
        first, *others = await asyncio.gather(*(client.match(REGISTERED, keys_of(1)) for _ in range(20)))
        assert time.monotonic() - started < 0.1 + 0.15, "one caller tries, the others are answered at once"
        assert "deadline" in first.reason
        assert all("tried again" in other.reason for other in others)
        await client.aclose()


@aio
async def test_a_client_finds_its_gateway_again(tmp_path: Path) -> None:
    clock = ManualClock()
    path = str(tmp_path / "gw" / "kvgw.sock")
    client = Client(SocketTransport(UnixEndpoint(path), None), clock=clock)
    assert (await client.match(REGISTERED, keys_of(1))).outcome is Outcome.OUTAGE, "not started yet"
    async with house("unix", tmp_path / "gw", check=False):
        registered = await client.register(format_of())
        payloads = payloads_of(registered, 2)
        await client.put(registered, keys_of(2), payloads)
    for _ in range(4):  # stopped: idle connections broke, new ones find nobody
        assert (await client.match(registered, keys_of(2))).outcome is Outcome.OUTAGE
    assert client.breaker is BreakerState.OPEN
    async with house("unix", tmp_path / "gw", check=False):
        assert (await client.match(registered, keys_of(2))).count == 0, "the breaker is still open"
        clock.advance(2)
        assert (await client.match(registered, keys_of(2))).count == 2, "recovers without a new client"
        assert client.breaker is BreakerState.CLOSED
        assert (await read(client, registered, keys_of(2)))[1] == payloads
    await client.aclose()


DONE = frame_bytes(Kind.DONE, 1, kvgw.model.MatchReply(1, ["nvme"]))
NOT_THE_PROTOCOL = {
    "garbage": b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64),
    "a newer wire version": b"KG\x02" + DONE[3:],
    "header too long": wire.encode_prefix(Frame(Kind.DONE, 1, 1))[:8] + b"\xff" * 24,
    "other request's answer": frame_bytes(Kind.DONE, 2, kvgw.model.MatchReply(1, ["nvme"])),
    "answer of another kind": frame_bytes(Kind.DONE, 1, wire.Failure(Code.INTERNAL, "x")),
    "answer that is no msgpack": wire.encode_prefix(Frame(Kind.DONE, 1, 3)) + b"\xc1\xc1\xc1",
    "error of an unknown code": wire.encode_prefix(Frame(Kind.ERROR, 1, 0)),
    "answer with payload": wire.encode_prefix(Frame(Kind.DONE, 1, 0, payload_bytes=5)),
    "frame of the client's": frame_bytes(Kind.REQUEST, 1, kvgw.model.StatRequest()),
    "data for a match": frame_bytes(Kind.DATA, 1, index=0, payload_bytes=4096) + bytes(4096),
    "the end of the connection": b"",
    "last words": frame_bytes(Kind.ERROR, 0, wire.Failure(Code.BAD_REQUEST, "a sentence of the gateway")),
}


@pytest.mark.parametrize("answer", NOT_THE_PROTOCOL)
@aio
async def test_R23_what_is_not_the_protocol_is_an_outage_never_an_exception(tmp_path: Path, answer: str) -> None:
    options = ClientOptions(read_deadline_s=0.3, write_deadline_s=0.3, breaker=NEVER_OPENS)
    script = answering(NOT_THE_PROTOCOL[answer])
    async with gateway_that(tmp_path, script) as endpoint, kvgw.connect(endpoint, options=options) as client:
        reason = await all_reads_miss(client, within_s=2.0)
        if answer == "last words":
            assert "a sentence of the gateway" in reason


@pytest.mark.parametrize(
    "first",
    [
        frame_bytes(Kind.ERROR, 0, wire.Failure(Code.UNSUPPORTED_VERSION, "client 1 to 1, gateway 2 to 3")),
        b"KG\x02" + frame_bytes(Kind.ERROR, 0, wire.Failure(Code.BAD_REQUEST, "x"))[3:],
        frame_bytes(Kind.WELCOME, 0, wire.Failure(Code.BAD_REQUEST, "no welcome")),
        frame_bytes(Kind.DONE, 0),
        frame_bytes(Kind.ERROR, 0, wire.Failure(Code.UNAVAILABLE, "cannot authenticate now")),
    ],
    ids=["names both ranges", "newer prefix", "strange welcome", "no welcome", "cannot authenticate"],
)
@aio
async def test_R23_a_gateway_of_another_version_is_an_outage(tmp_path: Path, first: bytes) -> None:
    async def script(peer: RawPeer) -> None:
        await peer.receive()
        await peer.send_bytes(first)

    options = ClientOptions(breaker=NEVER_OPENS)
    async with gateway_that(tmp_path, script) as endpoint, kvgw.connect(endpoint, options=options) as client:
        await all_reads_miss(client, within_s=2.0)


@pytest.mark.parametrize(
    "frames",
    [
        [frame_bytes(Kind.DATA, 1, index=0, payload_bytes=4096) + b"\x5a" * 4096],
        [frame_bytes(Kind.DATA, 1, index=0, payload_bytes=2048) + b"\x5a" * 2048,
         frame_bytes(Kind.DONE, 1, kvgw.model.GetReply([kvgw.model.Hit(0, "nvme", 1)]))],
        [frame_bytes(Kind.DONE, 1, kvgw.model.GetReply([kvgw.model.Hit(1, "nvme", 1)]))],
        [frame_bytes(Kind.DATA, 1, index=2, payload_bytes=64) + b"\x5a" * 64],
        [frame_bytes(Kind.DATA, 1, index=0, payload_bytes=4097) + b"\x5a" * 4097],
        [frame_bytes(Kind.DATA, 1, index=0, offset=1, payload_bytes=64) + b"\x5a" * 64],
    ],
    ids=["no end", "half a chunk", "not sent", "other index", "too long", "hole"],
)  # fmt: skip
@aio
async def test_what_was_not_announced_whole_is_not_a_hit(tmp_path: Path, frames: list[bytes]) -> None:
    options = ClientOptions(read_deadline_s=0.3)
    async with (
        gateway_that(tmp_path, answering(*frames)) as endpoint,
        kvgw.connect(endpoint, options=options) as client,
    ):
        buffers = buffers_for(REGISTERED, 2)
        report = await client.get(REGISTERED, keys_of(2), buffers)
        assert (report.hits, report.outcome) == ((), Outcome.OUTAGE), "law 3"
        assert all(b"\x5a" not in buffer for buffer in buffers), "what came is wiped"


@aio
async def test_data_without_an_announcement_is_wiped(tmp_path: Path) -> None:
    frames = [
        frame_bytes(Kind.DATA, 1, index=0, payload_bytes=4096) + b"\x5a" * 4096,
        frame_bytes(Kind.DONE, 1, kvgw.model.GetReply([])),
    ]
    async with gateway_that(tmp_path, answering(*frames)) as endpoint, kvgw.connect(endpoint) as client:
        buffers = buffers_for(REGISTERED, 1)
        report = await client.get(REGISTERED, keys_of(1), buffers)
        assert (report.hits, report.outcome) == ((), Outcome.OK)
        assert bytes(buffers[0]) == bytes(4096), "law 3: an unannounced chunk cannot be used by mistake"


@aio
async def test_what_can_never_succeed_raises_and_keeps_the_breaker_closed(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as gateway:
        client = gateway.client()
        for _ in range(5):
            with pytest.raises(RequestRefused):
                await client.get(REGISTERED, keys_of(1), buffers_for(REGISTERED, 1))
        assert client.breaker is BreakerState.CLOSED
        stranger = kvgw.connect(str(gateway.endpoint), token="kvgw_wrong")
        with pytest.raises(KvgwError, match="not valid") as refusal:
            await stranger.match(REGISTERED, keys_of(1))
        assert refusal.value.code is Code.UNAUTHENTICATED
        await stranger.aclose()


FORKING = """
import asyncio, os, sys
import kvgw
from kvgw import embedded
from tests.support.gateways import SMALL, buffers_for, format_of, keys_of, payloads_of, house, read
from pathlib import Path

folder, kind = Path(sys.argv[1]), sys.argv[2]

async def in_child(client, registered, payloads, act):
    async with asyncio.timeout(5):
        if act == "only close":
            return await client.aclose()
        match = await client.match(registered, keys_of(2))
        if kind == "embedded":
            assert match.outcome is kvgw.Outcome.OUTAGE and "process" in match.reason, match
        else:
            assert match.count == 2, match
            assert (await read(client, registered, keys_of(2)))[1] == payloads
        if act == "close":
            await client.aclose()

async def main():
    async with house(kind, folder) as gateway:
        client = gateway.client()
        registered = await client.register(format_of())
        payloads = payloads_of(registered, 2)
        await client.put(registered, keys_of(2), payloads)
        for act in ("use", "close", "only close"):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    asyncio.run(in_child(client, registered, payloads, act))
                    code = 0
                finally:
                    os._exit(code)
            waiting = asyncio.get_running_loop().run_in_executor(None, os.waitpid, child, 0)
            while not waiting.done():
                assert (await read(client, registered, keys_of(2)))[1] == payloads, "the parent works on meanwhile"
                await asyncio.sleep(0)
            assert os.waitstatus_to_exitcode((await waiting)[1]) == 0, f"the child failed: {act}"
            assert (await read(client, registered, keys_of(2)))[1] == payloads, f"and afterwards: {act}"
        await gateway.check_clean()

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["unix", "embedded"])
def test_R67_a_forked_child_harms_nobody(tmp_path: Path, kind: str) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING, str(tmp_path / "gw"), kind]
    run = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
