"""The suite has teeth: with a law's guard taken out of a copy of the product, a named test fails and names the law."""

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


@dataclass(frozen=True)
class Bite:
    """A patch of one file, and the test that must not let it pass."""

    file: str
    old: str
    new: str
    test: str
    law: str
    """What the failure's message must say."""


BITES = {
    "directories are not synced": Bite(
        "storage/nvme/tree.py",
        "    try:\n        os.fsync(fd)\n",
        "    try:\n        pass\n",
        "tests/torture/test_power_loss.py::test_S04_acknowledged_blobs_survive_a_power_cut_at_any_moment",
        r"law 8: blob \d was acknowledged and is lost",
    ),
    "data is not synced": Bite(
        "storage/nvme/tree.py",
        "        os.fdatasync(fd)\n",
        "        pass\n",
        "tests/torture/test_power_loss.py::test_S04_acknowledged_blobs_survive_a_power_cut_at_any_moment",
        r"law [38]: blob \d|BlobDamaged",
    ),
    "the commitment is not checked": Bite(
        "tenancy/sealing.py",
        "if not hmac.compare_digest(sealed[_BOUND_BYTES:_COMMITMENT_END], self._derived.commitment):",
        "if False:",
        "tests/tenancy/test_sealing_faults.py::test_c07_a_ciphertext_for_two_keys_opens_under_one_data_key_only",
        "Law 3: one blob is not two chunks",
    ),
    "the quota grants one more": Bite(
        "tenancy/quota.py",
        "wanted = min(wanted, usage.limit_objects - usage.objects)",
        "wanted = min(wanted, usage.limit_objects + 1 - usage.objects)",
        "tests/tenancy/test_quota_machine.py",
        "law 4|quota guard refused|as long as the limits allow",
    ),
    "a slot is released when its reader is cancelled": Bite(
        "storage/staging.py",
        "            self._lingering[access] = give_back\n            return False\n",
        "            return True\n",
        "tests/storage/test_staging_windows.py::test_memory_that_a_call_still_uses_lingers",
        "law 7: a call still uses it",
    ),
    "a cancelled caller does not wait for its thread": Bite(
        "kvgw/runtime.py",
        "                cancelled, self._waiter = error, self._loop.create_future()\n",
        "                raise error\n",
        "tests/torture/test_laws.py::test_a_worker_threads_memory_is_its_own_until_it_has_finished",
        "law 7: memory was given back",
    ),
    "an open breaker stays open": Bite(
        "kvgw/breaker.py",
        "if self._probing or self._clock.monotonic() < self._retry_at:",
        "if self._open:",
        "tests/kvgw/test_breaker.py::test_half_open_admits_exactly_one_and_its_success_closes",
        "law 9: an outage is bounded",
    ),
    "bytes are taken back when nobody knows whether they were committed": Bite(
        "kvgw/gateway/put.py",
        "            for name in writing.attempted:\n                rooms.staging.drop(name)\n            raise\n",
        "            await self._discard(writing, writing.attempted)\n            raise\n",
        "tests/torture/test_nth_call.py::test_S01_S02_a_fault_at_any_call_breaks_no_law[put-lost answer]",
        r"law 8: default/\w+ was acknowledged and is lost",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", BITES)
def test_a_guard_that_is_taken_out_is_missed(tmp_path: Path, what: str) -> None:
    bite = BITES[what]
    for folder in COPIED:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    before = suite(tmp_path, bite.test)
    assert before.returncode == 0, f"{bite.test} fails without the patch:\n{before.stdout[-3000:]}"
    file = tmp_path / bite.file
    text = file.read_text()
    assert text.count(bite.old) == 1, (
        f"{bite.file} has changed: what is to be taken out is there {text.count(bite.old)} times"
    )
    file.write_text(text.replace(bite.old, bite.new))
    after = suite(tmp_path, bite.test)
    assert after.returncode == 1, f"{what}, and {bite.test} passes:\n{after.stdout[-3000:]}{after.stderr[-1000:]}"
    assert re.search(bite.law, after.stdout), f"the failure does not name the law:\n{after.stdout[-4000:]}"


def suite(root: Path, test: str) -> subprocess.CompletedProcess[str]:
    """One test of the copy at `root`."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", test]
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
