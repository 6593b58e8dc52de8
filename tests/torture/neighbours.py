"""Fairness: what a tenant's reads cost beside a tenant that asks for ten times its share, and without it.

    python -m tests.torture.neighbours [--pairs 5] [--seconds 1.5]

Two tenants of one gateway, each in a process of its own, and the gateway in another: it has one half of the processors,
they the other. The loud one has ten clients, each of whom reads again as soon as it was answered. The quiet one is one
client, measured in pairs, alone and beside the loud one, in turns so that whatever else the machine does meets both:

paced   it reads at half of its share, which is half of what it gets when it reads as fast as it can, alone. Times are
        counted from when a read was due. A tenant within its share must not notice the other much.
greedy  it reads as fast as it can. Beside the other it should get its half, so that each read takes twice as long.
floor   as paced, but the loud process asks the gateway for nothing: it burns the processor that both clients share.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from tests.support.served import answer, served
from tests.torture.asking import Asker, Stretch, Who, apart, asking

LOUD_CLIENTS: Final = 10
SHARE: Final = 0.5
"""Of the gateway, for each of two tenants."""
LEAD_S: Final = 0.2
"""The loud one begins so long before the quiet one, and ends so long after it."""
SETTINGS: Final = """
[server]
http = ""
[staging]
bytes = 134217728
tenants = 4
[nvme]
capacity_bytes = 1073741824
min_free_bytes = 0
"""


@dataclass(frozen=True)
class Pair:
    """The quiet tenant's reads, in seconds each: alone, and beside the loud one."""

    alone: Sequence[float]
    beside: Sequence[float]

    @property
    def p99_ratio(self) -> float:
        return quantile(self.beside, 0.99) / quantile(self.alone, 0.99)

    @property
    def reads_ratio(self) -> float:
        return len(self.beside) / len(self.alone)

    def __str__(self) -> str:
        def figures(took: Sequence[float]) -> str:
            return f"{len(took)} reads, p50 {quantile(took, 0.5) * 1e3:.1f} ms, p99 {quantile(took, 0.99) * 1e3:.1f} ms"

        return f"alone {figures(self.alone)}; beside {figures(self.beside)}"


@dataclass
class Neighbours:
    """All pairs of a measurement."""

    paced: list[Pair] = field(default_factory=list)
    greedy: list[Pair] = field(default_factory=list)
    floor: list[Pair] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: p99 × {median(pair.p99_ratio for pair in pairs):.2f}, "
            f"reads × {median(pair.reads_ratio for pair in pairs):.2f} (medians of {len(pairs)} pairs)"
            for name, pairs in (("paced", self.paced), ("greedy", self.greedy), ("floor", self.floor))
        )


def quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def measure(pairs: int, seconds: float, tell: Callable[[str], None]) -> Neighbours:
    """Start a gateway and its tenants, and measure `pairs` rounds of six stretches of `seconds` each."""
    with ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgw-neighbours-"))) / "data"
        to_the_tenants = stack.enter_context(apart())
        stack.enter_context(served(data, settings=SETTINGS))
        to_the_tenants()
        quiet = stack.enter_context(asking(Who(str(data / "kvgw.sock"), tenant(data, "quiet"))))
        loud = stack.enter_context(asking(Who(str(data / "kvgw.sock"), tenant(data, "loud"), LOUD_CLIENTS)))
        quiet.during(Stretch(seconds))  # what is slow once is over
        alone = len(quiet.during(Stretch(seconds)).took) / seconds
        every_s = 1 / (SHARE / 2 * alone)
        tell(f"alone {alone:.0f} reads a second; paced: one in {every_s * 1e3:.1f} ms")
        found = Neighbours()
        for _ in range(pairs):
            found.paced.append(_pair(quiet, loud, Stretch(seconds, every_s), burns=False))
            found.greedy.append(_pair(quiet, loud, Stretch(seconds), burns=False))
            found.floor.append(_pair(quiet, loud, Stretch(seconds, every_s), burns=True))
            for name in ("paced", "greedy", "floor"):
                tell(f"{name}: {getattr(found, name)[-1]}")
        tell(str(found))
        return found


def tenant(data: Path, name: str) -> str:
    """A token of a new tenant."""
    answer("tenant", "create", name, "--data", str(data))
    token: str = answer("token", "create", "engine", "--tenant", name, "--data", str(data))["token"]
    return token


def _pair(quiet: Asker, loud: Asker, stretch: Stretch, *, burns: bool) -> Pair:
    alone = quiet.during(stretch).took
    loud.begin(Stretch(stretch.seconds + 2 * LEAD_S, burns=burns))
    time.sleep(LEAD_S)
    beside = quiet.during(stretch).took
    loud.end()
    return Pair(alone, beside)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=5, help="rounds")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each stretch; a round has six")
    chosen = parser.parse_args(arguments)
    measure(chosen.pairs, chosen.seconds, lambda line: print(line, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
