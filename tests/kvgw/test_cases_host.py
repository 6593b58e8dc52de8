"""What the host allows is what the pools are made for (R77)."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvgw import runtime

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("affinity", "quota", "usable"),
    [
        (64, "50000 100000\n", 1),
        (64, "250000 100000\n", 3),
        (64, "max 100000\n", 64),
        (2, "800000 100000\n", 2),
        (1, "max 100000\n", 1),
        (4, "", 4),
        (4, "nonsense\n", 4),
    ],
)
def test_R77_the_tighter_of_affinity_and_quota_counts(
    affinity: int, quota: str, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: str, *_: Any, **__: Any) -> io.StringIO:
        assert path == "/sys/fs/cgroup/cpu.max"
        if not quota:
            raise FileNotFoundError(path)
        return io.StringIO(quota)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr("builtins.open", opened)
    assert runtime.usable_cpus() == usable


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to CPUs")
def test_R77_a_process_bound_to_one_cpu_makes_pools_for_one() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); os.cpu_count = lambda: 64\n"
        "from kvgw.runtime import ThreadWorkers, usable_cpus\n"
        "workers = ThreadWorkers(); print(usable_cpus(), workers.count); workers.close()"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1", "2"], "two threads are the least: one may wait for a disk"
