"""Chunks of a PUT that worker threads receive and seal: whatever a client does meanwhile, to itself alone."""

from __future__ import annotations

import array
import asyncio
import fcntl
import socket
import termios
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
from msgspec.structs import replace

from kvgw import wire
from kvgw.channel import ConnectionEnded, PlainChannel
from kvgw.errors import Code, RequestRefused
from kvgw.gateway.payloads import Part
from kvgw.model import PutReply, PutRequest
from kvgw.reports import Registered
from kvgw.server import exchange as exchanges
from kvgw.server.exchange import Exchange
from kvgw.server.limits import Limits
from kvgw.settings import StagingSettings
from kvgw.stream import FrameStream
from kvgw.wire import Frame, Kind
from tests.support.aio import aio
from tests.support.gateways import MIB, SMALL, House, format_of, house, keys_of, payloads_of, read, until
from tests.support.gateways import Kind as Transport
from tests.support.raw_peer import RawPeer, frame_bytes

SEGMENT = MIB
CHUNK = 2 * SEGMENT + 4096
ROOMY = replace(SMALL, staging=StagingSettings(bytes=96 * MIB, tenants=1))
"""Two threads have a piece each."""
COUNT = 5


@asynccontextmanager
async def putting(gateway: House, registered: Registered, count: int) -> AsyncIterator[RawPeer]:
    """A peer whose PUT the gateway wants all of."""
    assert gateway.endpoint is not None
    peer = await RawPeer.connect(gateway.endpoint)
    try:
        await peer.hello(gateway.token)
        await peer.send(Kind.REQUEST, 1, PutRequest(registered.fingerprint, keys_of(count)))
        received = await peer.receive()
        assert received is not None
        assert received[0].kind is Kind.WANTED, received
        yield peer
    finally:
        peer.close()


def frames(payloads: Sequence[bytes]) -> bytes:
    return b"".join(
        frame_bytes(Kind.DATA, 1, index=index, payload_bytes=len(payload)) + payload
        for index, payload in enumerate(payloads)
    )


def unread(sock: socket.socket) -> int:
    """Bytes that were sent and not received."""
    found = array.array("i", [0])
    fcntl.ioctl(sock, termios.TIOCOUTQ, found)
    return found[0]


def windows_are_zero(gateway: House) -> bool:
    region = gateway.opened.rooms.staging.window_region
    start = region.address - gateway.opened.arena.region.address
    return not any(bytes(gateway.opened.arena.memory.view(start, region.length)))


CUTS = {
    "in a frame's prefix": [10, 32 + CHUNK + 31],
    "behind a prefix": [32, 2 * 32 + CHUNK],
    "in the first byte of a payload": [33, 2 * 32 + CHUNK + 1],
    "in segments": [32 + 100, 32 + SEGMENT - 1, 32 + SEGMENT + 1, 32 + CHUNK - 1],
    "at the ends of segments": [32 + SEGMENT, 32 + 2 * SEGMENT],
    "at the ends of chunks": [32 + CHUNK, 2 * (32 + CHUNK), 3 * (32 + CHUNK)],
    "behind the beginning of the next": [32 + CHUNK + 3, 2 * (32 + CHUNK) + 4000, 3 * (32 + CHUNK) + 5000],
}


@pytest.mark.parametrize("piece", [SEGMENT, 4 * SEGMENT], ids=["pieces", "whole"])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
@aio
async def test_law_3_a_client_that_pauses_anywhere_has_stored_what_it_sent(
    tmp_path: Path, cuts: list[int], piece: int
) -> None:
    with (
        mock.patch.object(exchanges, "PATIENCE_SECONDS", 0.0),
        mock.patch.object(exchanges, "PATIENCE_BYTES_PER_SECOND", float("inf")),
        mock.patch("kvgw.gateway.intake.PIECE_BYTES", piece),
    ):
        async with house("unix", tmp_path / "gw", settings=ROOMY) as gateway:
            client = gateway.client()
            registered = await client.register(format_of(CHUNK))
            payloads = payloads_of(registered, COUNT)
            sent = frames(payloads)
            async with putting(gateway, registered, COUNT) as peer:
                for start, end in pairwise([0, *cuts, len(sent)]):
                    await peer.send_bytes(sent[start:end])
                    await until(lambda: unread(peer.sock) == 0)
                received = await peer.receive()
            assert received is not None
            assert wire.decode(received[1], PutReply).outcomes.count("stored") == COUNT
            assert (await read(client, registered, keys_of(COUNT)))[1] == payloads
            assert windows_are_zero(gateway), "law 6"


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize(("chunk_bytes", "count", "window"), [(CHUNK, 24, 2 * CHUNK), (64 * 1024, 64, 64 * 1024)])
@aio
async def test_law_6_a_put_is_received_into_one_window_that_is_zero_in_the_end(
    tmp_path: Path, kind: Transport, chunk_bytes: int, count: int, window: int
) -> None:
    settings = replace(ROOMY, shared_memory=replace(ROOMY.shared_memory, bytes=0))
    async with house(kind, tmp_path / "gw", settings=settings) as gateway:
        client = gateway.client()
        registered = await client.register(format_of(chunk_bytes))
        keys, payloads = keys_of(count), payloads_of(registered, count)
        staging = gateway.opened.rooms.staging
        with mock.patch.object(type(staging), "window", autospec=True, side_effect=type(staging).window) as taken:
            assert (await client.put(registered, keys, payloads)).stored == count
        assert [call.args[2] for call in taken.call_args_list] == [window], "a piece for each thread"
        assert windows_are_zero(gateway)
        assert (await read(client, registered, keys))[1] == payloads
        await gateway.check_clean()


