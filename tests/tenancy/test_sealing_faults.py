"""C03–C07, C15, C17: whatever happens to a blob or its row, an open gives the original bytes or refuses.

C17 is in every case here: `SealedObject.open` asserts that a refused open left its target all zero.
"""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from tenancy import sealing
from tenancy.errors import SealBroken
from tenancy.keys.kdf import committing_key
from tenancy.keys.secret import SecretBytes
from tenancy.sealing import Opener, Sealed, open_sealed
from tests.support.salamander import GcmKey, two_key_ciphertext
from tests.tenancy import samples
from tests.tenancy.samples import SealedObject, sealed_object

OTHER = UUID(bytes=b"\x33" * 16)
OTHER_NAME = bytes(32)


class GcmSpy:
    """AES-GCM that counts its decryptions."""

    calls = 0

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self.encrypt_into = self._cipher.encrypt_into

    def decrypt_into(self, nonce: bytes, data: memoryview, associated: bytes, target: memoryview) -> int:
        GcmSpy.calls += 1
        return self._cipher.decrypt_into(nonce, data, associated, target)


@pytest.fixture
def gcm(monkeypatch: pytest.MonkeyPatch) -> type[GcmSpy]:
    GcmSpy.calls = 0
    monkeypatch.setattr(sealing, "AESGCM", GcmSpy)
    return GcmSpy


def test_c03_every_single_bit_flip_is_refused_by_the_right_check() -> None:
    made = sealed_object(100)
    assert len(made.blob) == 372
    for position in range(len(made.blob)):
        expected = "tag" if position >= 256 else "commitment" if 128 <= position < 160 else "header"
        for bit in range(8):
            flipped = bytearray(made.blob)
            flipped[position] ^= 1 << bit
            with pytest.raises(SealBroken) as refused:
                made.open(bytes(flipped))
            assert refused.value.reason == expected, f"bit {bit} of byte {position}"


SIZE = 2 * 65_536 + 1000
FIRST = sealed_object(SIZE, plain=random.Random(1).randbytes(SIZE))  # noise: no two segments are alike
SECOND = sealed_object(SIZE, plain=random.Random(2).randbytes(SIZE), salt=bytes(range(32)))
SPANS = [slice(0, 256), *(FIRST.address.sealed_span(index) for index in range(3))]

Edges = st.one_of(st.sampled_from([0, 128, *(span.stop for span in SPANS)]), st.integers(0, len(FIRST.blob)))


def original_or_miss(blob: bytes) -> None:
    try:
        opened = FIRST.open(blob)
    except SealBroken as refused:
        assert blob != FIRST.blob
        assert refused.reason != "length" or len(blob) != len(FIRST.blob)
    else:
        assert blob == FIRST.blob
        assert opened == FIRST.plain


@settings(max_examples=2900, deadline=None)
@given(Edges, Edges, st.integers(1, 70_000))
def test_c04_seven_rearrangements_each_are_the_original_or_a_miss(start: int, stop: int, length: int) -> None:
    blob = FIRST.blob
    for donor in (FIRST, SECOND):  # a stretch copied over another place
        piece = donor.blob[start : start + length][: len(blob) - stop]
        original_or_miss(blob[:stop] + piece + blob[stop + len(piece) :])
    start, stop = sorted((start, stop))
    original_or_miss(blob[:start])
    original_or_miss(blob[start:])
    original_or_miss(blob + blob[start:stop])
    original_or_miss(blob[:start] + blob[stop:])
    original_or_miss(blob[:stop] + blob[start:])


def test_c04_every_order_and_mix_of_whole_segments_is_the_original_or_a_miss() -> None:
    places = [SPANS[:1], SPANS[1:3], SPANS[1:3], SPANS[3:]]  # the last segment is shorter than the others
    choices = [[donor.blob[span] for donor in (FIRST, SECOND) for span in spans] for spans in places]
    for parts in itertools.product(*choices):
        original_or_miss(b"".join(parts))


