"""F06: whatever a client sends as a request, decoding answers with the request or a refusal, in bounded memory.

``KVGW_TEST_FUZZ=N`` sets the cases of each decoder among the slow tests, ``KVGW_TEST_SEED`` which.
"""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvgw import wire
from kvgw.errors import KvgwError
from kvgw.wire import Hello
from tests.kvgw.test_wire import REQUESTS
from tests.tenancy.test_parsers_fuzzed import MEMORY_MAX, SEED, mutated

QUICK = 400
CASES = int(os.environ.get("KVGW_TEST_FUZZ", "50000"))

DECODERS: dict[str, tuple[Callable[[bytes], Any], bytes, tuple[type[Exception], ...]]] = {
    **{type(one).__name__: (wire.decode_request, wire.encode(one), (KvgwError,)) for one in REQUESTS},
    "Hello": (lambda data: wire.decode(data, Hello), wire.encode(Hello((1, 1), "test", "t")), (KvgwError,)),
}


def attack(name: str, cases: int) -> None:
    decode, valid, refusals = DECODERS[name]
    chance = random.Random(f"{SEED}/{name}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(cases):
        case = mutated(chance, valid)
        try:
            found = decode(case)
        except refusals:
            continue
        except Exception as error:
            pytest.fail(f"{name}, seed {SEED}, case {number}: {case.hex()}: {type(error).__name__}: {error}")
        assert isinstance(found, msgspec.Struct)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MEMORY_MAX, f"{name}: the process grew by {grown} bytes"


@pytest.mark.parametrize("name", DECODERS)
def test_F06_a_few_hundred_cases_of_every_request(name: str) -> None:
    attack(name, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", DECODERS)
def test_F06_half_a_million_cases_over_all_requests(name: str) -> None:
    attack(name, CASES)
