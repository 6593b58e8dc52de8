"""Records of keys that a service wrapped, and the least and the longest of every record's parts."""

from __future__ import annotations

import pytest

from tenancy.errors import KeyDamaged
from tenancy.keys.secret import SecretBytes
from tenancy.keys.wrapping import WrappedKey, WrappingKey, remote_parts, remote_record, unwrap, wrap, wrapped_by
from tests.tenancy.test_wrapping import CONTEXT, KEY, RECORD, fixed_salt

HEAD = 8
"""Bytes before the ref."""
LONGEST = 2048
"""Of a record, in bytes."""


def test_the_record_of_a_service_is_the_documented_one_byte_for_byte() -> None:
    record = remote_record("key/1", b"ciphertext")
    assert record == b"KVKW\x01\x02\x00\x05key/1ciphertext"
    assert remote_parts(record) == ("key/1", b"ciphertext")
    assert wrapped_by(record) == "key/1"
    assert wrapped_by(RECORD) == "root-1"


@pytest.mark.parametrize(
    ("ref", "ciphertext"),
    [("r", b"c"), ("r" * 128, b"c"), ("r", b"c" * (LONGEST - HEAD - 1)), ("r" * 128, b"c" * (LONGEST - HEAD - 128))],
)
def test_what_just_fits_is_written_and_read(ref: str, ciphertext: bytes) -> None:
    assert remote_parts(remote_record(ref, ciphertext)) == (ref, ciphertext)


@pytest.mark.parametrize(
    ("ref", "ciphertext"),
    [("", b"c"), ("r" * 129, b"c"), ("r", b""), ("r", b"c" * (LONGEST - HEAD)), ("r" * 128, b"c" * (LONGEST - HEAD))],
)
def test_what_does_not_fit_is_not_written(ref: str, ciphertext: bytes) -> None:
    with pytest.raises(ValueError, match="make no record"):
        remote_record(ref, ciphertext)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (RECORD, "version 1, algorithm 1 is unknown here, where version 1, algorithm 2 is read"),
        (b"KVKW\x01\x02\x00\x01r", "has no ciphertext"),
        (b"KVKW\x01\x02\x00\x01", "with a ref of 1 cannot be whole"),
        (b"KVKW\x01\x03\x00\x01rc", "version 1, algorithm 3 is unknown"),
        (b"KVKW\x01\x02\x00\x01r" + b"c" * (LONGEST - HEAD), f"record of {LONGEST + 1} bytes .* cannot be whole"),
    ],
)
def test_c15_a_malformed_record_of_a_service_is_refused(record: bytes, sentence: str) -> None:
    with pytest.raises(KeyDamaged, match=sentence):
        remote_parts(record)


def test_a_service_s_record_is_not_opened_here() -> None:
    with pytest.raises(KeyDamaged, match="algorithm 2 is unknown here, where version 1, algorithm 1 is read"):
        WrappedKey.parse(remote_record("key/1", b"ciphertext"))


@pytest.mark.parametrize(("ref", "version"), [("r", 1), ("r" * 128, 2**32 - 1)])
def test_the_least_and_the_most_of_a_wrapping_key(ref: str, version: int) -> None:
    kek = WrappingKey(ref, version, SecretBytes(b"\x01" * 32))
    assert unwrap(kek, wrap(kek, KEY, CONTEXT, fixed_salt), CONTEXT) == KEY
