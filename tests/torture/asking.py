"""A process that reads chunks of a gateway, for measurements in which those who ask must not share an event loop.

    python -m tests.torture.asking '{"socket": "…", "token": "…", "clients": 10}'

Each line of JSON on its standard input is a `Stretch` of asking; one line says what it came to.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
from msgspec import Struct

from kvgw.client import Client, ClientOptions
from kvgw.endpoint import UnixEndpoint
from kvgw.reports import Registered
from kvgw.transport import SocketTransport
from tests.support.gateways import buffers_for, format_of, keys_of, payloads_of

CHUNK_BYTES: Final = 64 * 1024
BATCH: Final = 8


class Who(Struct, frozen=True):
    """Who asks."""

    socket: str
    token: str
    clients: int = 1


class Stretch(Struct, frozen=True):
    """What to do for so many seconds."""

    seconds: float
    every_s: float = 0.0
    """Each client reads once in so many seconds; 0: again as soon as it was answered."""
    burns: bool = False
    """Ask nothing, and use a processor."""


class Came(Struct, frozen=True):
    """What a stretch came to."""

    took: list[float] = []
    """Seconds of each read from when it was due, in order."""
    cpu_s: float = 0.0


class Asker:
    """Such a process, from outside."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def begin(self, stretch: Stretch) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(stretch).decode() + "\n")
        self._process.stdin.flush()

    def end(self) -> Came:
        assert self._process.stdout is not None
        return msgspec.json.decode(self._process.stdout.readline(), type=Came)

    def during(self, stretch: Stretch) -> Came:
        self.begin(stretch)
        return self.end()


@contextmanager
def asking(who: Who) -> Iterator[Asker]:
    """A process that is connected; its chunks are stored."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.torture.asking", msgspec.json.encode(who).decode()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        try:
            asker = Asker(process)
            assert asker.end() == Came(), "it says so when it is ready"
            yield asker
        finally:
            process.kill()


@contextmanager
def apart() -> Iterator[Callable[[], None]]:
    """What begins in the block has one half of the processors; what begins after the function was called, the other."""
    cpus = sorted(os.sched_getaffinity(0))
    half = len(cpus) // 2
    os.sched_setaffinity(0, cpus[:half] or cpus)
    try:
        yield lambda: os.sched_setaffinity(0, cpus[half:])
    finally:
        os.sched_setaffinity(0, cpus)


async def _serve(who: Who) -> None:
    endpoint = UnixEndpoint(who.socket)
    clients = [Client(SocketTransport(endpoint, who.token), ClientOptions()) for _ in range(who.clients)]
    part, keys = await clients[0].register(format_of(CHUNK_BYTES)), keys_of(BATCH)
    await clients[0].put(part, keys, payloads_of(part, BATCH), on_error="raise")
    for client in clients:
        await client.match(part, keys, on_error="raise")
    gc.freeze()  # what the libraries brought is not looked through again, or a read waits for that
    print(msgspec.json.encode(Came()).decode(), flush=True)
    for line in sys.stdin:  # nothing else is to be done while nobody asks for anything
        came = await _during(clients, part, keys, msgspec.json.decode(line, type=Stretch))
        print(msgspec.json.encode(came).decode(), flush=True)
    for client in clients:
        await client.aclose()


async def _during(clients: list[Client], part: Registered, keys: list[bytes], stretch: Stretch) -> Came:
    before, until = time.process_time(), time.perf_counter() + stretch.seconds
    if stretch.burns:
        while time.perf_counter() < until:
            pass
        return Came([], time.process_time() - before)
    each = await asyncio.gather(*(_reads(client, part, keys, until, stretch.every_s) for client in clients))
    return Came([seconds for one in each for seconds in one], time.process_time() - before)


async def _reads(client: Client, part: Registered, keys: list[bytes], until: float, every_s: float) -> list[float]:
    took, buffers = [], buffers_for(part, len(keys))
    due = time.perf_counter()
    while due < until:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        report = await client.get(part, keys, buffers, on_error="raise")
        assert report.leading == len(keys), report.reason
        now = time.perf_counter()
        took.append(now - due)
        due = due + every_s if every_s else now
    return took


if __name__ == "__main__":
    asyncio.run(_serve(msgspec.json.decode(sys.argv[1], type=Who)))
