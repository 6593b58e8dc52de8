"""Shared windows: what a client does with the memory that it shares harms itself alone, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from blake3 import blake3
from msgspec import Struct
from msgspec.structs import replace

import tenancy.sealing
from kvgw import wire
from kvgw.client import Client
from kvgw.errors import Code
from kvgw.model import GetReply, GetRequest, PutOutcome, PutReply, PutRequest, StatRequest
from kvgw.reports import Registered
from kvgw.settings import StagingSettings
from kvgw.sharedmemory import SharedWindow
from kvgw.wire import Kind, Opened, Places, Wanted, WindowAsked, WindowGiven
from tests.support.aio import aio, run
from tests.support.gateways import MIB, SMALL, House, format_of, house, keys_of, payloads_of, read, until
from tests.support.raw_peer import RawPeer, frame_bytes

CHUNK = 64 * 1024
WINDOW = 16 * CHUNK


class Anything(Struct):
    """A PLACES header with whatever the test wants in it."""

    offsets: Any


@asynccontextmanager
async def peer_with_window(gateway: House, nbytes: int = WINDOW) -> AsyncIterator[tuple[RawPeer, SharedWindow]]:
    """A peer that speaks by hand and has been lent a window."""
    assert gateway.endpoint is not None
    peer = await RawPeer.connect(gateway.endpoint)
    try:
        received = await peer.hello()
        assert received is not None
        assert wire.decode(received[1], wire.Welcome).lends
        window = await take_window(peer, nbytes)
        try:
            yield peer, window
        finally:
            window.close()
    finally:
        peer.close()


async def take_window(peer: RawPeer, nbytes: int) -> SharedWindow:
    await peer.send(Kind.WINDOW, 0, WindowAsked(nbytes, nbytes))
    await until(lambda: _readable(peer))
    data, descriptors, _, _ = socket.recv_fds(peer.sock, 4096, 4)
    frame = wire.decode_prefix(data[: wire.PREFIX.size])
    given = wire.decode(data[wire.PREFIX.size :], WindowGiven)
    assert (frame.kind, given.nbytes, len(descriptors)) == (Kind.WINDOW, nbytes, 1)
    return SharedWindow(descriptors[0], nbytes)


def _readable(peer: RawPeer) -> bool:
    try:
        return bool(peer.sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


async def prepared(gateway: House, chunk_bytes: int = CHUNK, count: int = 4) -> tuple[Client, Registered, list[bytes]]:
    client = gateway.client()
    registered = await client.register(format_of(chunk_bytes))
    payloads = payloads_of(registered, count)
    assert (await client.put(registered, keys_of(count), payloads)).stored == count
    return client, registered, payloads


def cut(memory: memoryview, length: int) -> list[memoryview]:
    return [memory[at : at + length] for at in range(0, len(memory) - length + 1, length)]


def mapped(gateway: House) -> int:
    """Windows that this process, the gateway, has mapped."""
    return gateway.opened.rooms.lending.count


# What a peer says about places

WRONG_PLACES: dict[str, Any] = {
    "behind the end": [0, WINDOW],
    "over the end": [0, WINDOW - CHUNK + 1],
    "far away": [0, 2**40],
    "beyond what is sensible": [0, 2**63],
    "negative": [0, -1],
    "the same": [0, 0],
    "overlapping": [0, CHUNK - 1],
    "overlapping, the later first": [CHUNK, 1],
    "overlapping one of several": [0, 2 * CHUNK, CHUNK + 1],
    "more than are wanted": [CHUNK * at for at in range(5)],
    "none": [],
    "no numbers": ["0", "1"],
    "no list": 7,
    "a fraction": [0.5],
}


@pytest.mark.parametrize("wrong", WRONG_PLACES)
@aio
async def test_a_put_from_places_that_cannot_be_costs_its_connection(tmp_path: Path, wrong: str) -> None:
    async with house("unix", tmp_path / "gw") as gateway:
        client, registered, payloads = await prepared(gateway)
        async with peer_with_window(gateway) as (peer, _):
            await peer.send(Kind.REQUEST, 1, PutRequest(registered.fingerprint, keys_of(4, "new")))
            received = await peer.receive()
            assert received is not None
            assert wire.decode(received[1], Wanted).indices == [0, 1, 2, 3]
            await peer.send(Kind.PLACES, 1, Anything(WRONG_PLACES[wrong]))
            assert (await peer.failure()).code is Code.BAD_REQUEST
            assert await peer.ended()
        await gateway.check_clean()
        assert (await client.match(registered, keys_of(4, "new"))).count == 0, "law 1"
        assert (await read(client, registered, keys_of(4)))[1] == payloads, "other clients are served throughout"


@pytest.mark.parametrize("wrong", WRONG_PLACES)
@aio
async def test_a_get_into_places_that_cannot_be_writes_nothing(tmp_path: Path, wrong: str) -> None:
    async with house("unix", tmp_path / "gw") as gateway:
        client, registered, payloads = await prepared(gateway)
        async with peer_with_window(gateway) as (peer, window):
            window.view[:] = b"\xee" * WINDOW
            await peer.send_bytes(
                frame_bytes(Kind.PLACES, 1, Anything(WRONG_PLACES[wrong]))
                + frame_bytes(Kind.REQUEST, 1, GetRequest(registered.fingerprint, keys_of(4)))
            )
            assert (await peer.failure()).code is Code.BAD_REQUEST
            assert bytes(window.view) == b"\xee" * WINDOW, "law 3"
        await gateway.check_clean()
        assert (await read(client, registered, keys_of(4)))[1] == payloads


@aio
async def test_places_need_a_window_and_a_request_behind_them(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as gateway:
        _, registered, _ = await prepared(gateway)
        get = GetRequest(registered.fingerprint, keys_of(1))
        words = {
            "no window": (False, frame_bytes(Kind.PLACES, 1, Places([0])) + frame_bytes(Kind.REQUEST, 1, get)),
            "places twice": (True, frame_bytes(Kind.PLACES, 1, Places([0])) * 2),
            "with payload": (True, frame_bytes(Kind.PLACES, 1, Places([0]), payload_bytes=1) + b"x"),
            "a window with payload": (True, frame_bytes(Kind.WINDOW, 0, WindowAsked(1, 1), payload_bytes=1) + b"x"),
            "a window of nothing": (True, frame_bytes(Kind.WINDOW, 0, WindowAsked(0, 0))),
            "a huge window": (True, frame_bytes(Kind.WINDOW, 0, WindowAsked(1, 2**41))),
            "what only gateways say": (True, frame_bytes(Kind.OPENED, 1, Opened([0]))),
        }
        for name, (with_window, said) in words.items():
            assert gateway.endpoint is not None
            peer = await RawPeer.connect(gateway.endpoint)
            await peer.hello()
            window = await take_window(peer, WINDOW) if with_window else None
            await peer.send_bytes(said)
            assert (await peer.failure()).code is Code.BAD_REQUEST, name
            assert await peer.ended(), name
            peer.close()
            if window is not None:
                window.close()
        await gateway.check_clean()


@aio
async def test_places_of_another_request_do_not_count(tmp_path: Path) -> None:
    """Places are for the GET behind them; another request in between ends them."""
    async with house("unix", tmp_path / "gw") as gateway:
        _, registered, _ = await prepared(gateway)
        async with peer_with_window(gateway) as (peer, window):
            window.view[:] = b"\xee" * WINDOW
            await peer.send_bytes(
                frame_bytes(Kind.PLACES, 1, Places([0])) + frame_bytes(Kind.REQUEST, 1, StatRequest())
            )
            received = await peer.receive()
            assert received is not None
            assert received[0].kind is Kind.DONE
            await peer.send(Kind.REQUEST, 2, GetRequest(registered.fingerprint, keys_of(1)))
            received = await peer.receive()
            assert received is not None
            assert (received[0].kind, received[0].payload_bytes) == (Kind.DATA, CHUNK)
            assert bytes(window.view) == b"\xee" * WINDOW


@aio
async def test_some_chunks_travel_and_some_lie_in_the_window(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as gateway:
        client, registered, _ = await prepared(gateway)
        payloads = payloads_of(registered, 4, seed=9)
        async with peer_with_window(gateway) as (peer, window):
            await peer.send(Kind.REQUEST, 1, PutRequest(registered.fingerprint, keys_of(4, "new")))
            await peer.receive()
            for index, offset in ((0, 3 * CHUNK), (1, 64)):
                window.view[offset : offset + CHUNK] = payloads[index]
                await peer.send(Kind.PLACES, 1, Places([offset]))
            for index in (2, 3):
                await peer.send_bytes(frame_bytes(Kind.DATA, 1, index=index, payload_bytes=CHUNK) + payloads[index])
            received = await peer.receive()
            assert received is not None
            assert wire.decode(received[1], PutReply).outcomes == [PutOutcome.STORED] * 4
            await peer.send(Kind.PLACES, 2, Places([CHUNK + 7, 5 * CHUNK]))
            await peer.send(Kind.REQUEST, 2, GetRequest(registered.fingerprint, keys_of(4, "new")))
            opened: list[int] = []
            travelled: dict[int, bytes] = {}
            while (received := await peer.receive()) is not None and received[0].kind is not Kind.DONE:
                if received[0].kind is Kind.OPENED:
                    opened += wire.decode(received[1], Opened).indices
                else:
                    travelled[received[0].index] = await peer._exactly(received[0].payload_bytes) or b""
            assert received is not None
            assert sorted(hit.index for hit in wire.decode(received[1], GetReply).hits) == [0, 1, 2, 3]
            assert opened == [0, 1], "law 3: announced when they are whole"
            assert bytes(window.view[CHUNK + 7 : 2 * CHUNK + 7]) == payloads[0]
            assert bytes(window.view[5 * CHUNK : 6 * CHUNK]) == payloads[1]
            assert travelled == {2: payloads[2], 3: payloads[3]}
        assert (await read(client, registered, keys_of(4, "new")))[1] == payloads


# A client that writes while the gateway reads


class Scribbling:
    """An AES-GCM that lets the client write to its window after the gateway has hashed and before it seals."""

    def __init__(self, real: Any, scribble: Any) -> None:
        self._real, self._scribble = real, scribble

    def encrypt_into(self, *arguments: Any) -> Any:
        self._scribble()
        return self._real.encrypt_into(*arguments)


@aio
async def test_a_client_that_writes_during_its_put_spoils_its_own_chunk_only(tmp_path: Path) -> None:
    """The chunk id is the hash of what was sealed, whatever lay in the window before and after."""
    settings = replace(SMALL, staging=StagingSettings(bytes=64 * MIB, tenants=1))
    async with house("shm", tmp_path / "gw", settings=settings) as gateway:
        client = gateway.client()
        registered = await client.register(format_of(5 * MIB // 2))
        async with client.window(registered.chunk_bytes) as window:
            window[:] = b"a" * len(window)
            letters = iter(range(ord("b"), ord("z")))

            def scribble() -> None:
                window[:] = bytes([next(letters)]) * len(window)

            real = tenancy.sealing.AESGCM
            with mock.patch.object(tenancy.sealing, "AESGCM", lambda key: Scribbling(real(key), scribble)):
                assert (await client.put(registered, [b"torn"], [window])).stored == 1
        stored = (await read(client, registered, [b"torn"]))[1][0]
        assert stored is not None, "it opens"
        assert [stored[at * MIB] for at in range(3)] == list(b"abc"), "each segment is what it was when it was copied"
        assert [len(set(stored[at * MIB : (at + 1) * MIB])) for at in range(3)] == [1, 1, 1]
        ((chunk_id,),) = await gateway.rows("SELECT chunk_id FROM chunk")
        place = await gateway.opened.directory.place(gateway.owner, "")
        assert blake3(stored, key=place.keys.names.chunk_id.reveal()).digest() == bytes(chunk_id)


@aio
async def test_what_is_written_into_the_window_of_a_get_changes_nothing_that_is_kept(tmp_path: Path) -> None:
    async with house("shm", tmp_path / "gw") as gateway:
        client, registered, payloads = await prepared(gateway, MIB, 2)
        stop = threading.Event()
        async with client.window(2 * MIB) as window:

            def scribble() -> None:
                while not stop.is_set():
                    window[:] = b"\xee" * len(window)

            writer = threading.Thread(target=scribble)
            writer.start()
            try:
                for _ in range(5):
                    assert (await client.get(registered, keys_of(2), cut(window, MIB))).leading == 2
            finally:
                stop.set()
                writer.join()
        assert (await read(gateway.client(), registered, keys_of(2)))[1] == payloads


# Clients that end


@aio
async def test_R45_peers_with_windows_that_break_off_anywhere_leave_nothing(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as gateway:
        client, registered, payloads = await prepared(gateway)
        put = PutRequest(registered.fingerprint, keys_of(4, "broken"))
        get = GetRequest(registered.fingerprint, keys_of(4))
        places = Places([CHUNK * at for at in range(4)])
        stories = {
            "after the window": b"",
            "inside a put": frame_bytes(Kind.REQUEST, 1, put),
            "inside places": (frame_bytes(Kind.REQUEST, 1, put) + frame_bytes(Kind.PLACES, 1, places))[:-3],
            "some places": frame_bytes(Kind.REQUEST, 1, put) + frame_bytes(Kind.PLACES, 1, Places([0, CHUNK])),
            "a whole put": frame_bytes(Kind.REQUEST, 1, put) + frame_bytes(Kind.PLACES, 1, places),
            "places without a get": frame_bytes(Kind.PLACES, 1, places),
            "a whole get": frame_bytes(Kind.PLACES, 1, places) + frame_bytes(Kind.REQUEST, 1, get),
        }
        files = psutil.Process().num_fds()
        for name, said in stories.items():
            for turn in range(4):
                async with peer_with_window(gateway) as (peer, _):
                    await peer.send_bytes(said)
                    for _ in range(turn * 3):
                        await asyncio.sleep(0)
            await gateway.check_clean()
            assert gateway.opened.rooms.lending.lent_bytes == 0, name
        assert (await read(client, registered, keys_of(4)))[1] == payloads
        assert psutil.Process().num_fds() <= files, "descriptors are back to start"
        stat = await client.stat()
        assert stat.objects == stat.chunks == stat.entries, "each put happened as a whole or not at all"


@aio
async def test_law_7_a_window_stays_until_the_thread_that_writes_to_it_has_finished(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as gateway:
        _, registered, payloads = await prepared(gateway, MIB, 1)
        inside, go_on = threading.Event(), threading.Event()
        real = tenancy.sealing.Opener.open_segment

        def slow(self: Any, index: int) -> None:
            inside.set()
            assert go_on.wait(20)
            real(self, index)

        with mock.patch.object(tenancy.sealing.Opener, "open_segment", slow):
            async with peer_with_window(gateway, MIB) as (peer, window):
                kept = SharedWindow(os.dup(descriptor_of(window)), MIB)
                await peer.send(Kind.PLACES, 1, Places([0]))
                await peer.send(Kind.REQUEST, 1, GetRequest(registered.fingerprint, keys_of(1), deadline_ms=3000))
                await until(inside.is_set)
            await asyncio.sleep(3.5)  # its deadline and its grace are over, and the client is gone
            assert mapped(gateway) == 1, "law 7"
            assert not any(kept.view[:4096])
            go_on.set()
            await until(lambda: mapped(gateway) == 0)
        assert bytes(kept.view) == payloads[0], "the thread wrote into memory that was still the operation's"
        kept.close()


def descriptor_of(window: SharedWindow) -> int:
    """Python's mapping keeps a duplicate of its file: find it among this process's."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "kvgw-window" in os.readlink(f"/proc/self/fd/{name}") and os.fstat(int(name)).st_size == window.nbytes:
                return int(name)
    raise AssertionError("no window is mapped")


