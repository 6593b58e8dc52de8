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
SUITES: Final = ("tests/tenancy", "tests/storage")


def measured(folder: Path) -> dict[str, float]:
    """Lines and branches taken of each module, in percent."""
    environment = {**os.environ, "COVERAGE_FILE": str(folder / "data")}
    include = ",".join(MODULES)
    pytest_run = ["-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *SUITES]
    for arguments in (
        ["run", "--branch", f"--include={include}", *pytest_run],
        ["json", "-o", str(folder / "found.json")],
    ):
        run = subprocess.run(
            [sys.executable, "-m", "coverage", *arguments],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout[-4000:] + run.stderr
    files = json.loads((folder / "found.json").read_text(encoding="utf-8"))["files"]
    return {name: files[name]["summary"]["percent_covered"] for name in MODULES}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_L08_the_branches_are_taken(tmp_path: Path) -> None:
    found = measured(tmp_path)
    print(*(f"{name} {percent:.1f} %" for name, percent in found.items()), sep="\n")
    assert {name: percent for name, percent in found.items() if percent < PERCENT_MIN} == {}