def test_tag_root_tells_twins_that_share_a_salt() -> None:
    twin = sealed_object(FIRST.address.length, plain=b"\xff" * 65_536 + FIRST.plain[65_536:])
    span = FIRST.address.sealed_span(0)
    with pytest.raises(SealBroken) as refused:
        FIRST.open(FIRST.blob[: span.start] + twin.blob[span] + FIRST.blob[span.stop :])
    assert refused.value.reason == "root"


ROWS: dict[str, Callable[[SealedObject], SealedObject]] = {
    "tenant": lambda made: replace(made, address=replace(made.address, tenant=OTHER)),
    "namespace": lambda made: replace(made, address=replace(made.address, namespace=OTHER)),
    "epoch": lambda made: replace(made, address=replace(made.address, epoch=8)),
    "shorter": lambda made: replace(made, address=replace(made.address, length=199_999)),
    "longer": lambda made: replace(made, address=replace(made.address, length=200_001)),
    "created": lambda made: replace(made, address=replace(made.address, created_ms=1_700_000_000_001)),
    "fingerprint": lambda made: replace(made, address=replace(made.address, fingerprint=OTHER_NAME)),
    "seg_log2": lambda made: replace(made, address=replace(made.address, seg_log2=17)),
    "chunk_id": lambda made: replace(made, sealed=replace(made.sealed, chunk_id=OTHER_NAME)),
    "salt": lambda made: replace(made, salt=OTHER_NAME),
}


@pytest.mark.parametrize("field", ROWS)
def test_c05_an_altered_row_is_refused_before_any_decryption(field: str, gcm: type[GcmSpy]) -> None:
    altered = ROWS[field](sealed_object(200_000))
    with pytest.raises(SealBroken) as refused:
        altered.open()
    expected = {"shorter": "length", "longer": "length", "seg_log2": "length", "salt": "commitment"}
    assert refused.value.reason == expected.get(field, "header")
    assert gcm.calls == 0


# field: offset, bytes that are written there
HEADERS: dict[str, tuple[int, bytes]] = {
    "magic": (0, b"KVGX"),
    "version": (4, b"\x02"),
    "suite zero": (5, b"\x00"),
    "suite 255": (5, b"\xff"),
    "header length": (6, b"\x02\x00"),
    "seg_log2 zero": (8, b"\x00"),
    "seg_log2 63": (8, b"\x3f"),
    "seg_log2 other": (8, b"\x11"),
    "flags": (9, b"\x01"),
    "zero bytes": (11, b"\x80"),
    "tenant": (12, OTHER.bytes),
    "namespace": (28, OTHER.bytes),
    "epoch": (44, b"\x00\x00\x00\x08"),
    "length": (48, b"\xff" * 8),
    "created": (56, bytes(8)),
    "fingerprint": (64, OTHER_NAME),
    "chunk id": (96, OTHER_NAME),
    "commitment": (128, OTHER_NAME),
    "reserved first": (160, b"\x01"),
    "reserved last": (255, b"\x01"),
}


@pytest.mark.parametrize("field", HEADERS)
def test_c05_c15_an_altered_header_is_refused_before_any_decryption(field: str, gcm: type[GcmSpy]) -> None:
    made = sealed_object(200_000)
    offset, value = HEADERS[field]
    blob = made.blob[:offset] + value + made.blob[offset + len(value) :]
    target = memoryview(bytearray(b"\xaa" * 200_000))
    tracemalloc.start()
    try:
        with pytest.raises(SealBroken) as refused:
            open_sealed(samples.DATA_KEY, made.address, made.salt, made.sealed, memoryview(blob), target)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused.value.reason == ("commitment" if field == "commitment" else "header")
    assert gcm.calls == 0
    assert peak < 64 * 1024
    assert target == bytes(200_000)


def test_c05_an_altered_tag_root_is_refused() -> None:
    made = sealed_object(200_000)
    with pytest.raises(SealBroken) as refused:
        replace(made, sealed=replace(made.sealed, tag_root=OTHER_NAME)).open()
    assert refused.value.reason == "root"


