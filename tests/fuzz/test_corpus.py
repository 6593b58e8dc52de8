"""C16, F06: what the fuzzer has found worth keeping is taken or refused, and so is where it begins."""

from __future__ import annotations

import pytest

from tests.fuzz.targets import TARGETS, kept


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_C16_F06_every_kept_input_is_taken_or_refused(name: str) -> None:
    inputs = [*TARGETS[name].valid, *(path.read_bytes() for path in kept(name))]
    assert len(inputs) > len(TARGETS[name].valid), "a corpus is kept"
    for data in inputs:
        TARGETS[name](data)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_what_the_fuzzer_begins_with_is_valid(name: str) -> None:
    """Else it would look at refusals alone."""
    for data in TARGETS[name].valid:
        TARGETS[name].parse(data)
