"""L07: small changes of the modules that nothing may be wrong in are noticed by their tests."""

from __future__ import annotations

import ast
import os

import pytest

from tests.support.mutants import SUITES, changes, mutants_of, mutated, sample, source_of, survivors

SAMPLE = int(os.environ.get("KVGW_TEST_MUTANTS", "24"))
SEED = int(os.environ.get("KVGW_TEST_SEED", "1"))


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


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_L07_a_sample_of_mutants_is_killed() -> None:
    wanted = sample(SAMPLE, SEED)
    left = survivors(wanted)
    assert len(left) <= 0.15 * len(wanted), f"seed {SEED}: " + "; ".join(map(str, left))
