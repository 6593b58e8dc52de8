"""A gateway under mixed load for a long time, watched for what should not grow.

    python -m tests.soak [--minutes 30] [--every 10] [--json FILE]

Four tenants store, find, read, delete and let expire chunks of 0.1 to 64 MiB, four reads to a write; clients come and
go; NVMe is so small that chunks are evicted all the time. Every few seconds memory, descriptors and threads are noted.
What counts is the slope of memory after the warm-up, and that everything is given back in the end. Exit code 1 when
something leaked, a byte was wrong or a call was an outage (L01).
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
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Final

import psutil
from blake3 import blake3

import kvgw
from kvgw.endpoint import parse_endpoint
from kvgw.model import StatusReply, StatusRequest
from kvgw.reports import Registered
from kvgw.transport import SocketTransport
from tests.support.gateways import format_of
from tests.support.served import Served, answer, served

MIB: Final = 1024 * 1024
SETTINGS: Final = """
[server]
http = ""
[staging]
bytes = 1073741824
tenants = 4
[nvme]
capacity_bytes = 2147483648
min_free_bytes = 0
"""
SHAPES: Final = ((102_400, 32, 8), (MIB, 16, 4), (8 * MIB, 4, 2), (64 * MIB, 1, 1))
"""Bytes of a chunk, chunks of a call, and how often."""
REMEMBERED: Final = 32
"""Batches of a worker that may be read again."""
LIFE_SECONDS: Final = 45.0
PAUSE_SECONDS: Final = 0.05
SETTLE_SECONDS: Final = 90.0
TENANTS: Final = ("north", "east", "south", "west")
LOG_SHOWN: Final = 4000
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
    hits: int = 0
    wrong_bytes: int = 0
    outages: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Why, by what was asked."""
    samples: list[Sample] = field(default_factory=list)
    log: str = ""
    """What the gateway said."""

    def note(self, verb: str, report: kvgw.PutReport | kvgw.GetReport) -> None:
        if report.outcome is kvgw.Outcome.OUTAGE:
            self.outages += 1
            self.reasons[f"{verb}: {report.reason}"] += 1


def content_of(tenant: str, key: bytes, nbytes: int) -> bytes:
    return blake3(tenant.encode() + key).digest(nbytes)


@dataclass
class Worker:
    """One tenant's calls, one after the other; a new client now and then."""

    tenant: str
    token: str
    soak: Soak
    known: deque[tuple[int, list[bytes]]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Shape and keys of batches."""

    async def work(self, endpoint: str, until: float) -> None:
        chance = random.Random(self.tenant)
        while time.monotonic() < until:
            async with kvgw.connect(endpoint, token=self.token) as client:
                formats = [await client.register(format_of(nbytes)) for nbytes, _, _ in SHAPES]
                for _ in range(50):
                    self.soak.operations += 1
                    await self.call(client, formats, chance)
                    await asyncio.sleep(PAUSE_SECONDS)

    async def call(self, client: kvgw.Client, formats: Sequence[Registered], chance: random.Random) -> None:
        kind = chance.random()
        if kind < 0.2 or not self.known:
            (shape,) = chance.choices(range(len(SHAPES)), [weight for _, _, weight in SHAPES])
            await self.store(client, formats[shape], shape, chance, staged=kind < 0.1)
        elif kind < 0.98:
            shape, keys = chance.choice(self.known)
            await self.read(client, formats[shape], shape, keys)
        else:
            shape, keys = self.known.popleft()
            await client.delete(formats[shape], keys)

    async def store(
        self, client: kvgw.Client, registered: Registered, shape: int, chance: random.Random, *, staged: bool
    ) -> None:
        nbytes, count, _ = SHAPES[shape]
        keys = [chance.randbytes(16) for _ in range(count)]
        put = await client.put(
            registered,
            keys,
            [content_of(self.tenant, key, nbytes) for key in keys],
            ttl=LIFE_SECONDS,
            durability=kvgw.Durability.STAGED if staged else kvgw.Durability.NVME,
        )
        self.soak.note("put", put)
        self.known.append((shape, keys))

    async def read(self, client: kvgw.Client, registered: Registered, shape: int, keys: Sequence[bytes]) -> None:
        nbytes = SHAPES[shape][0]
        await client.match(registered, keys)
        buffers = [bytearray(nbytes) for _ in keys]
        got = await client.get(registered, keys, buffers)
        self.soak.note("get", got)
        wrong = (buffers[hit.index] != content_of(self.tenant, keys[hit.index], nbytes) for hit in got.hits)
        self.soak.hits += len(got.hits)
        self.soak.wrong_bytes += sum(wrong)


def token_of(data: Path, tenant: str) -> str:
    """A token of a new tenant."""
    answer("tenant", "create", tenant, "--data", str(data))
    token: str = answer("token", "create", "engine", "--tenant", tenant, "--data", str(data))["token"]
    return token


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
            data = gateway.folder
            workers = [Worker(one, await asyncio.to_thread(token_of, data, one), soak) for one in TENANTS]
            until = time.monotonic() + 60 * minutes
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(watch(gateway, operator, soak, every_s, until))
                for worker in workers:
                    tasks.create_task(worker.work(endpoint, until))
            last = await settled(operator)
        finally:
            await operator.aclose()
        code, soak.log = gateway.stop(signal.SIGTERM), gateway.complaints()
        assert code == 0, soak.log
    return soak, last


def middle(samples: Sequence[Sample]) -> tuple[float, float]:
    """Descriptors and threads, the medians: a deletion holds folders open for a moment."""
    return median(one.descriptors for one in samples), median(one.threads for one in samples)


def faults(soak: Soak, last: StatusReply, warm: Sequence[Sample]) -> list[str]:
    """What should not be."""
    third = max(1, len(warm) // 3)
    first, end = middle(warm[:third]), middle(warm[-third:])
    rising = slope(warm)
    found = {
        f"{soak.wrong_bytes} chunks came back with other bytes": soak.wrong_bytes > 0,
        f"{soak.outages} calls were outages": soak.outages > 0,
        f"memory grows by {rising:.2f} MB a minute": rising >= RSS_SLOPE_MAX,
        f"descriptors grew from {first[0]} to {end[0]}": end[0] > first[0] + 8,
        f"threads grew from {first[1]} to {end[1]}": end[1] > first[1] + 2,
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
        f"{options.minutes:g} minutes, {soak.operations} operations, {soak.hits} hits, {soak.outages} outages, "
        f"{soak.wrong_bytes} wrong; after {after:g} minutes: memory {warm[0].rss_mb:.1f} → {warm[-1].rss_mb:.1f} MB, "
        f"slope {slope(warm):+.2f} MB a minute; descriptors {warm[0].descriptors} → {warm[-1].descriptors}, "
        f"threads {warm[0].threads} → {warm[-1].threads}; load {os.getloadavg()[0]:.1f}"
    )
    for reason, count in soak.reasons.most_common():
        print(f"outage, {count} times: {reason}")
    for sentence in bad:
        print(f"FAULT: {sentence}")
    if bad:
        print(f"what the gateway said last:\n{soak.log[-LOG_SHOWN:]}")
    if options.json:
        # Of a Counter `asdict` would count the pairs.
        options.json.write_text(
            json.dumps({"faults": bad, **asdict(replace(soak, reasons=Counter())), "reasons": soak.reasons}, indent=1)
            + "\n",
            encoding="utf-8",
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
