"""A gateway at its limits: out of descriptors, killed under its clients, and read by many at once."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

import kvgw
from kvgw.breaker import BreakerOptions
from kvgw.client import ClientOptions
from kvgw.model import Outcome
from tests.support.aio import aio, run
from tests.support.gateways import buffers_for, format_of, house, keys_of, payloads_of, read
from tests.support.served import served


@pytest.mark.timeout(180)
def test_R43_out_of_descriptors_the_established_are_served(tmp_path: Path) -> None:
    with served(tmp_path / "gw", files=64) as running, contextlib.ExitStack() as held:
        path, port = str(tmp_path / "gw" / "kvgw.sock"), int(running.http.rpartition(":")[2])

        async def scenario() -> None:
            async with kvgw.connect(f"unix:{path}") as client:
                registered = await client.register(format_of())
                payloads = payloads_of(registered, 2)
                assert (await client.put(registered, keys_of(2), payloads)).stored == 2
                for _ in range(100):
                    held.enter_context(open_unix(path))
                for _ in range(50):
                    held.enter_context(socket.create_connection(("127.0.0.1", port)))
                process = psutil.Process(running.process.pid)
                cpu, started = sum(process.cpu_times()[:2]), time.monotonic()
                while time.monotonic() - started < 3:
                    report, read_back = await read(client, registered, keys_of(2))
                    assert read_back == payloads, report
                    await asyncio.sleep(0.1)
                assert await asyncio.to_thread(livez, running.http) == b"ok\n", "R43: a prober still gets its answer"
                assert sum(process.cpu_times()[:2]) - cpu < 0.2 * 3, "R43: it does not spin"
                held.close()
                async with asyncio.timeout(4), kvgw.connect(f"unix:{path}") as newcomer:
                    assert (await newcomer.match(registered, keys_of(2))).count == 2, "R43: and new ones come in again"

        run(scenario())
        assert running.stop() == 0
        lines = running.complaints().splitlines()
        assert len(lines) < 20, f"R43: {lines}"
        assert any("connections instead of 512" in line for line in lines), "the limit is derived from the process's"


def livez(http: str) -> bytes:
    with urllib.request.urlopen(f"{http}/livez", timeout=5) as answer:
        return bytes(answer.read())


def open_unix(path: str) -> socket.socket:
    """A connection that says nothing; one that does not fit into the queue is given up."""
    peer = socket.socket(socket.AF_UNIX)
    peer.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        peer.connect(path)
    return peer


@pytest.mark.timeout(180)
def test_killed_and_started_again_under_the_same_client(tmp_path: Path) -> None:
    options = ClientOptions(read_deadline_s=5, breaker=BreakerOptions(period_s=0.05, period_max_s=0.1))

    async def scenario() -> None:
        async with kvgw.connect(f"unix:{tmp_path}/gw/kvgw.sock", options=options) as client:
            with served(tmp_path / "gw") as running:
                registered = await client.register(format_of())
                payloads = payloads_of(registered, 3)
                await client.put(registered, keys_of(3), payloads)
                writing = asyncio.create_task(client.put(registered, keys_of(64, "more"), payloads_of(registered, 64)))
                await asyncio.sleep(0)
                running.stop(signal.SIGKILL)
                report = await writing
                assert report.outcome in (Outcome.OK, Outcome.OUTAGE)
                assert (await client.match(registered, keys_of(3))).outcome is Outcome.OUTAGE
            with served(tmp_path / "gw") as running:  # its socket was left behind
                while (match := await client.match(registered, keys_of(3))).outcome is Outcome.OUTAGE:
                    await asyncio.sleep(0.02)
                assert match.count == 3, "law 8: what was acknowledged as nvme survives kill -9"
                assert (await read(client, registered, keys_of(3)))[1] == payloads
                stat = await client.stat()
                assert stat.chunks == stat.objects or report.outcome is Outcome.OUTAGE
                assert running.stop() == 0

    run(scenario(), timeout=120)


@pytest.mark.parametrize("kind", ["unix", "embedded"])
@aio
async def test_R19_overlapping_reads_end_on_their_own(tmp_path: Path, kind: str) -> None:
    chance = random.Random(19)
    async with house(kind, tmp_path / "gw") as gateway:  # type: ignore[arg-type]
        one, other, deleter = (gateway.client() for _ in range(3))
        registered = await one.register(format_of(16 * 1024))
        keys, payloads = keys_of(48), payloads_of(registered, 48)
        await one.put(registered, keys, payloads)
        staging = gateway.opened.rooms.staging
        for turn in range(30):
            async for blob in gateway.opened.rooms.tiers["nvme"].scan():
                staging.drop(blob.name)  # the next read comes from NVMe
            first = asyncio.create_task(one.get(registered, keys[:32], buffers_for(registered, 32)))
            second = asyncio.create_task(read(other, registered, keys[16:]))
            for _ in range(chance.randrange(60)):
                await asyncio.sleep(0)
            if turn % 2:
                first.cancel()
            else:
                victim = chance.randrange(16)
                await deleter.delete(registered, [keys[victim]])
                await deleter.put(registered, [keys[victim]], [payloads[victim]])
            report, read_back = await second
            assert (report.leading, read_back) == (32, payloads[16:]), "R19: the other always ends with right bytes"
            await asyncio.gather(first, return_exceptions=True)
