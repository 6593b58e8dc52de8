"""Overload: what a gateway makes of five times as much as it can serve.

    python -m tests.torture.overload [--times 5] [--seconds 6] [--at-once 6] [--json FILE]

First the capacity is looked for: more and more callers, each of whom asks again when it was answered, until that brings
no more. Then requests come at so many times that rate whether or not the ones before them were answered (an open loop),
while a hundred slow peers send a byte now and then of requests that they never finish. One gateway in a process of its
own, over its Unix socket; callers without a breaker. A fifth of the requests are matches, a fifth PUTs, the rest GETs.

Gateways have one half of the processors and callers the other, so that neither takes from the other what is measured.
Callers settle their garbage before each stretch, as gateways do: one look through all that they have imported stopped
them for 0.1 s, in which hundreds of requests fell due at once, and that was the p99.
Capacities are those of gateways that turn nobody away. Since a crowd is turned away by kind, what is served
under overload is another mix than what is asked for: the peak that it is compared with is measured once more,
afterwards, with the mix that was served.

Prints a table. Exit code 1 when one of the goals below is missed; they compare figures of the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from kvgw.breaker import BreakerOptions
from kvgw.client import Client, ClientOptions
from kvgw.endpoint import UnixEndpoint
from kvgw.errors import Code, Outage
from kvgw.model import Durability, PutOutcome, PutRequest, StatusReply, StatusRequest
from kvgw.reports import Registered
from kvgw.server.process import settle
from kvgw.transport import SocketTransport
from kvgw.wire import Kind
from tests.support.gateways import MIB, buffers_for, format_of, keys_of, payloads_of
from tests.support.raw_peer import RawPeer, frame_bytes
from tests.support.served import served
from tests.torture.asking import apart
from tests.torture.neighbours import quantile

CHUNK_BYTES: Final = 64 * 1024
BATCH: Final = 8
MIX: Final = {"match": 0.2, "put": 0.2, "get": 0.6}
DEADLINE_S: Final = 5.0
WARM_UP_S: Final = 2.0
"""A new gateway still touches its memory page by page for so long."""
CALLERS: Final = (1, 2, 4, 8, 16)
WAITING_MAX: Final = 200
"""So many requests may be under way; beyond it the callers' side is full, and what would come is counted as such."""
SLOW_PEERS: Final = 100
AT_ONCE: Final = 6
"""Requests of a tenant at once: enough for one processor, and no more than wait for it a moment."""
SETTINGS: Final = """
[server]
http = ""
connections = 1024
[staging]
bytes = 134217728
[nvme]
capacity_bytes = 1073741824
min_free_bytes = 0
[limits]
concurrent_requests = %d
"""

GOODPUT_LEAST: Final = 0.8
P99_MOST: Final = 3.0
GROWTH_MOST_MIB: Final = 64.0


@dataclass
class Load:
    """What one stretch of load came to."""

    seconds: float = 0.0
    offered: Counter[str] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """Told to come again, and when."""
    without_when: int = 0
    """Turned away as busy without a time after which to come again."""
    late: Counter[str] = field(default_factory=Counter)
    """Not answered within the deadline."""
    held_back: int = 0
    stalled_s: float = 0.0
    """How late those who ask were at worst: by so much each request of that moment took longer than the gateway did."""
    cpu_s: float = 0.0
    """Of the gateway, and of its callers, who compete for the same processors here."""
    callers_cpu_s: float = 0.0
    why: str = ""
    """What was said last to one that was not served."""
    took: list[float] = field(default_factory=list)
    """Seconds of each request that was served."""

    @property
    def goodput(self) -> float:
        """Requests served a second."""
        return self.served.total() / self.seconds if self.seconds else 0.0

    @property
    def p99(self) -> float:
        """Of what was served, in seconds."""
        return quantile(self.took, 0.99) if self.took else 0.0

    def share_refused(self, kind: str) -> float:
        return (self.refused[kind] + self.late[kind]) / max(1, self.offered[kind])

    def figures(self) -> dict[str, Any]:
        return {
            "offered_per_s": round(self.offered.total() / max(self.seconds, 1e-9), 1),
            "goodput_per_s": round(self.goodput, 1),
            "p99_ms": round(self.p99 * 1000, 1),
            "served": dict(self.served),
            "refused": dict(self.refused),
            "late": dict(self.late),
            "refused_without_when": self.without_when,
            "held_back_by_the_callers": self.held_back,
            "callers_late_ms": round(self.stalled_s * 1000, 1),
            "gateway_cpu_s": round(self.cpu_s, 2),
            "callers_cpu_s": round(self.callers_cpu_s, 2),
        }


