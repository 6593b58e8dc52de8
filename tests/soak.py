"""A gateway under mixed load for a long time, watched for what should not grow.

    python -m tests.soak [--minutes 30] [--every 10] [--json FILE]

Two namespaces store, find, read, delete and let expire; clients come and go; NVMe is so small that chunks are evicted
all the time. Every few seconds memory, descriptors and threads are noted. What counts is the slope of memory after the
warm-up, and that everything is given back in the end. Exit code 1 when something leaked or a byte was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import psutil

import kvgw
from kvgw.endpoint import parse_endpoint
from kvgw.model import NamespaceCreateRequest, NamespaceInfo, StatusReply, StatusRequest
from kvgw.reports import Registered
from kvgw.transport import SocketTransport
from tests.support.gateways import format_of
from tests.support.served import Served, served

MIB: Final = 1024 * 1024
SETTINGS: Final = """
[server]
http = ""
[staging]
bytes = 67108864
[nvme]
capacity_bytes = 268435456
min_free_bytes = 0
"""
CHUNK_BYTES: Final = 64 * 1024
BATCH: Final = 16
REMEMBERED: Final = 64
"""Batches of a worker that may be read again."""
LIFE_SECONDS: Final = 45.0
PAUSE_SECONDS: Final = 0.05
SETTLE_SECONDS: Final = 90.0
NAMESPACES: Final = ("left", "right")
RSS_SLOPE_MAX: Final = 1.0
"""MB a minute."""


@dataclass(frozen=True)
class Sample:
    """The gateway's process at one time."""

    minute: float
    rss_mb: float
    descriptors: int
    threads: int
    window_bytes: int
    connections: int


@dataclass
class Soak:
    """What was done and seen."""

    operations: int = 0
    wrong_bytes: int = 0
    outages: int = 0
    samples: list[Sample] = field(default_factory=list)


def content_of(namespace: str, key: bytes) -> bytes:
    return random.Random(namespace.encode() + key).randbytes(CHUNK_BYTES)


async def work(endpoint: str, namespace: str, soak: Soak, until: float) -> None:
    """Calls of one worker, one after the other; a new client now and then."""
    chance = random.Random(namespace)
    known: deque[list[bytes]] = deque(maxlen=REMEMBERED)
    while time.monotonic() < until:
        async with kvgw.connect(endpoint, options=kvgw.ClientOptions(namespace=namespace)) as client:
            registered = await client.register(format_of(CHUNK_BYTES))
            for _ in range(50):
                await call(client, registered, chance, known, soak)
                await asyncio.sleep(PAUSE_SECONDS)


async def call(
    client: kvgw.Client, registered: Registered, chance: random.Random, known: deque[list[bytes]], soak: Soak
) -> None:
    """One PUT, match and GET, or deletion."""
    soak.operations += 1
    namespace = registered.namespace
    kind = chance.random()
    if kind < 0.35 or not known:
        keys = [chance.randbytes(16) for _ in range(BATCH)]
        durability = kvgw.Durability.STAGED if kind < 0.2 else kvgw.Durability.NVME
        chunks = [content_of(namespace, key) for key in keys]
        put = await client.put(registered, keys, chunks, ttl=LIFE_SECONDS, durability=durability)
        soak.outages += put.outcome is kvgw.Outcome.OUTAGE
        known.append(keys)
    elif kind < 0.9:
        keys = chance.choice(known)
        await client.match(registered, keys)
        buffers = [bytearray(CHUNK_BYTES) for _ in keys]
        got = await client.get(registered, keys, buffers)
        soak.outages += got.outcome is kvgw.Outcome.OUTAGE
        soak.wrong_bytes += sum(buffers[hit.index] != content_of(namespace, keys[hit.index]) for hit in got.hits)
    else:
        await client.delete(registered, known.popleft())