@pytest.mark.parametrize("sent", [0, 10, 32 + 100, 32 + SEGMENT + 5, 32 + CHUNK + 7, 3 * (32 + CHUNK) + 99])
@aio
async def test_law_7_a_client_that_pauses_holds_no_thread_and_one_that_goes_leaves_nothing(
    tmp_path: Path, sent: int
) -> None:
    async with house("unix", tmp_path / "gw", settings=ROOMY) as gateway:
        client = gateway.client()
        registered = await client.register(format_of(CHUNK))
        workers = gateway.opened.rooms.workers
        both = threading.Barrier(2)
        async with putting(gateway, registered, COUNT) as peer:
            await peer.send_bytes(frames(payloads_of(registered, COUNT))[:sent])
            await until(lambda: unread(peer.sock) == 0)
            # Each waits in a thread until the other one is in one: there are two.
            await asyncio.gather(*(workers.run(lambda: both.wait(5)) for _ in range(both.parties)))
        await gateway.check_clean()
        assert windows_are_zero(gateway), "law 6"
        assert (await client.match(registered, keys_of(COUNT))).count == 0


@pytest.mark.parametrize("wrong", range(COUNT))
@aio
async def test_law_7_a_client_out_of_step_is_refused_once_and_nothing_more_is_read(tmp_path: Path, wrong: int) -> None:
    async with house("unix", tmp_path / "gw", settings=ROOMY) as gateway:
        client = gateway.client()
        registered = await client.register(format_of(CHUNK))
        payloads = payloads_of(registered, COUNT)
        bad = frame_bytes(Kind.DATA, 1, index=wrong, payload_bytes=CHUNK - 1)
        async with putting(gateway, registered, COUNT) as peer:
            await peer.send_bytes(frames(payloads[:wrong]) + bad)
            failure = await peer.failure()
            assert failure.code is Code.LENGTH_MISMATCH, failure
            assert f"chunk {wrong} came with {CHUNK - 1} bytes" in failure.message
            assert await peer.ended()
        await gateway.check_clean()
        assert windows_are_zero(gateway), "law 6"
        assert (await client.match(registered, keys_of(COUNT))).count == 0


class Pair:
    """An exchange of the gateway's, and its peer."""

    def __init__(self, limits: Limits) -> None:
        ours, self.peer = socket.socketpair()
        ours.setblocking(False)
        self.peer.settimeout(5)
        self.stream = FrameStream(PlainChannel(ours))
        self.exchange = Exchange(self.stream, 1, limits, pushes=True)

    def close(self) -> None:
        self.stream.close()
        self.peer.close()


@aio
async def test_a_peer_that_trickles_has_one_time_for_all_parts_of_a_group() -> None:
    pair = Pair(Limits(connections=1, hello_s=0.4, bytes_per_second_min=1e9))
    pair.peer.sendall(frame_bytes(Kind.DATA, 1, index=0, payload_bytes=10))
    await pair.exchange.begin()
    loop, target = asyncio.get_running_loop(), memoryview(bytearray(10))
    began = loop.time()
    with pytest.raises(ConnectionEnded, match="too slowly"):
        for at in range(10):
            loop.call_later(0.1, pair.peer.send, b"x")
            await pair.exchange.receive_part(Part(0, 10, at, target[at : at + 1]))
    assert 0.3 < loop.time() - began < 0.9, "with time of its own each part would have come"
    pair.close()


@pytest.mark.parametrize("there", [0, 1, 31, 32, 35, 40])
@aio
async def test_a_frame_that_has_not_come_whole_is_left_to_the_event_loop(there: int) -> None:
    pair = Pair(Limits(connections=1))
    frame = Frame(Kind.DATA, 7, 8, 3, 0, 5)
    whole = wire.encode_prefix(frame) + b"a header" + b"bytes"
    before = Frame(Kind.DATA, 7, 0, 2, 0, 6)
    pair.peer.sendall(wire.encode_prefix(before) + b"before" + whole[:there])
    assert pair.stream.pull_frame(1.0)[0] == before
    assert pair.stream.pull(memoryview(bytearray(6)), 1.0)[0] == 6
    found, left_s = pair.stream.pull_frame(0.01)
    assert (found, left_s > 0) == ((frame, True) if there == 40 else (None, there >= 32)), "a header is not waited for"
    pair.peer.sendall(whole[there:])
    if found is None:
        assert await pair.stream.receive() == (frame, b"a header")
    target = memoryview(bytearray(5))
    assert pair.stream.pull(target, 1.0)[0] == 5
    assert bytes(target) == b"bytes"
    pair.close()


@aio
async def test_a_thread_waits_for_a_peer_no_longer_than_its_patience() -> None:
    pair = Pair(Limits(connections=1))
    target = memoryview(bytearray(100))
    pair.peer.send(b"0123456789")
    began = asyncio.get_running_loop().time()
    assert pair.stream.pull(target, 0.05) == (10, 0.0)
    assert 0.04 < asyncio.get_running_loop().time() - began < 1.0
    pair.peer.send(b"abc")
    assert pair.stream.pull(target[10:], 0.0) == (3, 0.0), "what is there is taken without any"
    pair.peer.close()
    with pytest.raises(ConnectionEnded):
        pair.stream.pull(target[13:], 0.05)
    pair.close()


@aio
async def test_a_thread_refuses_what_is_no_frame() -> None:
    pair = Pair(Limits(connections=1))
    pair.peer.sendall(b"x" * 32)
    with pytest.raises(RequestRefused, match="wrong magic"):
        pair.stream.pull_frame(1.0)
    pair.close()