class Callers:
    """Makes requests of the mix, one at a time or many at once."""

    def __init__(self, client: Client, endpoint: UnixEndpoint, registered: Registered, seed: int) -> None:
        self.endpoint = endpoint
        self.registered = registered
        self._client = client
        self._rng = random.Random(seed)
        self._keys = keys_of(BATCH)
        self._payloads = payloads_of(registered, BATCH)
        self._free = [buffers_for(registered, BATCH)]
        self._count = 0
        self.mix: Mapping[str, float] = MIX

    async def fill(self) -> None:
        report = await self._client.put(self.registered, self._keys, self._payloads, deadline_s=30.0, on_error="raise")
        assert set(report.outcomes) <= {PutOutcome.STORED, PutOutcome.HAVE}

    async def connect(self) -> None:
        """Open every connection that will be used: to make them is no request."""
        registered, keys = self.registered, self._keys
        asks = (self._client.match(registered, keys, deadline_s=60.0) for _ in range(WAITING_MAX))
        await asyncio.gather(*asks)

    async def one(self, load: Load) -> None:
        """One request, and what became of it."""
        (kind,) = self._rng.choices(list(self.mix), list(self.mix.values()))
        load.offered[kind] += 1
        started = time.perf_counter()
        try:
            done = await getattr(self, f"_{kind}")()
        except Outage as error:
            busy, load.why = error.code is Code.BUSY, str(error)
            (load.refused if busy else load.late)[kind] += 1
            load.without_when += busy and error.retry_after_s <= 0
            return
        took = time.perf_counter() - started
        if done and took <= DEADLINE_S:
            load.served[kind] += 1
            load.took.append(took)
        else:
            load.late[kind] += 1

    async def _match(self) -> bool:
        found = await self._client.match(self.registered, self._keys, deadline_s=DEADLINE_S, on_error="raise")
        return found.count == BATCH

    async def _get(self) -> bool:
        buffers = self._free.pop() if self._free else buffers_for(self.registered, BATCH)
        try:
            report = await self._client.get(
                self.registered, self._keys, buffers, deadline_s=DEADLINE_S, on_error="raise"
            )
        finally:
            self._free.append(buffers)
        return report.leading == BATCH

    async def _put(self) -> bool:
        self._count += 1
        report = await self._client.put(
            self.registered, keys_of(1, f"new-{self._count}"), self._payloads[:1],
            durability=Durability.STAGED, ttl=20.0, deadline_s=DEADLINE_S, on_error="raise",
        )  # fmt: skip
        return report.outcomes[0] in (PutOutcome.STORED, PutOutcome.HAVE)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def closed(callers: Callers, count: int, seconds: float) -> Load:
    """`count` callers, each of whom waits for its answer before it asks again."""
    load, started = Load(), time.monotonic()
    until = started + seconds

    async def caller() -> None:
        while time.monotonic() < until:
            await callers.one(load)

    await asyncio.gather(*(caller() for _ in range(count)))
    load.seconds = time.monotonic() - started
    return load


