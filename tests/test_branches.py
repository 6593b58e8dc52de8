"""L08: the branches of the modules that nothing may be wrong in are taken by their own tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).resolve().parents[1]
PERCENT_MIN: Final = 95.0
MODULES: Final = (
    "tenancy/sealing.py", "tenancy/quota.py", "tenancy/putting.py", "tenancy/births.py", "tenancy/removal.py",
    "tenancy/placements.py", "tenancy/sweep.py", "storage/pool.py", "storage/shares.py", "storage/staging.py",
    "storage/residents.py",
)  # fmt: skip
"""Sealing, quota, what becomes of rows, and staging."""
SUITES: Final = (
    (
        "tests/tenancy/test_sealing_vectors.py", "tests/tenancy/test_sealing_arguments.py",
        "tests/tenancy/test_sealing_ranges.py", "tests/tenancy/test_sealing_faults.py",
    ),
    ("tests/tenancy/test_catalog_sqlite.py",),
    ("tests/tenancy/test_quota.py", "tests/tenancy/test_removal.py", "tests/tenancy/test_quota_machine.py"),
    (
        "tests/storage/test_pool.py", "tests/storage/test_pool_groups.py", "tests/storage/test_shares.py",
        "tests/storage/test_staging_windows.py", "tests/storage/test_staging_residents.py",
        "tests/storage/test_staging_waiting.py", "tests/storage/test_staging_groups.py",
    ),
)  # fmt: skip
"""The tests that are about them: what others take by the way does not count. Each group in a process of its own, since
Hypothesis traces too, and coverage.py sees nothing of threads that begin afterwards."""


def measured(folder: Path) -> dict[str, float]:
    """Lines and branches taken of each module, in percent."""
    include = ",".join(MODULES)
    pytest_run = ["-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    for suite in SUITES:
        coverage(folder, "run", "--branch", "--parallel-mode", f"--include={include}", *pytest_run, *suite)
    coverage(folder, "combine")
    coverage(folder, "json", "-o", str(folder / "found.json"))
    files = json.loads((folder / "found.json").read_text(encoding="utf-8"))["files"]
    for name in MODULES:
        print(f"L08: {name} {files[name]['summary']['percent_covered']:.1f} %, not {files[name]['missing_lines']}")
    return {name: files[name]["summary"]["percent_covered"] for name in MODULES}


def coverage(folder: Path, *arguments: str) -> None:
    environment = {**os.environ, "COVERAGE_FILE": str(folder / "data")}
    command = [sys.executable, "-m", "coverage", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr


@pytest.mark.timeout(900)
def test_L08_the_branches_are_taken(tmp_path: Path) -> None:
    found = measured(tmp_path)
    assert {name: percent for name, percent in found.items() if percent < PERCENT_MIN} == {}
