"""`make torture`: kills by the hundred and faults by the ten thousand, and what must hold all the same.

    python -m tests.torture.run [--seconds 1020] [--parts mass,storm,network,gateways] [--seed N] [--json FILE]

mass      a gateway in this process over seams that fail, four tenants         (tests/torture/mass.py)
storm     real gateways, SQLite and NVMe, killed and stopped without end       (tests/torture/storm.py)
network   two gateways, PostgreSQL and S3 behind proxies, everything killed    (tests/torture/network.py)
gateways  three gateways of which one is killed now and then                   (tests/torture/three_gateways.py)

Prints a table and, last, one line of JSON. Exit code 1 if anything did not hold. `--seconds` is for what is done; the
looks at everything afterwards come on top of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tests.torture import mass, network, storm
from tests.torture.figures import Figures, table
from tests.torture.ground import room
from tests.torture.three_gateways import Torture

SHARES: Final = {"mass": 0.25, "storm": 0.4, "network": 0.25, "gateways": 0.1}
"""Of the time, when all parts are wanted."""

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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1020.0)
    parser.add_argument("--parts", default=",".join(SHARES))
    parser.add_argument("--seed", default=secrets.token_hex(4))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    chosen = parser.parse_args(arguments)
    wanted = chosen.parts.split(",")
    unknown = sorted(set(wanted) - set(SHARES))
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(SHARES)}")
    print(f"seed {chosen.seed}", flush=True)
    unforeseen = Unforeseen()
    logging.getLogger("kvgw").addHandler(unforeseen)
    logging.getLogger("kvgw").propagate = False
    whole = sum(SHARES[name] for name in wanted)
    parts: dict[str, Figures] = {}
    started = time.monotonic()
    for name in wanted:
        parts[name] = _part(name, chosen.seconds * SHARES[name] / whole, f"{chosen.seed}/{name}", started)
        parts[name].add(unforeseen.figures)
        unforeseen.figures = Figures()
    print(table(parts))
    figures = _summary(parts, chosen.seed, time.monotonic() - started)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures))
    return 0 if figures["held"] else 1


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
