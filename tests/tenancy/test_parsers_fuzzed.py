"""C16: whatever bytes a parser is given, it answers with its value or one of its own errors, in bounded memory.

Cases are mutations of valid inputs by a seeded generator, so that a failing case is found again by its number:
``KVGW_TEST_FUZZ=N`` sets how many there are for each parser, ``KVGW_TEST_SEED`` which.
"""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Callable
from typing import Any

import pytest

from kvgw import wire
from kvgw.errors import KvgwError
from kvgw.kvformat import KVFormat
from kvgw.model import MatchRequest
from tenancy.errors import TenancyError
from tenancy.keys.keystore import encode_versions, parse_versions
from tenancy.keys.secret import SecretBytes
from tenancy.keys.wrapping import KeyContext, WrappingKey, unwrap, wrap
from tenancy.sealing import open_sealed
from tests.support.gateways import format_of
from tests.tenancy.samples import DATA_KEY, NAMESPACE, TENANT, sealed_object

QUICK = 3_000
CASES = int(os.environ.get("KVGW_TEST_FUZZ", "250000"))
SEED = int(os.environ.get("KVGW_TEST_SEED", "1"))
MEMORY_MAX = 300 * 1024 * 1024

KEY = WrappingKey("root", 1, SecretBytes(bytes(range(32))))
CONTEXT = KeyContext(TENANT, NAMESPACE, "data", 1)
RECORD = wrap(KEY, SecretBytes(bytes(32)), CONTEXT, lambda size: bytes(size))
OBJECT = sealed_object(100)
PREFIX = wire.encode_prefix(wire.Frame(wire.Kind.REQUEST, 7, 100, 3, 0, 4096))
REQUEST = MatchRequest([bytes(32)], [b"key-1", b"key-2"], "namespace", public=["tenant/namespace"])


def open_mutated(blob: bytes) -> None:
    target = bytearray(b"\xee" * OBJECT.address.length)
    try:
        open_sealed(DATA_KEY, OBJECT.address, OBJECT.salt, OBJECT.sealed, memoryview(blob), memoryview(target))
    except Exception:
        assert not any(target), "C17"
        raise
    assert bytes(target) == OBJECT.plain, "the original bytes or a refusal"


PARSERS: dict[str, tuple[Callable[[bytes], Any], bytes, tuple[type[Exception], ...]]] = {
    "sealed blob": (open_mutated, OBJECT.blob, (TenancyError,)),
    "wrapped key": (lambda data: unwrap(KEY, data, CONTEXT), RECORD, (TenancyError,)),
    "key file": (lambda data: parse_versions("file", data), encode_versions({1: RECORD, 2: RECORD}), (TenancyError,)),
    "canonical format": (KVFormat.from_canonical, format_of().canonical(), (KvgwError,)),
    # The stream hands over exactly a prefix, and at most the header that it announced.
    "frame prefix": (lambda data: wire.decode_prefix((data + bytes(32))[:32]), PREFIX, (KvgwError,)),
    "request": (wire.decode_request, wire.encode(REQUEST), (KvgwError,)),
}


def mutated(rng: random.Random, valid: bytes) -> bytes:
    """One to four edits: a flipped bit, another byte, bytes cut out, doubled, inserted, or an extreme number."""
    data = bytearray(valid)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at % len(data)] = rng.randrange(256)
            case 2:
                del data[at : at + rng.randint(1, 16)]
            case 3:
                data[at:at] = data[at : at + rng.randint(1, 16)]
            case 4:
                data[at:at] = rng.randbytes(rng.randint(1, 16))
            case _:
                extreme = rng.choice((b"\xff" * 4, b"\x7f" + b"\xff" * 3, bytes(4), b"\xff" * 8))
                data[at : at + len(extreme)] = extreme
    return bytes(data)


def attack(name: str, cases: int) -> None:
    parse, valid, refusals = PARSERS[name]
    rng = random.Random(SEED)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(cases):
        case = mutated(rng, valid)
        try:
            parse(case)
        except refusals:
            continue
        except Exception as error:
            pytest.fail(f"{name}, seed {SEED}, case {number}: {case.hex()}: {type(error).__name__}: {error}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MEMORY_MAX, f"{name}: the process grew by {grown} bytes"


@pytest.mark.parametrize("name", PARSERS)
def test_C16_a_few_thousand_cases(name: str) -> None:
    attack(name, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PARSERS)
def test_C16_a_million_cases_over_all_parsers(name: str) -> None:
    attack(name, CASES)
