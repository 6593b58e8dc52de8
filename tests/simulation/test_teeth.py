"""The simulation has teeth: with a guard taken out of a copy of the product, a seed fails that holds with it.

Each of these seeds was the first that failed. A change of the product changes what seeds do: if one does not fail any
more, look for another with ``python -m tests.simulation --seeds 100 --operations 200`` in a patched copy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("kvgw", "tenancy", "storage", "migrations", "tests")
OPERATIONS = 200


@dataclass(frozen=True)
class Bite:
    """A patch of one file, the seeds of which one must fail then, and what its breach must say."""

    file: str
    old: str
    new: str
    seeds: tuple[int, ...]
    breach: str


BITES = {
    "what a disk has is given up for a staged copy": Bite(
        "tenancy/planning.py",
        "for content, blob_id, on_a_disk in there if on_a_disk}",
        "for content, blob_id, on_a_disk in there if False}",
        (2,),
        "law 8",
    ),
    "an end is acknowledged without waiting for the others": Bite(
        "kvgw/gateway/coherence.py",
        "            if late == {}:\n                return True\n",
        "            if True:\n                return True\n",
        (4,),
        "law 5",
    ),
    "a lease is not looked at when a write ends": Bite(
        "tenancy/outbox_statements.py",
        "        .where(*_these(blob_ids), *_mine())\n        .values(state=states.OK",
        "        .where(*_these(blob_ids))\n        .values(state=states.OK",
        (9,),
        "rows disagree|law 1",
    ),
    "bytes are taken back when nobody knows whether they were committed": Bite(
        "kvgw/gateway/put.py",
        "            for name in writing.attempted:\n                rooms.staging.drop(name)\n            raise\n",
        "            await self._discard(writing, writing.attempted)\n            raise\n",
        (19,),
        "law 1|law 8",
    ),
    "an abort gives no quota back": Bite(
        "tenancy/putting.py",
        "    quota.apply(connection, scope, quota.Change(-held.stored_bytes, -held.objects, -held.s3_bytes))\n\n\n"
        "def reclaim_expired",
        "\n\ndef reclaim_expired",
        (1,),
        "law 4",
    ),
    "what is owed no more waits in staging": Bite(
        "kvgw/maintenance/crew.py",
        "        await self.settling.look(scopes)\n",
        "",
        (116,),
        "not settled.*wait in the staging",
    ),
    "time stands still while a clock is behind": Bite(
        "tenancy/timekeeping.py",
        "PACE: Final = 0.5",
        "PACE: Final = 0.0",
        (23,),
        "not settled",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", BITES)
def test_S24_a_guard_that_is_taken_out_is_missed(tmp_path: Path, what: str) -> None:
    bite = BITES[what]
    copy_tree(tmp_path)
    for seed in bite.seeds:
        before = simulate(tmp_path, seed)
        assert before.returncode == 0, f"seed {seed} fails without the patch:\n{before.stdout[-3000:]}"
    patch(tmp_path, bite)
    after = [simulate(tmp_path, seed) for seed in bite.seeds]
    found = [one.stdout for one in after if re.search(rf"BREACH .*({bite.breach})", one.stdout)]
    assert found, f"{what}, and seeds {bite.seeds} hold:\n{after[0].stdout[-3000:]}{after[0].stderr[-1000:]}"


def copy_tree(to: Path) -> None:
    for folder in COPIED:
        shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", to)


@pytest.mark.parametrize("what", BITES)
def test_what_a_bite_takes_out_is_there(what: str) -> None:
    assert (ROOT / BITES[what].file).read_text().count(BITES[what].old) == 1


def patch(root: Path, bite: Bite) -> None:
    file = root / bite.file
    file.write_text(file.read_text().replace(bite.old, bite.new))


def simulate(root: Path, seed: int) -> subprocess.CompletedProcess[str]:
    """One seed of the copy at `root`."""
    command = [sys.executable, "-m", "tests.simulation", str(seed), "--operations", str(OPERATIONS), "--quiet"]
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