def test_the_last_segment_binds_the_chunk_id() -> None:
    """A blob whose header names another chunk id, as does its row, does not open: the id is no mere claim."""
    made = sealed_object(200_000)
    blob = made.blob[:96] + OTHER_NAME + made.blob[128:]
    with pytest.raises(SealBroken) as refused:
        replace(made, sealed=replace(made.sealed, chunk_id=OTHER_NAME)).open(blob)
    assert refused.value.reason == "tag"
    assert "segment 3 of 4" in str(refused.value)


def test_c06_another_data_key_fails_at_the_commitment(gcm: type[GcmSpy]) -> None:
    made = sealed_object(200_000)
    target = memoryview(bytearray(b"\xaa" * 200_000))
    other = SecretBytes(bytes(32))
    with pytest.raises(SealBroken) as refused:
        open_sealed(other, made.address, made.salt, made.sealed, memoryview(made.blob), target)
    assert refused.value.reason == "commitment"
    assert gcm.calls == 0
    assert target == bytes(200_000)


def test_c07_a_ciphertext_for_two_keys_opens_under_one_data_key_only(gcm: type[GcmSpy]) -> None:
    """Law 3: one blob is not two chunks, whatever keys its maker has."""
    place = samples.address(64)
    data_keys = [samples.DATA_KEY, SecretBytes(b"\x99" * 32)]
    label = b"kvgw/v1/blob+AEAD_AES_256_GCM\0"
    derived = [committing_key(key, label, samples.SALT, place.encode()) for key in data_keys]
    chunk_id = b"\x77" * 32
    bound = b"\0\0\0\0\x01" + chunk_id
    first, second = (GcmKey(one.key, one.nonce) for one in derived)
    ciphertext = two_key_ciphertext(first, second, bound, blocks=4)
    meanings = [AESGCM(one.key).decrypt(one.nonce, ciphertext, bound) for one in derived]
    assert meanings[0] != meanings[1], "plain AES-GCM opens it under both keys, to different bytes"

    for chosen, commitment in enumerate(one.commitment for one in derived):
        blob = memoryview(place.encode() + chunk_id + commitment + bytes(96) + ciphertext)
        row = Sealed(chunk_id, sealing._tag_root(place, blob))
        target = memoryview(bytearray(64))
        open_sealed(data_keys[chosen], place, samples.SALT, row, blob, target)
        assert target == meanings[chosen]
        gcm.calls = 0
        with pytest.raises(SealBroken) as refused:
            open_sealed(data_keys[1 - chosen], place, samples.SALT, row, blob, target)
        assert refused.value.reason == "commitment"
        assert gcm.calls == 0
        assert target == bytes(64)


@pytest.mark.parametrize("length", [0, 1, 255, 256, 200_319, 200_321, 400_640])
def test_c15_another_length_is_refused_first(length: int, gcm: type[GcmSpy]) -> None:
    made = sealed_object(200_000)
    with pytest.raises(SealBroken) as refused:
        made.open((made.blob * 2)[:length])
    assert refused.value.reason == "length"
    assert gcm.calls == 0


def test_c17_a_late_failure_zeroes_segments_that_were_verified() -> None:
    made = sealed_object(200_000)
    blob = bytearray(made.blob)
    blob[-1] ^= 1
    target = memoryview(bytearray(200_000))
    opener = Opener(samples.DATA_KEY, made.address, made.salt, made.sealed, memoryview(blob), target)
    opener.open_segment(0)
    assert target[:65_536] == made.plain[:65_536]
    with pytest.raises(SealBroken, match="segment 3 of 4"):
        opener.open_segment(3)
    assert target == bytes(200_000)
    with pytest.raises(SealBroken, match="refused before"):
        opener.open_segment(0)
    with pytest.raises(SealBroken, match="refused before"):
        opener.finish()
    assert target == bytes(200_000)
