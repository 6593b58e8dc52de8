"""The simulation: gateways, disks, S3 and catalog in one thread on a virtual clock, everything from a seed.

    python -m tests.simulation SEED                 one seed, with the trace of all that happened
    python -m tests.simulation --seeds 2000         seeds 1 … 2000, with progress and totals

The same seed does the same each time, in every process. Exit code 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

HASH_SEED: Final = "0"
"""Sets of bytes and strings are walked in the order of their hashes: a seed fixes that too."""
PROGRESS_S: Final = 10.0
SEEDS_A_POOL: Final = 200
"""After so many a process ends, with whatever it has gathered."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("seed", type=int, nargs="?", help="run this one and print its trace")
    parser.add_argument("--seeds", type=int, default=0, help="run so many")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--operations", type=int, default=500, help="of all clients of a seed together")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the totals to this file")
    parser.add_argument("--quiet", action="store_true", help="of one seed, no trace but its hash")
    chosen = parser.parse_args(arguments)
    if (chosen.seed is None) == (chosen.seeds == 0):
        parser.error("give one SEED, or --seeds N")
    if chosen.seed is not None:
        return _one(chosen.seed, chosen.operations, quiet=chosen.quiet)
    return _many(range(chosen.first, chosen.first + chosen.seeds), chosen.operations, chosen.processes, chosen.json)


def _one(seed: int, operations: int, *, quiet: bool) -> int:
    from tests.simulation.run import run_seed

    result = run_seed(seed, operations, keep_trace=not quiet)
    for line in result.lines:
        print(line)
    print(f"seed {seed}: {result.virtual_s:.0f} virtual s, {result.cpu_s:.2f} CPU s, trace {result.trace_hash}")
    print(f"  faults {dict(sorted(result.fired.items()))}")
    print(f"  counts {dict(sorted(result.counts.items()))}")
    for breach in result.breaches:
        print(f"  BREACH {breach}")
    return 1 if result.breaches else 0


def _many(seeds: range, operations: int, processes: int, file: Path | None) -> int:
    began = told = time.monotonic()
    totals: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    failed: list[dict[str, Any]] = []
    for done, result in enumerate(_results(seeds, operations, processes), start=1):
        totals.update({"virtual seconds": int(result["virtual_s"]), "CPU milliseconds": int(1000 * result["cpu_s"])})
        counts.update(result["counts"])
        fired.update(result["fired"])
        if result["breaches"]:
            failed.append({"seed": result["seed"], "breaches": result["breaches"]})
            print(f"seed {result['seed']}: {result['breaches'][0]}", flush=True)
        if time.monotonic() > told + PROGRESS_S or done == len(seeds):
            told = time.monotonic()
            rate = f"{done} of {len(seeds)} seeds, {counts['operations']} operations, {sum(fired.values())} faults"
            print(f"{told - began:7.0f} s  {rate}, {len(failed)} seeds failed", flush=True)
    figures = {
        "seeds": len(seeds),
        "first": seeds.start,
        "operations": counts["operations"],
        "faults": sum(fired.values()),
        "faults_by_kind": dict(sorted(fired.items())),
        "crashes": counts["crashes"],
        "virtual_hours": round(totals["virtual seconds"] / 3600, 2),
        "cpu_seconds": round(totals["CPU milliseconds"] / 1000, 1),
        "held": not failed,
        "failed": failed,
        "counts": dict(sorted(counts.items())),
    }
    if file is not None:
        file.write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures))
    return 1 if failed else 0


def _results(seeds: range, operations: int, processes: int) -> Iterator[dict[str, Any]]:
    from tests.simulation.run import result_of

    if processes == 1:
        for seed in seeds:
            yield result_of(seed, operations)
        return
    for first in range(0, len(seeds), SEEDS_A_POOL):  # Python 3.11's max_tasks_per_child may stop for ever
        some = seeds[first : first + SEEDS_A_POOL]
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            yield from pool.map(result_of, some, [operations] * len(some))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        command = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": HASH_SEED})
    sys.exit(main())