KILLED = """
import asyncio, os, sys
from kvgw.bench.subjects import format_of
from kvgw.client import ClientOptions, connect
MIB = 1 << 20
def keys_of(count, name):
    return [f"{name}-{index}".encode() for index in range(count)]
async def main():
    client = connect(sys.argv[1], options=ClientOptions(shared_memory=True))
    registered = await client.register(format_of(MIB))
    async with client.window(8 * MIB) as window:
        assert "mmap" in repr(type(window.obj))
        chunks = [window[at * MIB:(at + 1) * MIB] for at in range(8)]
        print("ready", flush=True)
        for turn in range(10**6):
            window[:8] = turn.to_bytes(8, "big")
            await client.put(registered, keys_of(8, f"{os.getpid()}-{turn}"), chunks)
            await client.get(registered, keys_of(8, f"{os.getpid()}-{turn}"), chunks)
            await client.delete(registered, keys_of(8, f"{os.getpid()}-{turn}"))
asyncio.run(main())
"""


@pytest.mark.timeout(240)
def test_clients_that_are_killed_leave_no_window_slot_or_reservation(tmp_path: Path) -> None:
    run(_clients_that_are_killed(tmp_path), timeout=220)


async def _clients_that_are_killed(tmp_path: Path) -> None:
    settings = replace(SMALL, staging=StagingSettings(bytes=64 * MIB, tenants=1))
    async with house("unix", tmp_path / "gw", settings=settings) as gateway:
        client, registered, payloads = await prepared(gateway)
        root = Path(__file__).resolve().parents[2]
        for kill in range(4):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", KILLED, str(gateway.endpoint), cwd=root, stdout=subprocess.PIPE
            )
            assert process.stdout is not None
            assert await process.stdout.readline() == b"ready\n"
            assert mapped(gateway) >= 1
            await asyncio.sleep(0.017 * kill)
            process.kill()
            await process.wait()
            await until(lambda: mapped(gateway) == 0, 20)
        await gateway.check_clean(20)
        assert (await read(client, registered, keys_of(4)))[1] == payloads


def of_clients() -> int:
    """Descriptors of sockets and of windows: files of the disk tier are nobody's, and come and go by themselves."""
    kinds = ("socket:", "/memfd:")
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            count += os.readlink(f"/proc/self/fd/{number}").startswith(kinds)
    return count


@pytest.mark.timeout(240)
@aio
async def test_a_thousand_clients_that_come_and_go_leave_no_descriptor_and_no_mapping(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as gateway:
        await prepared(gateway)
        before = of_clients()
        for turn in range(1000):
            async with peer_with_window(gateway, 4096):
                if turn % 100 == 99:
                    assert mapped(gateway) <= 40
        await gateway.check_clean(20)
        assert mapped(gateway) == 0
        assert of_clients() <= before
        assert "kvgw-window" not in Path("/proc/self/maps").read_text(encoding="ascii")
