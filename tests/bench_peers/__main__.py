"""The command line of the peers' bench."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvgw.errors import KvgwError
from tests.bench_peers.report import plot, show
from tests.bench_peers.run import SYSTEMS, measure

NAMES = [name for names in SYSTEMS.values() for name in names]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.bench_peers", description="The gateway beside other stores.")
    made.add_argument("--rounds", type=int, default=9, help="rounds that count; one more warms up (default: 9)")
    made.add_argument("--json", type=Path, help="write rows and limits to this file")
    made.add_argument("--plot", type=Path, help="draw them to this file, .svg or .png")
    made.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    made.add_argument("--skip", nargs="+", choices=NAMES, default=[], metavar="NAME", help="all but these")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """0, 1 when a gateway could not be measured, 130 when it was interrupted."""
    options = parser().parse_args(arguments)
    if options.rounds < 1:
        parser().error(f"--rounds is at least 1, not {options.rounds}")
    systems = [name for name in options.only if name not in options.skip]
    try:
        report = measure(systems, options.rounds)
    except KeyboardInterrupt:
        print("interrupted; all that was started has ended", file=sys.stderr)
        return 130
    except KvgwError as error:
        print(f"the bench cannot go on: {error}", file=sys.stderr)
        return 1
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    if options.plot is not None:
        plot(report, options.plot)
    show(report)
    return 1 if any(note.startswith("kvgw") for note in report.notes) else 0


if __name__ == "__main__":
    sys.exit(main())
