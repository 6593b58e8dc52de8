"""A client over shared memory: what it falls back to, what a window that was given up means, who it believes."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

import tenancy.sealing
from kvgw import wire
from kvgw.breaker import BreakerOptions
from kvgw.client import Client, ClientOptions, connect
from kvgw.errors import FormatError
from kvgw.fleet import FleetTransport
from kvgw.held import HeldWindows
from kvgw.model import Outcome
from kvgw.reports import Registered
from kvgw.runtime import SystemClock, SystemRng
from kvgw.settings import SharedMemorySettings, StagingSettings
from kvgw.stream import frame_bytes
from kvgw.transport import SocketTransport
from kvgw.wire import Kind, WindowGiven
from tests.kvgw.test_client_failopen import gateway_that
from tests.support.aio import aio
from tests.support.gateways import MIB, SMALL, House, format_of, house, keys_of, payloads_of, read, until
from tests.support.raw_peer import RawPeer

ROOMY = replace(SMALL, staging=StagingSettings(bytes=64 * MIB, tenants=1))


def shared(view: memoryview) -> bool:
    return isinstance(view.obj, mmap.mmap)


def cut(memory: memoryview, length: int) -> list[memoryview]:
    return [memory[at : at + length] for at in range(0, len(memory) - length + 1, length)]


def lent(gateway: House) -> int:
    return gateway.opened.rooms.lending.count


async def travelled(gateway: House, call: Any) -> int:
    """Payload bytes of chunks that `call` moved through the connection."""
    moved = 0
    real = wire.encode_prefix

    def counting(frame: wire.Frame) -> bytes:
        nonlocal moved
        moved += frame.payload_bytes
        return real(frame)

    with mock.patch.object(wire, "encode_prefix", counting):
        await call
    return moved


async def prepared(gateway: House, chunk_bytes: int = MIB) -> tuple[Client, Registered, list[bytes]]:
    client = gateway.client()
    registered = await client.register(format_of(chunk_bytes))
    payloads = payloads_of(registered, 2)
    assert (await client.put(registered, keys_of(2), payloads)).stored == 2
    return client, registered, payloads


# Memory of the caller's, and what moves


@aio
async def test_nothing_travels_between_windows_and_plain_memory_is_copied_once(tmp_path: Path) -> None:
    async with house("shm", tmp_path / "gw", settings=ROOMY) as gateway:
        client = gateway.client()
        registered = await client.register(format_of(MIB))
        payloads = payloads_of(registered, 4)
        async with client.window(4 * MIB) as window:
            assert shared(window)
            assert not any(window), "zeroed"
            chunks = cut(window, MIB)
            for chunk, payload in zip(chunks, payloads, strict=True):
                chunk[:] = payload
            assert await travelled(gateway, client.put(registered, keys_of(4), chunks)) == 0
            window[:] = bytes(4 * MIB)
            assert await travelled(gateway, client.get(registered, keys_of(4), chunks[::-1])) == 0
            assert [bytes(chunk) for chunk in chunks] == payloads[::-1], "each where it was asked for"
            mixed = [chunks[0], bytearray(MIB), chunks[1]]
            assert await travelled(gateway, client.get(registered, keys_of(3), mixed)) == 2 * MIB
            assert [bytes(buffer) for buffer in mixed] == payloads[:3]
        assert await travelled(gateway, read(client, registered, keys_of(4))) == 0
        assert (await read(client, registered, keys_of(4)))[1] == payloads


@aio
async def test_a_call_larger_than_its_window_goes_both_ways(tmp_path: Path) -> None:
    settings = replace(ROOMY, shared_memory=SharedMemorySettings(connection_bytes=5 * MIB // 2))
    async with house("shm", tmp_path / "gw", settings=settings) as gateway:
        client = gateway.client()
        registered = await client.register(format_of(MIB))
        payloads = payloads_of(registered, 4)
        assert await travelled(gateway, client.put(registered, keys_of(4), payloads)) == 2 * MIB
        (found, read_back) = await read(client, registered, keys_of(4))
        assert (found.leading, read_back) == (4, payloads)
        assert gateway.opened.rooms.lending.lent_bytes == 5 * MIB // 2, "as much as a connection may have"


@aio
async def test_a_window_grows_with_what_is_moved(tmp_path: Path) -> None:
    async with house("shm", tmp_path / "gw", settings=ROOMY) as gateway:
        client = gateway.client()
        registered = await client.register(format_of(MIB))
        for count, nbytes in ((1, MIB), (3, 4 * MIB), (2, 4 * MIB), (8, 8 * MIB)):
            payloads = payloads_of(registered, count, seed=count)
            await client.put(registered, keys_of(count, f"of{count}"), payloads)
            assert (lent(gateway), gateway.opened.rooms.lending.lent_bytes) == (1, nbytes)
            assert (await read(client, registered, keys_of(count, f"of{count}")))[1] == payloads


@aio
async def test_two_windows_serve_calls_at_once_and_one_takes_turns(tmp_path: Path) -> None:
    async with house("shm", tmp_path / "gw", settings=ROOMY) as gateway:
        client, registered, payloads = await prepared(gateway)
        async with client.window(2 * MIB) as one, client.window(2 * MIB) as other:
            calls = [client.get(registered, keys_of(2), cut(window, MIB)) for window in (one, other, one, other)]
            for report in await asyncio.gather(*calls):
                assert report.leading == 2
            assert [bytes(chunk) for chunk in cut(one, MIB)] == payloads == [bytes(chunk) for chunk in cut(other, MIB)]
        await until(lambda: lent(gateway) == 1)  # the one that plain memory is copied through


@pytest.mark.parametrize("nbytes", [0, -1, 2**41])
@aio
async def test_a_window_of_no_size_is_refused(tmp_path: Path, nbytes: int) -> None:
    client = connect("unix:/nowhere")
    with pytest.raises(FormatError, match="bytes"):
        async with client.window(nbytes):
            pass


# Where nothing is lent


LIMITED = {
    "none": SharedMemorySettings(bytes=0),
    "none for a tenant": SharedMemorySettings(tenant_bytes=0),
    "less than a chunk": SharedMemorySettings(connection_bytes=MIB // 2),
    "one window's worth in all": SharedMemorySettings(bytes=3 * MIB),
}


@pytest.mark.parametrize("name", LIMITED)
@aio
async def test_over_the_limit_everything_goes_through_the_socket(tmp_path: Path, name: str) -> None:
    settings = replace(ROOMY, shared_memory=LIMITED[name])
    async with house("shm", tmp_path / "gw", settings=settings) as gateway:
        limit = min(LIMITED[name].bytes, LIMITED[name].tenant_bytes)
        for _ in range(3):
            client = gateway.client()
            registered = await client.register(format_of(MIB))
            payloads = payloads_of(registered, 2)
            assert (await client.put(registered, keys_of(2), payloads)).stored == 2
            assert (await read(client, registered, keys_of(2)))[1] == payloads
            async with client.window(2 * MIB) as window:
                assert (await client.get(registered, keys_of(2), cut(window, MIB))).leading == 2
                assert [bytes(chunk) for chunk in cut(window, MIB)] == payloads
            assert gateway.opened.rooms.lending.lent_bytes <= limit


@aio
async def test_over_tcp_and_for_who_does_not_ask_nothing_is_lent(tmp_path: Path) -> None:
    async with house("tcp", tmp_path / "gw", settings=ROOMY) as gateway:
        assert gateway.endpoint is not None
        options = ClientOptions(shared_memory=True)
        async with (
            connect(str(gateway.endpoint), token=gateway.token, options=options) as remote,
            connect(f"unix:{gateway.opened.folder / 'kvgw.sock'}") as modest,
        ):
            for client in (remote, modest):
                registered = await client.register(format_of(MIB))
                payloads = payloads_of(registered, 2)
                async with client.window(2 * MIB) as window:
                    assert not shared(window)
                    await client.put(registered, keys_of(2), payloads)
                    assert (await client.get(registered, keys_of(2), cut(window, MIB))).leading == 2
                    assert [bytes(chunk) for chunk in cut(window, MIB)] == payloads
                assert lent(gateway) == 0


@aio
async def test_without_a_gateway_a_window_is_plain_memory(tmp_path: Path) -> None:
    client = connect(f"unix:{tmp_path / 'nobody'}", options=ClientOptions(shared_memory=True))
    async with client.window(MIB) as window:
        assert (len(window), shared(window), window.readonly) == (MIB, False, False)


@aio
async def test_a_relay_that_passes_no_descriptors_is_noticed_once(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw", settings=ROOMY) as gateway:
        relay = await asyncio.start_unix_server(_relayed_to(gateway), str(tmp_path / "relay"))
        async with relay, connect(f"unix:{tmp_path / 'relay'}", options=ClientOptions(shared_memory=True)) as client:
            registered = await client.register(format_of(MIB))
            payloads = payloads_of(registered, 2)
            assert (await client.put(registered, keys_of(2), payloads)).stored == 2
            assert (await read(client, registered, keys_of(2)))[1] == payloads
            async with client.window(2 * MIB) as window:
                assert not shared(window)
        await until(lambda: lent(gateway) == 0)


def _relayed_to(gateway: House) -> Callable[..., Any]:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, out = await asyncio.open_unix_connection(str(gateway.opened.folder / "kvgw.sock"))

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
            sink.close()

        await asyncio.gather(pump(reader, out), pump(back, writer), return_exceptions=True)

    return relay


@aio
async def test_an_array_over_a_window_keeps_its_memory(tmp_path: Path) -> None:
    async with house("shm", tmp_path / "gw", settings=ROOMY) as gateway:
        client = gateway.client()
        async with client.window(MIB) as window:
            array = (ctypes.c_ubyte * 16).from_buffer(window)
            window[:16] = b"sixteen bytes ok"
        assert bytes(array) == b"sixteen bytes ok", "where the client still looks there is memory"
        await until(lambda: lent(gateway) == 0)
        del array


# Windows that were given up


@aio
async def test_law_3_a_window_whose_read_was_given_up_is_used_no_more(tmp_path: Path) -> None:
    """The gateway may still write to it: nothing is read into it or stored from it, by any gateway of the client."""
    async with house("shm", tmp_path / "gw", settings=ROOMY) as gateway:
        _, registered, payloads = await prepared(gateway)
        assert gateway.endpoint is not None
        windows = HeldWindows()
        members = [(name, SocketTransport(gateway.endpoint, None, windows=windows)) for name in ("one", "other")]
        client = Client(FleetTransport(members, BreakerOptions(), SystemClock(), SystemRng()), ClientOptions())
        go_on, real = threading.Event(), tenancy.sealing.Opener.open_segment

        def slow(self: Any, index: int) -> None:
            assert go_on.wait(20)
            real(self, index)

        async with client.window(4 * MIB) as window:
            assert shared(window)
            chunks = cut(window, MIB)
            with mock.patch.object(tenancy.sealing.Opener, "open_segment", slow):
                report = await client.get(registered, keys_of(2), chunks[:2], deadline_s=0.3)
                assert report.outcome is Outcome.OUTAGE
                assert not report.hits
                report = await client.get(registered, keys_of(2), chunks[2:], deadline_s=5)
                assert report.outcome is Outcome.OUTAGE
                assert "window" in report.reason
                put = await client.put(registered, keys_of(1, "new"), chunks[:1])
                assert (put.outcome, put.stored) == (Outcome.OUTAGE, 0)
                go_on.set()
            await until(lambda: lent(gateway) == 1)  # that of the first client
            assert (await client.get(registered, keys_of(1), chunks[:1])).outcome is Outcome.OUTAGE, "for good"
            assert (await read(client, registered, keys_of(2)))[1] == payloads, "other memory works on"
        async with client.window(2 * MIB) as window:
            assert (await client.get(registered, keys_of(2), cut(window, MIB))).leading == 2
        await client.aclose()


@aio
async def test_a_window_outlives_its_gateways_connection_as_plain_memory(tmp_path: Path) -> None:
    async with house("shm", tmp_path / "gw", settings=ROOMY, check=False) as gateway:
        client, registered, payloads = await prepared(gateway)
        async with client.window(2 * MIB) as window:
            chunks = cut(window, MIB)
            (held,) = client._transport._lent  # type: ignore[attr-defined]
            held.connection.stream._channel._socket.shutdown(socket.SHUT_RDWR)
            assert (await client.get(registered, keys_of(2), chunks)).leading == 2, "it is not used again"
            assert [bytes(chunk) for chunk in chunks] == payloads
            assert (await client.put(registered, keys_of(2, "new"), chunks)).stored == 2
        await until(lambda: lent(gateway) == 1)


@aio
async def test_a_forked_child_leaves_its_parents_windows_alone(tmp_path: Path) -> None:
    async with house("shm", tmp_path / "gw", settings=ROOMY) as gateway:
        client, registered, payloads = await prepared(gateway)
        async with client.window(2 * MIB) as window:
            chunks = cut(window, MIB)
            with mock.patch("os.getpid", lambda: -1):  # as a child sees it
                assert (await client.get(registered, keys_of(2), chunks)).outcome is Outcome.OUTAGE
                assert (await read(client, registered, keys_of(2)))[1] == payloads
        await client.aclose()


# Gateways that lie


def _memfd(nbytes: int, seals: int) -> int:
    import fcntl

    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize(("length", "seals"), [(MIB, 0), (MIB, 2), (4096, 6), (MIB + 4096, 6)])
@aio
async def test_a_file_that_could_shrink_or_is_shorter_is_not_mapped(tmp_path: Path, length: int, seals: int) -> None:
    """An access behind the end of a file is a SIGBUS, which no client survives."""

    async def lie(peer: RawPeer) -> None:
        await peer.receive()
        await peer.send(Kind.WELCOME, 0, wire.Welcome(1, "x", "x", "x", "x", lends=True))
        await peer.receive()
        descriptor = _memfd(length, seals)
        socket.send_fds(peer.sock, [frame_bytes(Kind.WINDOW, 0, WindowGiven(MIB))], [descriptor])
        os.close(descriptor)
        await peer.receive()

    async with gateway_that(tmp_path, lie) as endpoint:
        files = len(os.listdir("/proc/self/fd"))
        options = ClientOptions(shared_memory=True)
        async with connect(endpoint, options=options) as client, client.window(MIB) as window:
            assert not shared(window)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= files)


@pytest.mark.parametrize("said", [[0, 0], [2], [-1], ["x"]])
@aio
async def test_chunks_that_were_not_asked_for_are_no_hits(tmp_path: Path, said: Any) -> None:
    class Anything(wire.Struct):
        indices: Any

    async def lie(peer: RawPeer) -> None:
        await peer.receive()
        await peer.send(Kind.WELCOME, 0, wire.Welcome(1, "x", "x", "x", "x", lends=True))
        await peer.receive()
        descriptor = _memfd(MIB, 6)
        socket.send_fds(peer.sock, [frame_bytes(Kind.WINDOW, 0, WindowGiven(MIB))], [descriptor])
        os.close(descriptor)
        await peer.receive()
        received = await peer.receive()
        if received is not None:
            await peer.send(Kind.OPENED, received[0].request_id, Anything(said))
            await peer.receive()

    registered = Registered(format_of(4096), "", b"f" * 32)
    async with gateway_that(tmp_path, lie) as endpoint:
        options = ClientOptions(shared_memory=True)
        async with connect(endpoint, options=options) as client, client.window(MIB) as window:
            assert shared(window)
            report = await client.get(registered, keys_of(2), cut(window[:8192], 4096), deadline_s=5)
            assert (report.outcome, report.hits) == (Outcome.OUTAGE, ())
