"""`make torture`: kills by the hundred and faults by the ten thousand, and what must hold all the same.

    python -m tests.torture.run [--seconds 1020] [--parts mass,storm,network,gateways] [--seed N] [--json FILE]
                                [--at-most 1.5]

mass      a gateway in this process over seams that fail, four tenants         (tests/torture/mass.py)
storm     real gateways, SQLite and NVMe, killed and stopped without end       (tests/torture/storm.py)
network   two gateways, PostgreSQL and S3 behind proxies, everything killed    (tests/torture/network.py)
gateways  three gateways of which one is killed now and then                   (tests/torture/three_gateways.py)

Each part has its share of two thirds of the time. The last third goes, turn by turn, to whichever of kills, faults and
operations is furthest behind its goal, and to the part that has brought most of it so far: so a busy machine comes to
the same as an idle one. What is missing then takes up to `--at-most` times the time. A goal that is not met is said;
it is not a law.

Prints a table and, last, one line of JSON. Exit code 1 if anything did not hold. `--seconds` is for what is done; the
looks at everything afterwards come on top of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tests.torture import mass, network, storm
from tests.torture.figures import Figures, table
from tests.torture.ground import room
from tests.torture.three_gateways import Torture

SHARES: Final = {"mass": 0.2, "storm": 0.2, "network": 0.2, "gateways": 0.1}
"""Of the time, when all parts are wanted; the rest is for turns. Fewer parts share all of it, and have no goals."""
SECONDS: Final = 1020.0
GOALS: Final = {"kills": 300, "faults": 10_000, "operations": 100_000}
"""What so many seconds shall come to at least; of fewer or more their part."""
TURNS: Final = 17
"""The time of so many turns would be all of it."""
TURN_S_MIN: Final = 15.0

Tell = Callable[[str], None]


def run_gateways(folder: Path, seconds: float, seed: str) -> Figures:
    """The torture of three gateways, in the figures of all."""
    found: dict[str, Any] = Torture(folder, seconds, max(6.0, seconds / 12), seed).run()
    figures = Figures()
    figures.counts.update({"kills": found.get("kills", 0), "outages": found.get("outages", 0), "inspections": 1})
    figures.counts["operations"] = sum(
        found.get(one, 0) for one in ("puts", "gets", "deletes", "reads of what is gone")
    )
    figures.fault("gateway SIGKILL", found.get("kills", 0))
    figures.fault("disk emptied", found.get("disks emptied", 0))
    names = {
        "wrong bytes": "wrong_bytes",
        "lost from S3": "lost_acked",
        "read after its end": "read_after_end",
        "counters": "quota_drift",
    }
    for kind, count in found["breaches"].items():
        figures.breach(names.get(kind, "unforeseen"), f"three gateways: {kind}", count)
    figures.examples += found["examples"]
    return figures


def run_part(name: str, folder: Path, seconds: float, seed: str, tell: Tell) -> Figures:
    if name == "mass":
        return asyncio.run(mass.run(folder, seconds, seed, tell))
    if name == "storm":
        return asyncio.run(storm.run(folder, seconds, seed, tell))
    if name == "network":
        return network.run(folder, seconds, seed, tell)
    return run_gateways(folder, seconds, seed)


class Unforeseen(logging.Handler):
    """Counts what a gateway in this process logs as an error: a bug that it survived."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.figures = Figures()

    def emit(self, record: logging.LogRecord) -> None:
        self.figures.breach("unforeseen", self.format(record)[:2000])


