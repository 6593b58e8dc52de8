"""L07: small changes of the modules that nothing may be wrong in are noticed by their tests."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import pytest

from tests.support.mutants import ROOT, SUITES, changes, mutants_of, mutated, source_of
from tests.support.mutants_known import KNOWN, Known

SAMPLE = os.environ.get("KVGW_TEST_MUTANTS", "24")
SEED = os.environ.get("KVGW_TEST_SEED", "1")


def test_every_change_is_one_change_that_compiles() -> None:
    text = "def f(a, b):\n    if a < 3 and not b:\n        a += 1\n        g(a)\n    return a - b * 2 == 7\n"
    found = list(changes(ast.parse(text)))
    made = {ast.unparse(mutated(text, number)) for number in range(len(found))}
    assert len(made) == len(found) == 13
    assert ast.unparse(ast.parse(text)) not in made
    for one in made:
        compile(one, "mutant", "exec")


@pytest.mark.parametrize("module", SUITES)
def test_a_module_under_mutation_and_its_tests_are_there(module: str) -> None:
    assert mutants_of(module)
    root = source_of("tests").parent
    assert all((root / path).is_file() for path in SUITES[module])


@pytest.mark.parametrize("one", KNOWN, ids=lambda one: f"{one.module}-{one.change}")
def test_a_survivor_that_is_known_is_still_there_and_has_a_reason(one: Known) -> None:
    lines = source_of(one.module).read_text(encoding="utf-8").splitlines()
    there = {(lines[mutant.line - 1].strip(), mutant.change) for mutant in mutants_of(one.module)}
    assert (one.line, one.change) in there, "the module has changed: look at it again"
    assert len(one.why) > 20


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_L07_a_sample_of_mutants_is_killed() -> None:
    command = [sys.executable, "-m", "tests.support.mutants", "--sample", SAMPLE, "--seed", SEED]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    told = run.stdout.splitlines()
    print(run.stdout)
    assert told, run.stderr
    assert re.fullmatch(rf"\d+ of {SAMPLE} killed \(.*", told[-1]), run.stderr
    assert run.returncode == 0, "; ".join(line for line in told if line.startswith("SURVIVED"))
