"""Merkle roots by the words of RFC 6962, and what deletion statements look like."""

from __future__ import annotations

import hashlib
import random

import msgspec
import pytest

from tenancy.deletion import selection
from tenancy.deletion.merkle import merkle_root
from tenancy.schema import deletion_job


def by_the_book(leaves: list[bytes]) -> bytes:
    """RFC 6962, 2.1: split at the largest power of two below the number of leaves."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    split = 1
    while 2 * split < len(leaves):
        split *= 2
    left, right = by_the_book(leaves[:split]), by_the_book(leaves[split:])
    return hashlib.sha256(b"\x01" + left + right).digest()


def test_merkle_roots_are_those_of_rfc_6962() -> None:
    chance = random.Random(6962)
    for count in [*range(70), 127, 128, 129, 1000]:
        leaves = [chance.randbytes(16) for _ in range(count)]
        assert merkle_root(iter(leaves)) == by_the_book(leaves), count


def test_a_known_root() -> None:
    """The first vectors of certificate-transparency's own tests."""
    leaves = [bytes.fromhex(one) for one in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657")]
    assert merkle_root([]).hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert merkle_root(leaves[:1]).hex() == "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"
    assert merkle_root(leaves).hex() == "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c"


@pytest.mark.parametrize(
    "selector",
    [
        selection.Keys(1, "ab", ["cd"]),
        selection.Prefix(1, "ab", "cd"),
        selection.Label("ab"),
        selection.Format("model", "some/model"),
        selection.Age("last_hit", 5),
        selection.Namespace("work"),
        selection.Tenant("acme"),
    ],
)
def test_selectors_are_kept_as_text_and_their_kinds_are_those_of_the_table(selector: selection.Selector) -> None:
    text = selection.encode(selector)
    assert selection.decode(text) == selector
    assert list(msgspec.json.decode(text)) == sorted(msgspec.json.decode(text))
    (kinds,) = (one for one in deletion_job.constraints if "kind IN" in str(getattr(one, "sqltext", "")))
    assert f"'{selection.kind_of(selector)}'" in str(kinds.sqltext)  # type: ignore[attr-defined]
