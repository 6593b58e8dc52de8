"""Shared windows, reviewed: memory that is used for something else meanwhile, and who is told what."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from msgspec.structs import replace

import tenancy.sealing
from kvgw import wire
from kvgw.authenticate import Authenticator
from kvgw.breaker import BreakerOptions
from kvgw.channel import ConnectionEnded
from kvgw.client import Client, ClientOptions, connect
from kvgw.connection import Connection
from kvgw.fleet import FleetTransport
from kvgw.held import HeldWindows
from kvgw.model import Outcome, PutOutcome, PutReply, PutRequest
from kvgw.runtime import SystemClock, SystemRng
from kvgw.settings import StagingSettings
from kvgw.transport import SocketTransport
from kvgw.wire import Hello, Kind, Places, WindowGiven
from tenancy.errors import CatalogUnavailable
from tests.kvgw.test_client_failopen import gateway_that
from tests.kvgw.test_shared_memory import peer_with_window
from tests.kvgw.test_shared_memory_client import _memfd, cut, lent, shared, travelled
from tests.support.aio import aio
from tests.support.gateways import MIB, SMALL, format_of, house, keys_of, payloads_of, read, until
from tests.support.raw_peer import RawPeer, frame_bytes

ROOMY = replace(SMALL, staging=StagingSettings(bytes=64 * MIB, tenants=1))


class Gate:
    """Holds whoever comes through until it is opened."""

    def __init__(self) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.inside.set()
        assert self.go_on.wait(20)


@contextmanager
def sealing_stops(gate: Gate, segment: int) -> Iterator[None]:
    """Sealing waits at `gate` before a segment: those before it are sealed, those behind it are not read yet."""
    real = tenancy.sealing.Sealer.update

    def update(self: Any, plain: memoryview) -> None:
        if self._next == segment:
            gate.wait()
        real(self, plain)

    with mock.patch.object(tenancy.sealing.Sealer, "update", update):
        yield


@contextmanager
def opening_stops(gate: Gate) -> Iterator[None]:
    """The first segment that is opened waits at `gate`."""
    real = tenancy.sealing.Opener.open_segment

    def open_segment(self: Any, index: int) -> None:
        if not gate.inside.is_set():
            gate.wait()
        real(self, index)

    with mock.patch.object(tenancy.sealing.Opener, "open_segment", open_segment):
        yield


# Memory that becomes something else


@pytest.mark.parametrize("how", ["cancelled", "out of time"])
@aio
async def test_law_2_a_put_that_was_given_up_never_stores_what_came_into_its_memory_later(
    tmp_path: Path, how: str
) -> None:
    """The caller gets its window back and writes the next chunk there, while the gateway still reads this one."""
    async with house("shm", tmp_path / "gw", settings=ROOMY) as gateway:
        client, gate = gateway.client(), Gate()
        registered = await client.register(format_of(4 * MIB))
        async with client.window(4 * MIB) as window:
            window[:] = b"a" * len(window)
            with sealing_stops(gate, segment=2):
                deadline_s = 0.5 if how == "out of time" else 30.0
                call = asyncio.create_task(client.put(registered, [b"key"], [window], deadline_s=deadline_s))
                await until(gate.inside.is_set)
                if how == "cancelled":
                    call.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await call
                else:
                    assert (await call).outcome is Outcome.OUTAGE
                window[:] = b"b" * len(window)
                gate.go_on.set()
                await until(lambda: lent(gateway) == 0)
        assert (await read(gateway.client(), registered, [b"key"]))[1] == [None], "neither torn nor another chunk"


@aio
async def test_a_peer_that_leaves_or_speaks_while_its_places_are_read_stores_nothing(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw", settings=ROOMY) as gateway:
        client = gateway.client()
        registered = await client.register(format_of(2 * MIB))
        put = frame_bytes(Kind.REQUEST, 1, PutRequest(registered.fingerprint, [b"key"]))
        places = frame_bytes(Kind.PLACES, 1, Places([0]))
        for parting in (b"", b"K"):
            gate = Gate()
            with sealing_stops(gate, segment=1):
                async with peer_with_window(gateway, 2 * MIB) as (peer, _):
                    await peer.send_bytes(put + places)
                    await until(gate.inside.is_set)
                    await peer.send_bytes(parting)
                    if not parting:
                        peer.close()
                    gate.go_on.set()
                    await until(lambda: lent(gateway) == 0)
            assert (await client.match(registered, [b"key"])).count == 0
        async with peer_with_window(gateway, 2 * MIB) as (peer, _):
            await peer.send_bytes(put + places)
            await peer.receive()
            received = await peer.receive()
            assert received is not None
            assert wire.decode(received[1], PutReply).outcomes == [PutOutcome.STORED], "one that waits is served"


# Windows that were lost


@aio
async def test_a_call_that_waited_behind_the_one_that_lost_the_window_is_an_outage(tmp_path: Path) -> None:
    async with house("shm", tmp_path / "gw", settings=ROOMY) as gateway:
        client, gate = gateway.client(), Gate()
        registered = await client.register(format_of(MIB))
        await client.put(registered, [b"key"], payloads_of(registered, 1))
        async with client.window(MIB) as window:
            with opening_stops(gate):
                first = asyncio.create_task(client.get(registered, [b"key"], [window]))
                await until(gate.inside.is_set)
                second = asyncio.create_task(client.get(registered, [b"key"], [window]))
                await asyncio.sleep(0)
                first.cancel()
                report = await second
                gate.go_on.set()
            assert (report.outcome, report.hits) == (Outcome.OUTAGE, ())
            assert "given up" in report.reason


@aio
async def test_a_read_only_view_of_a_lost_window_is_not_stored_either(tmp_path: Path) -> None:
    async with house("shm", tmp_path / "gw", settings=ROOMY) as gateway:
        client, gate = gateway.client(), Gate()
        registered = await client.register(format_of(MIB))
        payloads = payloads_of(registered, 2)
        async with client.window(2 * MIB) as window:
            window[:] = b"".join(payloads)
            views = [chunk.toreadonly() for chunk in cut(window, MIB)]
            assert await travelled(gateway, client.put(registered, keys_of(2), views)) == 0
            assert (await read(gateway.client(), registered, keys_of(2)))[1] == payloads
            with opening_stops(gate):
                call = asyncio.create_task(client.get(registered, keys_of(1), [window[:MIB]]))
                await until(gate.inside.is_set)
                call.cancel()
                await asyncio.wait([call])
                put = await client.put(registered, keys_of(1, "new"), views[:1])
                gate.go_on.set()
            assert (put.outcome, put.stored) == (Outcome.OUTAGE, 0)


# Places


@aio
async def test_one_buffer_under_several_keys_is_stored_under_each(tmp_path: Path) -> None:
    """As over every other transport; what overlaps a place travels."""
    async with house("shm", tmp_path / "gw", settings=ROOMY) as gateway:
        client = gateway.client()
        registered = await client.register(format_of(MIB))
        async with client.window(3 * MIB) as window:
            window[:] = os.urandom(3 * MIB)
            chunks = [window[2 * MIB :], window[:MIB], window[MIB // 2 : 3 * MIB // 2], window[:MIB]]
            expected = [bytes(chunk) for chunk in chunks]
            assert await travelled(gateway, client.put(registered, keys_of(4), chunks)) == 2 * MIB
            assert (await read(gateway.client(), registered, keys_of(4)))[1] == expected
            assert await travelled(gateway, client.get(registered, keys_of(4), chunks)) == 2 * MIB


# Who is told what


@pytest.mark.parametrize("length", [0, 4096])
@aio
async def test_a_window_that_is_smaller_than_asked_for_is_not_taken(tmp_path: Path, length: int) -> None:
    async def lie(peer: RawPeer) -> None:
        await peer.receive()
        await peer.send(Kind.WELCOME, 0, wire.Welcome(1, "x", "x", "x", "x", lends=True))
        await peer.receive()
        descriptor = _memfd(length, seals=6)
        socket.send_fds(peer.sock, [frame_bytes(Kind.WINDOW, 0, WindowGiven(length))], [descriptor])
        os.close(descriptor)
        await peer.receive()

    async with gateway_that(tmp_path, lie) as endpoint:
        files = psutil.Process().num_fds()
        options = ClientOptions(shared_memory=True)
        async with connect(endpoint, options=options) as client, client.window(MIB) as window:
            assert (len(window), shared(window)) == (MIB, False)
        await until(lambda: psutil.Process().num_fds() <= files)


@aio
async def test_who_cannot_be_known_when_it_asks_for_a_window_is_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with house("shm", tmp_path / "gw", settings=ROOMY) as gateway:
        client = gateway.client(token=(await gateway.new_token())[0])
        registered = await client.register(format_of(MIB))
        payloads = payloads_of(registered, 1)

        async def down(self: Authenticator, text: str) -> None:
            raise CatalogUnavailable("the database is away")

        long_ago = mock.patch.object(Authenticator, "holds", lambda *_: False)
        with long_ago, mock.patch.object(Authenticator, "known", down):
            report = await client.put(registered, keys_of(1), payloads)
            assert report.outcome is Outcome.OUTAGE
            assert "the database is away" in report.reason
        assert not caplog.records, "nothing unforeseen"
        assert await travelled(gateway, client.put(registered, keys_of(1), payloads)) == 0, "shared again"


@aio
async def test_a_connection_that_ends_as_it_asks_for_a_window_does_not_end_sharing(tmp_path: Path) -> None:
    async with house("shm", tmp_path / "gw", settings=ROOMY) as gateway:
        client = gateway.client()
        registered = await client.register(format_of(MIB))

        async def ended(self: Connection, least: int, most: int) -> None:
            raise ConnectionEnded("ended")

        with mock.patch.object(Connection, "take_window", ended):
            assert (await client.put(registered, keys_of(2), payloads_of(registered, 2))).stored == 2
        assert await travelled(gateway, read(client, registered, keys_of(2))) == 0


@aio
async def test_a_gateway_that_did_not_answer_lately_is_not_asked_for_a_window(tmp_path: Path) -> None:
    async with house("shm", tmp_path / "gw", settings=ROOMY) as gateway:
        assert gateway.endpoint is not None
        windows = HeldWindows()
        frozen = mock.create_autospec(SocketTransport, instance=True)
        frozen.lend = mock.AsyncMock(side_effect=AssertionError("asked"))
        members = [("frozen", frozen), ("well", SocketTransport(gateway.endpoint, None, windows=windows))]
        fleet = FleetTransport(members, BreakerOptions(failures=1, period_s=60), SystemClock(), SystemRng())
        fleet._members[0].breaker.failed()
        async with Client(fleet, ClientOptions()) as client, client.window(MIB):
            assert lent(gateway) == 1


@aio
async def test_descriptors_that_a_client_passes_are_closed(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as gateway:
        assert gateway.endpoint is not None
        peer = await RawPeer.connect(gateway.endpoint)
        files = psutil.Process().num_fds()
        given = os.memfd_create("given")
        socket.send_fds(peer.sock, [frame_bytes(Kind.HELLO, 0, Hello(wire.VERSIONS, "raw"))], [given] * 3)
        assert (await peer.receive()) is not None
        for piece in (b"n", b"o", b" frame".ljust(wire.PREFIX.size)):
            socket.send_fds(peer.sock, [piece], [given] * 200)
        os.close(given)
        await peer.failure()
        assert await peer.ended()
        assert psutil.Process().num_fds() <= files
        peer.close()