async def watch(gateway: Served, operator: SocketTransport, soak: Soak, every_s: float, until: float) -> None:
    """Note how the process is, at a steady pace."""
    process = psutil.Process(gateway.process.pid)
    started = time.monotonic()
    while time.monotonic() < until:
        status = await operator.ask(StatusRequest(), StatusReply)
        soak.samples.append(
            Sample(
                round((time.monotonic() - started) / 60, 3),
                process.memory_info().rss / 1e6,
                process.num_fds(),
                process.num_threads(),
                status.staging.window_bytes,
                status.connections,
            )
        )
        if sys.stderr.isatty():
            print(f"\r{soak.samples[-1]}", end="", file=sys.stderr)
        await asyncio.sleep(every_s)


async def settled(operator: SocketTransport) -> StatusReply:
    """The gateway once nothing waits; or as it is when that does not come."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        status = await operator.ask(StatusRequest(), StatusReply)
        quiet = status.staging.window_bytes == status.staging.waiting == status.staging.dirty_bytes == 0
        if (quiet and status.connections == 1) or time.monotonic() > deadline:
            return status
        await asyncio.sleep(0.5)


def slope(samples: Sequence[Sample]) -> float:
    """MB a minute, by least squares."""
    mean_x = sum(one.minute for one in samples) / len(samples)
    mean_y = sum(one.rss_mb for one in samples) / len(samples)
    above = sum((one.minute - mean_x) * (one.rss_mb - mean_y) for one in samples)
    below = sum((one.minute - mean_x) ** 2 for one in samples)
    return above / below if below else 0.0


async def run(minutes: float, every_s: float) -> tuple[Soak, StatusReply]:
    soak = Soak()
    with (
        tempfile.TemporaryDirectory(prefix="kvgw-soak-") as folder,
        served(Path(folder) / "data", settings=SETTINGS) as gateway,
    ):
        endpoint = f"unix:{gateway.folder / 'kvgw.sock'}"
        operator = SocketTransport(parse_endpoint(endpoint), None, connections=1)
        try:
            for namespace in NAMESPACES:
                await operator.ask(NamespaceCreateRequest(namespace), NamespaceInfo)
            until = time.monotonic() + 60 * minutes
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(watch(gateway, operator, soak, every_s, until))
                for namespace in NAMESPACES:
                    tasks.create_task(work(endpoint, namespace, soak, until))
            last = await settled(operator)
        finally:
            await operator.aclose()
        assert gateway.stop(signal.SIGTERM) == 0, gateway.complaints()
    return soak, last


def faults(soak: Soak, last: StatusReply, warm: Sequence[Sample]) -> list[str]:
    """What should not be."""
    first, end = warm[0], warm[-1]
    rising = slope(warm)
    found = {
        f"{soak.wrong_bytes} chunks came back with other bytes": soak.wrong_bytes > 0,
        f"memory grows by {rising:.2f} MB a minute": rising >= RSS_SLOPE_MAX,
        f"descriptors grew from {first.descriptors} to {end.descriptors}": end.descriptors > first.descriptors + 8,
        f"threads grew from {first.threads} to {end.threads}": end.threads > first.threads + 2,
        f"{last.staging.window_bytes} bytes of windows were not given back": last.staging.window_bytes > 0,
        f"{last.connections - 1} connections are left": last.connections > 1,
    }
    return [sentence for sentence, is_so in found.items() if is_so]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two looks")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    soak, last = asyncio.run(run(options.minutes, options.every))
    after = min(5.0, options.minutes / 3)
    warm = [one for one in soak.samples if one.minute >= after]
    bad = faults(soak, last, warm)
    print(
        f"{options.minutes:g} minutes, {soak.operations} operations, {soak.outages} outages, "
        f"{soak.wrong_bytes} wrong; after {after:g} minutes: memory {warm[0].rss_mb:.1f} → {warm[-1].rss_mb:.1f} MB, "
        f"slope {slope(warm):+.2f} MB a minute; descriptors {warm[0].descriptors} → {warm[-1].descriptors}, "
        f"threads {warm[0].threads} → {warm[-1].threads}; load {os.getloadavg()[0]:.1f}"
    )
    for sentence in bad:
        print(f"FAULT: {sentence}")
    if options.json:
        options.json.write_text(json.dumps({"faults": bad, **asdict(soak)}, indent=1) + "\n", encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