async def open_loop(callers: Callers, rate: float, seconds: float) -> Load:
    """`rate` requests a second, at random times, whatever becomes of those before."""
    load, rng, tasks = Load(), random.Random(5), set[asyncio.Task[None]]()
    started = due = time.monotonic()
    while (now := time.monotonic()) < started + seconds:
        load.stalled_s = max(load.stalled_s, now - due)
        while due <= now:
            due += rng.expovariate(rate)
            if len(tasks) >= WAITING_MAX:
                load.held_back += 1
                continue
            task = asyncio.create_task(callers.one(load))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(max(0.0, min(due - time.monotonic(), 0.005)))
    load.seconds = time.monotonic() - started
    await asyncio.gather(*tasks)
    return load


async def dribble(callers: Callers, begin: asyncio.Barrier, stop: asyncio.Event) -> None:
    """A peer that sends a byte of a request a second once all are connected, and never the last one."""
    peer = await RawPeer.connect(callers.endpoint)
    request = PutRequest(callers.registered.fingerprint, keys_of(1, "never"), deadline_ms=60_000)
    try:
        with suppress(ConnectionError):
            await peer.hello()
            await begin.wait()
            for byte in frame_bytes(Kind.REQUEST, 1, request)[:-1]:
                if stop.is_set():
                    break
                await peer.send_bytes(bytes([byte]))
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), 1.0)
    finally:
        peer.close()


Report = dict[str, Any]
Result = TypeVar("Result")


async def overloaded(folder: Path, pid: int, rate: float, seconds: float) -> tuple[Load, float, int]:
    """The load, by how many MiB the gateway grew under it, and the bytes of windows that were left."""
    process = psutil.Process(pid)
    async with connected(folder) as callers:
        before, begin, stop = process.memory_info().rss, asyncio.Barrier(SLOW_PEERS + 1), asyncio.Event()
        slow = [asyncio.create_task(dribble(callers, begin, stop)) for _ in range(SLOW_PEERS)]
        await begin.wait()  # to make connections is no request of theirs either
        spent = cpu_s(process), cpu_s(psutil.Process())
        load = await open_loop(callers, rate, seconds)
        stop.set()
        await asyncio.gather(*slow)
        load.cpu_s = cpu_s(process) - spent[0]
        load.callers_cpu_s = cpu_s(psutil.Process()) - spent[1]
        grown = (process.memory_info().rss - before) / MIB
        return load, grown, await held_windows(callers.endpoint)


@asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[Callers]:
    """Callers of a gateway, which has connections, pools and memory from now on."""
    endpoint = UnixEndpoint(str(folder / "kvgw.sock"))
    options = ClientOptions(breaker=BreakerOptions(failures=2**62))
    client = Client(SocketTransport(endpoint, None, connections=WAITING_MAX), options)
    try:
        callers = Callers(client, endpoint, await client.register(format_of(CHUNK_BYTES)), 1)
        await callers.fill()
        await callers.connect()
        await closed(callers, 2, WARM_UP_S)
        settle()
        yield callers
    finally:
        await client.aclose()


async def capacity(folder: Path, mix: Mapping[str, float], seconds: float, tell: Callable[[str], None]) -> Load:
    """The load that brings most; of those that bring nearly as much, the one with fewest callers."""
    found: list[Load] = []
    async with connected(folder) as callers:
        callers.mix = mix
        for count in CALLERS:
            found.append(await closed(callers, count, seconds))
            tell(f"{count} callers: {found[-1].goodput:.0f}/s, p99 {found[-1].p99 * 1e3:.0f} ms")
    most = max(one.goodput for one in found)
    assert most > 0, f"nothing was served, not even to one caller: {found[0].why}"
    return next(one for one in found if one.goodput >= 0.95 * most)


