"""L04, S05: a slice of each part of `make torture`, on real processes; the whole of it is a command of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.served import ROOT
from tests.torture import run as torture
from tests.torture.figures import BREACHES, Figures

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


BRINGS = {
    "mass": {"faults": 60, "operations": 300},
    "storm": {"kills": 1, "faults": 1, "operations": 40},
    "network": {"faults": 3, "operations": 20},
    "gateways": {"operations": 30},
}
"""What a second of each part comes to, on a machine that does nothing else."""


@pytest.mark.parametrize(("slower", "met", "seconds"), [(1, True, 1020), (1.5, True, 1530), (20, False, 1530)])
def test_the_time_goes_to_what_is_furthest_behind_its_goal(
    monkeypatch: pytest.MonkeyPatch, slower: float, met: bool, seconds: int
) -> None:
    """A busy machine brings less of everything; until the limit its time goes to what is missing."""
    given: list[tuple[str, float]] = []

    def part(name: str, seconds: float, seed: str, started: float) -> Figures:
        given.append((name, seconds))
        figures = Figures()
        figures.counts.update({what: int(count * seconds / slower) for what, count in BRINGS[name].items()})
        return figures

    monkeypatch.setattr(torture, "_part", part)
    turns = torture.Turns(torture.SECONDS, 1.5, "seed", torture.GOALS)
    for name, share in torture.SHARES.items():
        turns.take(name, torture.SECONDS * share)
    while (turn := turns.next()) is not None:
        turns.take(*turn)
    assert [name for name, _ in given[:4]] == list(torture.SHARES)
    assert (not turns.missing()) == met, turns.words()
    assert sum(spent for _, spent in given) <= seconds + 1
    assert {name for name, _ in given[4:]} == {"mass", "storm"}, "kills and faults are nobody else's to bring"