class Turns:
    """Who has the time: every part once, then whoever brings what is furthest behind."""

    def __init__(self, seconds: float, at_most: float, seed: str, goals: dict[str, int]) -> None:
        """`goals`: what `SECONDS` come to; none: there are no turns after the first."""
        self.parts: dict[str, Figures] = {}
        self.goals = {name: math.ceil(goal * seconds / SECONDS) for name, goal in goals.items()}
        self._seconds, self._at_most, self._seed = seconds, at_most, seed
        self._given: defaultdict[str, float] = defaultdict(float)
        """Seconds that each part was given."""
        self._took: defaultdict[str, float] = defaultdict(float)
        """Seconds that each part took, with its looks at the end."""
        self._turns: Counter[str] = Counter()
        self._started = time.monotonic()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def take(self, name: str, seconds: float) -> None:
        """Let a part work for so long."""
        self._turns[name] += 1
        seed = f"{self._seed}/{name}" + (f"/{self._turns[name]}" if self._turns[name] > 1 else "")
        unforeseen, started = Unforeseen(), time.monotonic()
        logging.getLogger("kvgw").addHandler(unforeseen)
        try:
            found = _part(name, seconds, seed, self._started)
        finally:
            logging.getLogger("kvgw").removeHandler(unforeseen)
        found.add(unforeseen.figures)
        self.parts.setdefault(name, Figures()).add(found)
        self._given[name] += seconds
        self._took[name] += time.monotonic() - started

    def next(self) -> tuple[str, float] | None:
        """The next part and its seconds; None when the time is over, or what was over it."""
        left = self._seconds - sum(self._given.values())
        if left < 1.0 and self.missing():
            left = self._at_most * self._seconds - sum(self._given.values())
        if left < 1.0 or not self.goals:
            return None
        return self._best(self._behind()), min(max(TURN_S_MIN, self._seconds / TURNS), left)

    def missing(self) -> dict[str, int]:
        """How many of what the goals still ask for."""
        short = {name: goal - self._count(name) for name, goal in self.goals.items()}
        return {name: count for name, count in short.items() if count > 0}

    def words(self) -> str:
        """The goals and what they came to, in a line."""
        said = ", ".join(f"{self._count(name)} of {goal} {name}" for name, goal in self.goals.items())
        return f"goals {'NOT met' if self.missing() else 'met'}: {said}"

    def _behind(self) -> str:
        return min(self.goals, key=lambda name: self._count(name) / self.goals[name])

    def _best(self, goal: str) -> str:
        return max(self.parts, key=lambda part: self.parts[part].counts[goal] / max(1.0, self._took[part]))

    def _count(self, goal: str) -> int:
        return sum(part.counts[goal] for part in self.parts.values())


def _part(name: str, seconds: float, seed: str, started: float) -> Figures:
    def tell(line: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {name}: {line}", flush=True)

    tell(f"{seconds:.0f} s of it")
    folder = Path(tempfile.mkdtemp(prefix="kvgw-torture-", dir=room()))
    folder.chmod(0o755)  # PostgreSQL runs as another user
    try:
        figures = run_part(name, folder, seconds, seed, tell)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tell(figures.line())
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--at-most", type=float, default=1.5, help="times the seconds, until the goals are met")
    parser.add_argument("--parts", default=",".join(SHARES))
    parser.add_argument("--seed", default=secrets.token_hex(4))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    chosen = parser.parse_args(arguments)
    wanted = chosen.parts.split(",")
    unknown = sorted(set(wanted) - set(SHARES))
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(SHARES)}")
    print(f"seed {chosen.seed}", flush=True)
    logging.getLogger("kvgw").propagate = False
    goals = GOALS if set(wanted) == set(SHARES) else {}
    turns = Turns(chosen.seconds, chosen.at_most, chosen.seed, goals)
    whole = 1.0 if goals else sum(SHARES[name] for name in wanted)
    for name in wanted:
        turns.take(name, chosen.seconds * SHARES[name] / whole)
    while (turn := turns.next()) is not None:
        turns.take(*turn)
    parts = turns.parts
    print(table(parts))
    if goals:
        print(turns.words())
    figures = {"goals": turns.goals, "goals_met": not turns.missing()} | _summary(parts, chosen.seed, turns.elapsed_s())
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures))
    return 0 if figures["held"] else 1


def _summary(parts: dict[str, Figures], seed: str, seconds: float) -> dict[str, Any]:
    total = Figures()
    for one in parts.values():
        total.add(one)
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "held": total.held,
        **total.as_json(),
        "parts": {name: one.as_json() for name, one in parts.items()},
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; everything that was started has been ended", file=sys.stderr)
        sys.exit(130)