async def held_windows(endpoint: UnixEndpoint, within_s: float = 10.0) -> int:
    """Bytes of windows that are still held once nobody asks for anything."""
    operator = SocketTransport(endpoint, None)
    deadline = time.monotonic() + within_s
    try:
        while True:
            status = await operator.ask(StatusRequest(), StatusReply)
            if not status.staging.window_bytes or time.monotonic() > deadline:
                return status.staging.window_bytes
            await asyncio.sleep(0.1)
    finally:
        await operator.aclose()


def report_of(peak: Load, like: Load, over: Load, grown_mib: float, left: int) -> Report:
    """`like`: the peak with the mix that was served of the overload."""
    shares = {kind: round(over.share_refused(kind), 3) for kind in MIX}
    goals = {
        "goodput": over.goodput >= GOODPUT_LEAST * like.goodput,
        "p99": over.p99 <= P99_MOST * like.p99,
        "memory": grown_mib <= GROWTH_MOST_MIB,
        "order": shares["match"] >= shares["put"] >= shares["get"],
        "told when to come again": over.without_when == 0,
        "slow peers hold nothing": left == 0,
    }
    return {
        "peak": peak.figures(),
        "peak of what was served": like.figures(),
        "overload": over.figures(),
        "goodput_of_peak": round(over.goodput / max(like.goodput, 1e-9), 3),
        "p99_of_peak": round(over.p99 / max(like.p99, 1e-9), 2),
        "grown_mib": round(grown_mib, 1),
        "not_served": shares,
        "window_bytes_left": left,
        "goals": goals,
        "held": all(goals.values()),
    }


def measure(times: float, seconds: float, tell: Callable[[str], None], at_once: int = AT_ONCE) -> Report:
    """Measure a gateway that serves so many requests of a tenant at once (0: any number) between two that serve all.

    Each is a new one, so that none has to do what another put off.
    """
    with fresh(0) as (folder, _):
        peak = asyncio.run(_bounded(capacity(folder, MIX, seconds / 2, tell), 60 + 20 * seconds))
    with fresh(at_once) as (folder, pid):
        work = overloaded(folder, pid, times * peak.goodput, seconds)
        over, grown, left = asyncio.run(_bounded(work, 60 + 20 * seconds))
    mix = {kind: over.served[kind] for kind in MIX}
    tell("served: " + ", ".join(f"{kind} {count}" for kind, count in mix.items()))
    with fresh(0) as (folder, _):
        like = asyncio.run(_bounded(capacity(folder, mix, seconds / 2, tell), 60 + 20 * seconds))
    return report_of(peak, like, over, grown, left)


@contextmanager
def fresh(at_once: int) -> Iterator[tuple[Path, int]]:
    """The folder of a new gateway, and its process; it has one half of the processors while we have the other."""
    with tempfile.TemporaryDirectory(prefix="kvgw-overload-") as folder, apart() as to_the_callers:
        data = Path(folder) / "data"
        with served(data, settings=SETTINGS % at_once) as gateway:
            to_the_callers()
            yield data, gateway.process.pid


async def _bounded(work: Awaitable[Result], seconds: float) -> Result:
    async with asyncio.timeout(seconds):
        return await work


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=float, default=5.0, help="times the capacity")
    parser.add_argument("--seconds", type=float, default=6.0, help="of overload; each step before it takes half")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="limits.concurrent_requests; 0: no limit")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    chosen = parser.parse_args(arguments)
    report = measure(chosen.times, chosen.seconds, lambda line: print(line, flush=True), chosen.at_once)
    for name in ("peak", "overload", "peak of what was served"):
        print(name, *(f"{what} {figure}" for what, figure in report[name].items()), sep="\n  ")
    print(f"goodput {report['goodput_of_peak']:.0%} of the peak's, p99 × {report['p99_of_peak']}")
    print(f"not served: {report['not_served']}; memory {report['grown_mib']:+} MiB")
    print(*(f"{'met' if met else 'MISSED'}: {goal}" for goal, met in report["goals"].items()), sep="\n")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report, indent=1))
    return 0 if report["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
