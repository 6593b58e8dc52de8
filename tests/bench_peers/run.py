"""The order of things: start everything, measure round by round, end everything, however this ends."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvgw.bench.processes import Child
from kvgw.bench.report import machine, median_limits
from kvgw.errors import KvgwError
from tests.bench_peers import gateways, limits, others, pair
from tests.bench_peers.contenders import ANSWER_SECONDS, About, Contender, measure_case
from tests.bench_peers.environments import Environment, PeerAbsent, prepare
from tests.bench_peers.places import BucketPlace
from tests.bench_peers.plan import TRANSPORTS, Report, Tier, schedule
from tests.bench_peers.protocol import Machine, MeasureMachine
from tests.bench_peers.report import Figures, rows
from tests.bench_peers.servers import client, last_words
from tests.support.seaweed import Seaweed

SYSTEMS: Final[Mapping[Tier, tuple[str, ...]]] = {
    "memory": (
        *(f"kvgw-{transport}" for transport in TRANSPORTS),
        "redis",
        "redis-py",
        "memcached",
        "lmcache",
        "mooncake",
    ),
    "postgres": ("kvgw-postgres",),
    "nvme": ("kvgw-nvme", "kvgw-nvme-shm"),
    "s3": ("kvgw-s3", "kvgw-s3-shm", "s3-tuned", "s3-default", "s3-obstore"),
}
"""By the names that --only and --skip take."""

WORDS: Final = 400
"""Longest reason, in characters."""

ENVIRONMENTS: Final = {
    "redis": "redis",
    "redis-py": "redis",
    "memcached": "memcached",
    "lmcache": "lmcache",
    "mooncake": "mooncake",
    "s3-obstore": "obstore",
}


@dataclass
class Run:
    """What was started, what was measured, and what is absent."""

    contenders: dict[str, Contender] = field(default_factory=dict)
    abouts: dict[str, About] = field(default_factory=dict)
    figures: Figures = field(default_factory=dict)
    machines: list[Machine] = field(default_factory=list)
    load_by_round: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def drop(self, name: str, error: Exception, folder: Path) -> None:
        """A system that failed is absent from the rows, and the notes say why."""
        self.contenders.pop(name, None)
        self.figures = {key: samples for key, samples in self.figures.items() if key[0] != name}
        said = "; ".join(words for log in sorted(folder.glob("*log")) if (words := last_words(log)))
        self.notes.append(f"{name} is absent: {str(error)[:WORDS]}" + (f"; its logs end: {said}" if said else ""))
        tell(self.notes[-1])


def tell(sentence: str) -> None:
    """Progress, on standard error."""
    print(sentence, file=sys.stderr, flush=True)


def measure(systems: Sequence[str], rounds: int) -> Report:
    """Measure what is named. Raises `KeyboardInterrupt` after Ctrl-C and SIGTERM, when all processes are gone."""
    started = time.monotonic()
    load_before = os.getloadavg()
    run = Run()
    environments = _environments(systems, run)
    asyncio.run(_measure(systems, rounds, environments, run))
    medians = median_limits([one.limits for one in run.machines])
    trips = {
        name: statistics.median(one.round_trips_us[name] for one in run.machines)
        for name in run.machines[0].round_trips_us
    }
    return Report(
        rows=rows(run.abouts, run.figures, medians, trips),
        limits=medians,
        round_trips_us=trips,
        machine=machine(load_before, os.getloadavg()),
        load_by_round=run.load_by_round,
        rounds=rounds,
        seconds=time.monotonic() - started,
        notes=run.notes,
    )


def _environments(systems: Sequence[str], run: Run) -> dict[str, Environment]:
    found: dict[str, Environment] = {}
    for name in dict.fromkeys(ENVIRONMENTS[system] for system in systems if system in ENVIRONMENTS):
        tell(f"environment: .venv-bench-{name}")
        try:
            found[name] = prepare(others.NEEDS[name])
        except PeerAbsent as error:
            run.notes.append(f"{name} is absent: it cannot be installed: {error}")
            tell(run.notes[-1])
    return found


async def _measure(systems: Sequence[str], rounds: int, environments: Mapping[str, Environment], run: Run) -> None:
    with _terminate_like_interrupt():
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgw-peers-")))
            yardstick = await stack.enter_async_context(client("limits", limits.__name__, log=folder / "limits.log"))
            await _start(systems, environments, folder, stack, run)
            tiers = {tier: [name for name in names if name in run.contenders] for tier, names in SYSTEMS.items()}
            for step in schedule(rounds, tiers):
                if isinstance(step, int):
                    await _measure_machine(yardstick, folder, step, run)
                elif step.system in run.contenders:
                    try:
                        samples = await measure_case(run.contenders[step.system], step.case)
                    except KvgwError as error:
                        run.drop(step.system, error, folder / step.system)
                        continue
                    for op, sample in samples.items() if step.round else ():
                        run.figures.setdefault((step.system, op, step.case), []).append(sample)


async def _measure_machine(yardstick: Child, folder: Path, number: int, run: Run) -> None:
    yardstick.tell(MeasureMachine(str(folder)))
    found = await yardstick.hear(Machine, ANSWER_SECONDS)
    if number:
        run.machines.append(found)
        run.load_by_round.append(round(os.getloadavg()[0], 2))
    tell(f"round {number} done; load average {os.getloadavg()[0]:.2f}")


async def _start(
    systems: Sequence[str], environments: Mapping[str, Environment], folder: Path, stack: AsyncExitStack, run: Run
) -> None:
    weed = _weed(folder, stack) if any(name in (*SYSTEMS["s3"], *SYSTEMS["postgres"]) for name in systems) else None
    for name in systems:
        if name in ENVIRONMENTS and ENVIRONMENTS[name] not in environments:
            continue  # noted when it could not be installed
        tell(f"starting: {name}")
        place = folder / name
        place.mkdir()
        try:
            contender = await stack.enter_async_context(_contender(name, environments, weed, place))
        except (KvgwError, OSError) as error:
            run.drop(name, error, place)
        else:
            run.contenders[name] = contender
            run.abouts[name] = contender.about


def _weed(folder: Path, stack: AsyncExitStack) -> Seaweed:
    tell("starting: SeaweedFS")
    return stack.enter_context(Seaweed(folder / "weed"))


def _contender(
    name: str, environments: Mapping[str, Environment], weed: Seaweed | None, folder: Path
) -> AbstractAsyncContextManager[Contender]:
    for transport in TRANSPORTS:
        if name == f"kvgw-{transport}":
            return gateways.staged(transport, folder)
    if name in SYSTEMS["nvme"]:
        return gateways.in_tier("nvme", None, folder, "shm" if name.endswith("-shm") else "unix")
    if name in SYSTEMS["postgres"]:
        assert weed is not None
        return pair.on_postgres(weed, folder)
    if name in SYSTEMS["s3"]:
        assert weed is not None
        bucket = BucketPlace(weed.endpoint, weed.region, weed.bucket, weed.access_key, weed.secret_key)
        match name:
            case "kvgw-s3" | "kvgw-s3-shm":
                return gateways.in_tier("s3", bucket, folder, "shm" if name.endswith("-shm") else "unix")
            case "s3-obstore":
                return others.obstore(environments[ENVIRONMENTS[name]], bucket, folder)
            case _:
                return others.s3(name, bucket, folder)
    environment = environments[ENVIRONMENTS[name]]
    match name:
        case "redis" | "redis-py":
            return others.redis(name, environment, folder)
        case "memcached":
            return others.memcached(environment, folder)
        case "lmcache":
            return others.lmcache(environment, folder)
        case _:
            return others.mooncake(environment, folder)


@contextmanager
def _terminate_like_interrupt() -> Iterator[None]:
    """Take SIGTERM for Ctrl-C, even where a shell has the latter ignored: both end the processes that were started."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
