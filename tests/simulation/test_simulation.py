"""The simulation itself: the same seed does the same, and a few seeds hold in every run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def simulation(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_same_seed_has_the_same_trace() -> None:
    """A seed that fails can be replayed: its trace is the same in every process."""
    first, second = (simulation("7", "--operations", "40", "--quiet") for _ in range(2))
    assert first.stdout.splitlines()[0].partition("trace")[2], first.stdout + first.stderr
    assert first.stdout.splitlines()[0].partition("trace")[2] == second.stdout.splitlines()[0].partition("trace")[2]


def test_a_few_seeds_break_no_law() -> None:
    """Laws 1 to 9, as far as one who sees everything can ask for them."""
    run = simulation("--seeds", "6", "--operations", "40")
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert json.loads(run.stdout.splitlines()[-1])["held"]
