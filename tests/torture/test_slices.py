"""L04, S05: a slice of each part of `make torture`, on real processes; the whole of it is a command of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.served import ROOT
from tests.torture.figures import BREACHES

LEAST = {
    "mass": {"faults": 50, "operations": 100},
    "storm": {"kills": 10, "operations": 50},
    "network": {"faults": 3, "operations": 20},
}


@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.postgres
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", LEAST)
def test_S05_L04_a_slice_of_the_torture_keeps_every_law(tmp_path: Path, part: str) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.torture.run", "--parts", part, "--seconds", "25", "--json", str(figures)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-3000:]
    found = json.loads(figures.read_text())
    assert {name: found[name] for name in BREACHES} == dict.fromkeys(BREACHES, 0)
    for name, least in LEAST[part].items():
        assert found[name] >= least, f"{found[name]} {name}: too weak to prove anything"
