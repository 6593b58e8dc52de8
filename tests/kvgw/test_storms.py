"""Storms of peers: cancelled without end (I11), slow without end (Q14), and probes of a TLS listener (R45)."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from kvgw import wire
from kvgw.client import Client
from kvgw.model import GetRequest, PutRequest
from kvgw.reports import Registered
from kvgw.server.limits import Limits
from kvgw.wire import Kind
from tests.support.admin import Admin
from tests.support.aio import aio, run
from tests.support.encrypted import tls_house
from tests.support.gateways import (
    MIB,
    House,
    buffers_for,
    format_of,
    house,
    keys_of,
    limited_house,
    payloads_of,
    read,
)
from tests.support.raw_peer import RawPeer, frame_bytes

CHUNK = 4096
KEYS = keys_of(8)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "calls"), [("tcp", 400), pytest.param("tcp", 5_000, marks=pytest.mark.slow), ("embedded", 400)]
)
def test_I11_cancelled_requests_leave_nobody_anothers_answer(tmp_path: Path, kind: str, calls: int) -> None:
    run(cancelled(tmp_path / "gw", kind, calls), timeout=380)


async def cancelled(folder: Path, kind: str, calls: int) -> None:
    """Two tenants with the same keys and different bytes; each one's calls share its connections."""
    chance = random.Random(11)
    async with house(kind, folder) as gateway:  # type: ignore[arg-type]
        one = await _first(gateway)
        other = await (_second if kind == "tcp" else _beside)(gateway)
        told = [payloads_of(part, 8, seed=seed + 1) for seed, (_, part) in enumerate((one, other))]
        for (client, part), mine in zip((one, other), told, strict=True):
            assert (await client.put(part, KEYS, mine)).stored == 8
        whole = 0

        async def call(number: int) -> None:
            nonlocal whole
            who = number % 2
            (client, part), mine = (one, other)[who], told[who]
            match number // 2 % 4:
                case 0:
                    buffers = buffers_for(part, 8)
                    report = await client.get(part, KEYS, buffers)
                    for hit in report.hits:
                        assert bytes(buffers[hit.index]) == mine[hit.index], "law 6: another tenant's answer"
                case 1:
                    assert (await client.match(part, KEYS)).count in (0, 8)
                case 2:
                    await client.put(part, keys_of(2, f"new-{who}-{number}"), mine[:2], ttl=1)
                case _:
                    assert (await read(client, part, [b"none", KEYS[number % 8]]))[1][0] is None
            whole += 1

        for start in range(0, calls, 20):
            tasks = [asyncio.create_task(call(number)) for number in range(start, start + 20)]
            for task in tasks:
                for _ in range(chance.randrange(6)):
                    await asyncio.sleep(0)
                if chance.random() < 0.7:
                    task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                assert ended is None or isinstance(ended, asyncio.CancelledError), ended
        assert whole >= calls // 10, "some were answered"
        await gateway.check_clean()
        for (client, part), mine in zip((one, other), told, strict=True):
            assert (await read(client, part, KEYS))[1] == mine


async def _first(gateway: House) -> tuple[Client, Registered]:
    client = gateway.client()
    return client, await client.register(format_of(CHUNK))


async def _second(gateway: House) -> tuple[Client, Registered]:
    """A client of another tenant."""
    admin = Admin(gateway.opened)
    await admin.own("POST", "/tenants", {"name": "theirs"})
    wanted = {"name": "engine", "permissions": ["chunk:get", "chunk:put"]}
    token = (await admin.own("POST", "/tenants/theirs/tokens", wanted))["token"]
    client = gateway.client("default", token=token)
    return client, await client.register(format_of(CHUNK))


async def _beside(gateway: House) -> tuple[Client, Registered]:
    """A client of another namespace: the embedded client is one tenant's."""
    await gateway.namespace("theirs")
    client = gateway.client("theirs")
    return client, await client.register(format_of(CHUNK))


PATIENT = Limits(connections=520, hello_s=8.0, bytes_per_second_min=MIB)
SLOW = 500


@pytest.mark.timeout(240)
@aio
async def test_Q14_five_hundred_peers_of_a_byte_a_second_hold_up_nobody(tmp_path: Path) -> None:
    """A third of them never finish their first frame, a third a request, a third the payload of a PUT."""
    async with limited_house(tmp_path / "gw", PATIENT) as gateway:
        assert gateway.endpoint is not None
        client = gateway.client()
        part = await client.register(format_of(CHUNK))
        payloads = payloads_of(part, 8)
        await client.put(part, KEYS, payloads)

        async def p99() -> float:
            took = []
            for _ in range(200):
                started = time.perf_counter()
                assert (await read(client, part, KEYS))[1] == payloads
                took.append(time.perf_counter() - started)
            return sorted(took)[197]

        alone = [await p99() for _ in range(3)]
        ended = asyncio.Event()
        with ExitStack() as stack:
            peers = [stack.enter_context(closing(await RawPeer.connect(gateway.endpoint))) for _ in range(SLOW)]
            trickling = [asyncio.create_task(_trickle(at, peer, part, ended)) for at, peer in enumerate(peers)]
            await asyncio.sleep(1.0)  # a byte each
            beside = [await p99() for _ in range(3)]
            ended.set()
            await asyncio.gather(*trickling)
            print(f"Q14: p99 {min(alone) * 1e3:.1f} ms alone, {min(beside) * 1e3:.1f} ms beside {SLOW} slow peers")
            assert min(beside) < max(2 * min(alone), 0.05)
        await gateway.check_clean(within_s=20)
        assert (await read(client, part, KEYS))[1] == payloads


async def _trickle(at: int, peer: RawPeer, part: Registered, ended: asyncio.Event) -> None:
    hello = frame_bytes(Kind.HELLO, 0, wire.Hello(wire.VERSIONS, "raw"))
    put = PutRequest(part.fingerprint, keys_of(1, f"slow-{at}"), deadline_ms=200_000)
    with suppress(OSError):  # the gateway may lose its patience
        if at % 3 == 0:
            await _bytewise(peer, hello, ended)
            return
        await peer.hello()
        if at % 3 == 1:
            get = GetRequest(part.fingerprint, KEYS, deadline_ms=200_000)
            await _bytewise(peer, frame_bytes(Kind.REQUEST, 1, get), ended)
            return
        await peer.send(Kind.REQUEST, 1, put)
        await peer.receive()
        await peer.send(Kind.DATA, 1, index=0, payload_bytes=CHUNK)
        await _bytewise(peer, bytes(CHUNK), ended)


async def _bytewise(peer: RawPeer, data: bytes, ended: asyncio.Event) -> None:
    for at in range(len(data)):
        await peer.send_bytes(data[at : at + 1])
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), 1.0)
            return


@aio
async def test_R45_probes_of_a_tls_listener_that_never_say_hello_are_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with tls_house(tmp_path / "gw") as gateway:
        assert gateway.endpoint is not None
        client = gateway.client()
        part = await client.register(format_of(CHUNK))
        payloads = payloads_of(part, 8)
        await client.put(part, KEYS, payloads)
        for probe in range(150):
            peer = await RawPeer.connect(gateway.endpoint)
            if probe % 3 == 1:
                await peer.send_bytes(b"\x16\x03\x01\x00")  # the beginning of a handshake
            peer.close() if probe % 2 else peer.reset()
        assert (await read(client, part, KEYS))[1] == payloads
        await gateway.check_clean()
        assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
