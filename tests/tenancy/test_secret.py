"""C19: a secret stays out of texts, pickles, copies and hash tables, and can be forgotten."""

from __future__ import annotations

import copy
import pickle

import pytest

from tenancy.errors import KeyUnavailable
from tenancy.keys.kdf import committing_key
from tenancy.keys.secret import KEY_BYTES, SecretBytes
from tenancy.naming import NameKeys


def test_a_secret_is_revealed_only_when_asked() -> None:
    secret = SecretBytes(b"correct horse battery staple")
    assert secret.reveal() == b"correct horse battery staple"
    assert len(secret) == 28
    for text in (repr(secret), str(secret), f"{secret}", f"{secret!s:>3}"):
        assert text == "SecretBytes(28 bytes)"


def test_a_secret_is_not_pickled_copied_or_hashed() -> None:
    secret = SecretBytes(b"12345678")
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="never pickled or copied"):
            attempt(secret)
    with pytest.raises(TypeError, match="unhashable"):
        hash(secret)


def test_secrets_are_equal_by_their_bytes() -> None:
    assert SecretBytes(b"12345678") == SecretBytes(bytearray(b"12345678"))
    assert SecretBytes(b"12345678") != SecretBytes(b"12345679")
    assert SecretBytes(b"12345678") != b"12345678"


def test_a_wiped_secret_is_zeroed_and_says_so() -> None:
    secret = SecretBytes(b"12345678")
    held = secret._value
    assert held is not None
    secret.wipe()
    secret.wipe()
    assert held == bytes(8)
    assert repr(secret) == "SecretBytes(wiped)"
    assert len(secret) == 0
    with pytest.raises(KeyUnavailable, match="wiped from memory; ask for the key again"):
        secret.reveal()


def test_whoever_still_works_with_a_wiped_key_is_told_to_ask_again() -> None:
    """A PUT or GET under way when its namespace was shredded, or its keys made room for others, ends in an outage."""
    secret = SecretBytes(bytes(KEY_BYTES))
    secret.wipe()
    with pytest.raises(KeyUnavailable, match="ask for the key again"):
        committing_key(secret, b"label\0", bytes(32), b"")
    with pytest.raises(KeyUnavailable, match="ask for the key again"):
        NameKeys.derive(secret)


def test_a_secret_does_not_follow_its_source() -> None:
    source = bytearray(b"12345678")
    secret = SecretBytes(source)
    source[:] = bytes(8)
    assert secret.reveal() == b"12345678"
