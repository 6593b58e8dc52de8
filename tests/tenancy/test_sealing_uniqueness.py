"""C08: over ten million seals no salt, no key and no pair of key and nonce comes twice."""

from __future__ import annotations

import os

import numpy as np
import pytest

from kvgw.chance import WatchedRng
from kvgw.runtime import SystemRng
from tenancy.keys.kdf import committing_key
from tests.tenancy.samples import DATA_KEY, address

SEALS = int(os.environ.get("KVGW_TEST_SEALS", "10000000"))
LABEL = b"kvgw/v1/blob+AEAD_AES_256_GCM\0"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_C08_nothing_that_must_be_fresh_repeats() -> None:
    rng = WatchedRng(SystemRng())
    context = address(4096).encode()
    salts = np.empty(SEALS, dtype="V32")
    keys = np.empty(SEALS, dtype="V32")
    for index in range(SEALS):
        salt = rng.token(32)
        derived = committing_key(DATA_KEY, LABEL, salt, context)
        salts[index], keys[index] = salt, derived.key
    # Keys that differ make every pair of key and nonce differ, whatever the nonces are.
    for what, found in (("salt", salts), ("key", keys)):
        ordered = np.sort(found.view("S32"))
        assert not np.any(ordered[1:] == ordered[:-1]), f"a {what} came twice in {SEALS} seals"
