"""S01, S02, S03, C12: every scenario with one fault at its N-th call into tier, catalog or key store, for N = 1, 2, …

An error before the call, an error after it was done, and a cancellation of whoever waits for it, before and after.
Then the gateway starts again, every lease runs out, and every law is looked at.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.aio import run
from tests.support.manual_clock import ManualClock
from tests.torture.bench import Bench, Ledger, open_files
from tests.torture.faults import ANYWHERE, EXIT_CODE, Kind, Nth
from tests.torture.nursery import Nursery
from tests.torture.scenarios import SCENARIOS, Scenario, stock

pytestmark = pytest.mark.timeout(300)

CALLS_MAX = 400
LEAST = 8
"""Even the shortest scenario, reading, makes so many calls."""
STRIDE = 6
"""In the ordinary run every so manieth call, each with another kind of fault; all of all among the slow tests."""
ENDS = (Kind.EXIT, Kind.EXIT_AFTER)
HOUR_MS = 3_600_000
CLOCK_MS = 1_900_000_000_000
"""Later than any file is written, so that the grace of orphans is over when the clock says so."""


@dataclass
class Stocked:
    """A folder with a gateway's data and what stands for its bucket, and what was acknowledged there."""

    folder: Path
    ledger: Ledger
    now_ms: int

    def copy(self, folder: Path) -> None:
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("*.sock"))


@pytest.fixture(scope="module")
def quick() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of syncs cost nothing there, and no power is lost here."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="kvgw-nth-", dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def stocked(quick: Path) -> Stocked:
    return run(make_stock(quick / "stock"))


async def make_stock(folder: Path) -> Stocked:
    folder.mkdir()
    bench = Bench(folder, ManualClock(CLOCK_MS), Ledger())
    async with bench.open():
        await bench.prepare()
        await stock(bench)
    assert len(bench.ledger.kept) == 8
    return Stocked(folder, bench.ledger, bench.clock.now_ms())


async def once(stocked: Stocked, folder: Path, scenario: Scenario, plan: Nth) -> None:
    """One run with one fault, and everything that must hold after it."""
    stocked.copy(folder)
    bench = Bench(folder, ManualClock(stocked.now_ms), stocked.ledger.twin(), plan=plan)
    before = open_files()
    async with bench.open():
        await bench.ready()
        plan.armed = True
        await scenario(bench)
        plan.armed = False
        await bench.check_held()
    await again(bench)
    assert open_files() <= before, f"law 7: left open: {open_files() - before}"


async def again(bench: Bench) -> None:
    """The gateway comes back, and all is as it must be."""
    async with bench.open():
        await bench.check_at_once()
        await bench.check_reads()
        await bench.settle()
        await bench.check()


@contextmanager
def visit(quick: Path, plan: Nth) -> Iterator[Path]:
    """A folder for one run; what fails in it names the fault."""
    try:
        yield quick / "run"
    except BaseException as error:
        error.add_note(f"the fault was: {plan}")
        raise
    finally:
        shutil.rmtree(quick / "run", ignore_errors=True)


def loop(stocked: Stocked, quick: Path, scenario: Scenario, kinds: tuple[Kind, ...], stride: int) -> int:
    """Faults at call 1, 1 + `stride`, … until none comes any more, each of another kind; how many were met."""
    for met, number in enumerate(range(1, CALLS_MAX, stride)):
        plan = Nth(number, kinds[met % len(kinds)])
        with visit(quick, plan) as folder:
            run(once(stocked, folder, scenario, plan))
        if not plan.fired:
            return met
    raise AssertionError(f"the scenario makes more than {CALLS_MAX} calls")


@pytest.mark.parametrize("name", SCENARIOS)
def test_S01_S02_a_fault_at_some_calls_breaks_no_law(stocked: Stocked, quick: Path, name: str) -> None:
    assert loop(stocked, quick, SCENARIOS[name], ANYWHERE, STRIDE) >= 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ANYWHERE)
