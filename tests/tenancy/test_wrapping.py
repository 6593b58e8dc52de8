"""C14 and the parser of wrapped keys: a record opens in its own place, under its own key, or not at all."""

from __future__ import annotations

import hmac
import struct
from dataclasses import replace
from uuid import UUID

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from tenancy.errors import KeyDamaged, KeyMismatch, KeyRefused
from tenancy.keys import wrapping
from tenancy.keys.secret import SecretBytes
from tenancy.keys.wrapping import RECORD_BYTES_MAX, KeyContext, WrappedKey, WrappingKey, unwrap, wrap

KEK = WrappingKey("root-1", 3, SecretBytes(bytes(range(32))))
KEY = SecretBytes(b"\x5a" * 32)
SALT = bytes(range(64, 96))
CONTEXT = KeyContext(UUID(bytes=b"\x11" * 16), UUID(bytes=b"\x22" * 16), "data", 7)


def fixed_salt(size: int) -> bytes:
    assert size == len(SALT)
    return SALT


RECORD = wrap(KEK, KEY, CONTEXT, fixed_salt)


def lp(text: str) -> bytes:
    return struct.pack(">I", len(text)) + text.encode()


def test_the_record_is_the_documented_one_byte_for_byte() -> None:
    context = (
        lp("epoch") + lp("7")
        + lp("namespace") + lp("22222222-2222-2222-2222-222222222222")
        + lp("purpose") + lp("data")
        + lp("tenant") + lp("11111111-1111-1111-1111-111111111111")
    )  # fmt: skip
    info = b"kvgw/v1/wrap\0" + SALT + context
    first = hmac.digest(bytes(range(32)), info + b"\x01", "sha512")
    okm = first + hmac.digest(bytes(range(32)), first + info + b"\x02", "sha512")
    sealed = AESGCM(okm[:32]).encrypt(okm[32:44], KEY.reveal(), None)
    documented = b"KVKW\x01\x01\x00\x06root-1\x00\x00\x00\x03" + SALT + okm[44:76] + sealed
    assert documented == RECORD
    assert len(RECORD) == 124 + len("root-1")


def test_a_key_comes_back() -> None:
    assert unwrap(KEK, RECORD, CONTEXT) == KEY
    assert WrappedKey.parse(RECORD).encode() == RECORD


def test_every_wrap_has_a_fresh_salt() -> None:
    salts = iter((SALT, SALT[::-1]))
    first, second = (wrap(KEK, KEY, CONTEXT, lambda size: next(salts)) for _ in range(2))
    assert not {first[i : i + 16] for i in range(14, len(first))} & {second[i : i + 16] for i in range(14, len(second))}


OTHER = UUID(bytes=b"\x33" * 16)


