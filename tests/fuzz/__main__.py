"""make fuzz: python -m tests.fuzz [--target NAME] [--seconds 60] [--keep]

One process a target, for the fuzzer never returns. An input that a parser neither takes nor refuses is left in
`build/fuzz/TARGET`, and named; the next step is a test for it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.fuzz.targets import CORPUS, TARGETS, kept

FOUND: Final = Path(__file__).resolve().parents[2] / "build" / "fuzz"
INPUT_BYTES_MAX: Final = 8192
KEPT_BYTES_MAX: Final = 1024
KEPT_MAX: Final = 24
"""Small inputs, and few: the smallest that take ways of their own."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="one of them; repeatable")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--keep", action="store_true", help="write the smallest of what was found to the corpus")
    chosen = parser.parse_args()
    failed = [name for name in chosen.target or sorted(TARGETS) if not _attack(name, chosen.seconds, chosen.keep)]
    print(f"failed: {', '.join(failed)}; the inputs are in {FOUND}" if failed else "every input was taken or refused")
    return len(failed)


def _attack(name: str, seconds: int, keep: bool) -> bool:
    print(f"== {name}: {seconds} s", flush=True)
    left = FOUND / name
    left.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        grown, begun = Path(folder, "grown"), Path(folder, "begun")
        for one in (grown, begun):
            one.mkdir()
        for number, valid in enumerate(TARGETS[name].valid):
            (begun / str(number)).write_bytes(valid)
        for path in kept(name):
            shutil.copy(path, begun)
        options = [f"-max_total_time={seconds}", f"-artifact_prefix={left}/", f"-max_len={INPUT_BYTES_MAX}",
                   "-rss_limit_mb=1024", "-timeout=10", "-print_final_stats=1", "-verbosity=0"]  # fmt: skip
        command = [sys.executable, "-m", "tests.fuzz.child", name, *options, str(grown), str(begun)]
        ended = subprocess.run(command, check=False).returncode
        if keep and ended == 0:
            _keep(name, grown)
    return ended == 0


def _keep(name: str, grown: Path) -> None:
    place = CORPUS / name
    place.mkdir(parents=True, exist_ok=True)
    small = [one for one in sorted(grown.iterdir(), key=_size) if _size(one)[0] <= KEPT_BYTES_MAX]
    for path in small[:: max(1, -(-len(small) // KEPT_MAX))]:
        shutil.copy(path, place / path.name)


def _size(path: Path) -> tuple[int, str]:
    return path.stat().st_size, path.name


if __name__ == "__main__":
    sys.exit(main())