@pytest.mark.parametrize("name", SCENARIOS)
def test_S01_S02_a_fault_at_any_call_breaks_no_law(stocked: Stocked, quick: Path, name: str, kind: Kind) -> None:
    met = loop(stocked, quick, SCENARIOS[name], (kind,), 1)
    print(f"S01/S02: {name}, {kind}: met at each of {met} calls")
    assert met >= LEAST


# The start and the end of a gateway


async def start(stocked: Stocked, folder: Path, plan: Nth) -> None:
    """A start that meets the fault, and another one that must find everything."""
    stocked.copy(folder)
    bench = Bench(folder, ManualClock(stocked.now_ms), stocked.ledger.twin(), plan=plan)
    before = open_files()

    async def open_and_close() -> None:
        async with bench.open(armed=True):
            pass

    await bench.step(open_and_close())
    plan.armed = False
    await again(bench)
    assert open_files() <= before, f"law 7: left open: {open_files() - before}"


@pytest.mark.parametrize("kind", ANYWHERE)
def test_S01_a_start_that_meets_a_fault_leaves_nothing_behind(stocked: Stocked, quick: Path, kind: Kind) -> None:
    for number in range(1 + ANYWHERE.index(kind), CALLS_MAX, STRIDE):
        plan = Nth(number, kind)
        with visit(quick, plan) as folder:
            run(start(stocked, folder, plan))
        if not plan.fired:
            assert number > 5
            return


# The process ends


def end_at(folder: str, scenario: str, number: int, kind: str, now_ms: int, diary: str) -> int:
    """In a process of its own: run a scenario until the fault ends it; 0 when none came."""
    file = os.open(diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    bench = Bench(Path(folder), ManualClock(now_ms), Ledger(), plan=Nth(number, Kind(kind)))
    bench.diary = lambda line: void(os.write(file, line.encode() + b"\n"))

    async def body() -> None:
        async with bench.open():
            await bench.ready()
            bench.plan.armed = True
            await SCENARIOS[scenario](bench)
            bench.plan.armed = False

    run(body())
    return 0


def void(_: object) -> None: ...


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


def exits(stocked: Stocked, quick: Path, nursery: Nursery, name: str, kinds: tuple[Kind, ...], stride: int) -> int:
    """Let the process end at call 1, 1 + `stride`, … until it does not any more; how often it ended."""
    for met, number in enumerate(range(1, CALLS_MAX, stride)):
        plan = Nth(number, kinds[met % len(kinds)])
        with visit(quick, plan) as folder:
            stocked.copy(folder)
            diary, log = folder / "diary", folder / "log"
            diary.touch()
            pid = nursery.spawn(
                "tests.torture.test_nth_call:end_at",
                *(str(folder), name, number, kinds[met % len(kinds)], stocked.now_ms, str(diary)),
                log=log,
            )
            ended = nursery.wait(pid)
            assert ended in (0, EXIT_CODE), log.read_text()
            ledger = stocked.ledger.twin()
            for line in diary.read_text().splitlines():
                ledger.take(*line.split())
            run(again(Bench(folder, ManualClock(stocked.now_ms + HOUR_MS), ledger)))
        if ended == 0:
            return met
    raise AssertionError(f"the scenario makes more than {CALLS_MAX} calls")


@pytest.mark.parametrize("name", ["put", "delete", "shred", "write-back"])
def test_S01_S02_a_process_that_ends_at_some_calls_breaks_no_law(
    stocked: Stocked, quick: Path, nursery: Nursery, name: str
) -> None:
    assert exits(stocked, quick, nursery, name, ENDS, STRIDE) >= 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_S01_S02_a_process_that_ends_at_any_call_breaks_no_law(
    stocked: Stocked, quick: Path, nursery: Nursery, name: str, kind: Kind
) -> None:
    met = exits(stocked, quick, nursery, name, (kind,), 1)
    print(f"S01/S02: {name}, {kind}: met at each of {met} calls")
    assert met >= LEAST