@pytest.mark.parametrize(
    "context",
    [
        replace(CONTEXT, tenant=OTHER),
        replace(CONTEXT, namespace=OTHER),
        replace(CONTEXT, purpose="id"),
        replace(CONTEXT, epoch=8),
        replace(CONTEXT, epoch=70),
        KeyContext(CONTEXT.namespace, CONTEXT.tenant, "data", 7),
    ],
    ids=str,
)
def test_c14_a_moved_record_does_not_open(context: KeyContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(wrapping, "AESGCM")  # refused by its commitment, before any decryption
    with pytest.raises(KeyMismatch, match="made for another place or altered"):
        unwrap(KEK, RECORD, context)


def test_another_wrapping_key_is_named() -> None:
    for kek in (WrappingKey("root-2", 3, KEK.secret), WrappingKey("root-1", 4, KEK.secret)):
        with pytest.raises(KeyMismatch, match="was wrapped by key 'root-1' version 3, not by key 'root-"):
            unwrap(kek, RECORD, CONTEXT)


def test_a_wrapping_key_with_the_right_name_and_other_bytes_is_refused() -> None:
    with pytest.raises(KeyMismatch, match="key 'root-1' version 3 does not open it"):
        unwrap(WrappingKey("root-1", 3, SecretBytes(bytes(32))), RECORD, CONTEXT)


def test_c03_every_single_bit_flip_of_a_record_is_refused() -> None:
    for position in range(len(RECORD)):
        for bit in range(8):
            flipped = bytearray(RECORD)
            flipped[position] ^= 1 << bit
            with pytest.raises(KeyRefused):
                unwrap(KEK, bytes(flipped), CONTEXT)


def test_an_altered_ciphertext_is_called_damaged() -> None:
    with pytest.raises(KeyDamaged, match=r"record of the data key 7 .* was altered; restore it"):
        unwrap(KEK, RECORD[:-1] + b"\0", CONTEXT)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (b"", "breaks off after 0 bytes"),
        (b"KVKW\x01\x01\x00", "breaks off after 7 bytes"),
        (b"KVGW" + RECORD[4:], "wrong magic"),
        (RECORD[:4] + b"\x02" + RECORD[5:], "version 2, algorithm 1 is unknown"),
        (RECORD[:5] + b"\x00" + RECORD[6:], "version 1, algorithm 0 is unknown"),
        (RECORD[:5] + b"\xff" + RECORD[6:], "version 1, algorithm 255 is unknown"),
        (RECORD[:-1], "cannot be whole"),
        (RECORD + b"\0", "cannot be whole"),
        (RECORD[:6] + b"\xff\xff" + RECORD[8:], "with a ref of 65535 cannot be whole"),
        (RECORD[:6] + b"\x00\x00" + RECORD[14:], "with a ref of 0 cannot be whole"),
        (RECORD[:6] + b"\x00\x81" + b"r" * 129 + RECORD[14:], "with a ref of 129 cannot be whole"),
        (RECORD.replace(b"root-1", b"root\n1"), "impossible bytes"),
        (RECORD.replace(b"root-1", b"root-\xff"), "impossible bytes"),
        (RECORD.replace(b"root-1\x00\x00\x00\x03", b"root-1\x00\x00\x00\x00"), "impossible bytes"),
    ],
)
def test_c15_a_malformed_record_is_refused(record: bytes, sentence: str) -> None:
    with pytest.raises(KeyDamaged, match=sentence):
        WrappedKey.parse(record)


edits = st.tuples(st.integers(0, len(RECORD)), st.integers(0, len(RECORD)), st.binary(max_size=8))


@settings(max_examples=2000)
@given(st.one_of(st.binary(max_size=2 * RECORD_BYTES_MAX), edits))
def test_c16_the_parser_takes_exactly_what_the_writer_writes(case: bytes | tuple[int, int, bytes]) -> None:
    record = case if isinstance(case, bytes) else RECORD[: case[0]] + case[2] + RECORD[case[1] :]
    try:
        parsed = WrappedKey.parse(record)
    except KeyDamaged:
        return
    assert parsed.encode() == record
    if record != RECORD:
        with pytest.raises(KeyRefused):
            unwrap(KEK, record, CONTEXT)


def test_c19_no_key_in_a_repr_or_an_error() -> None:
    texts = [repr(KEK), repr(WrappedKey.parse(RECORD))]
    for record in (RECORD[:-1] + b"\0", RECORD[:-1], RECORD[:20] + b"\0" + RECORD[21:]):
        with pytest.raises(KeyRefused) as refused:
            unwrap(KEK, record, CONTEXT)
        texts.append(repr(refused.value))
    for text in texts:
        assert SALT.hex()[:16] not in text
        assert repr(SALT)[2:20] not in text
        assert KEK.secret.reveal().hex()[:16] not in text


@pytest.mark.parametrize(
    ("ref", "version"), [("", 1), ("x" * 129, 1), ("schlüssel", 1), ("a\nb", 1), ("a", 0), ("a", 2**32)]
)
def test_an_impossible_wrapping_key_is_refused(ref: str, version: int) -> None:
    with pytest.raises(ValueError, match=r"a key's (ref|version) must be"):
        WrappingKey(ref, version, KEY)


def test_only_keys_of_32_bytes_are_wrapped() -> None:
    with pytest.raises(ValueError, match="has 32 bytes, not 31"):
        wrap(KEK, SecretBytes(bytes(31)), CONTEXT, fixed_salt)
