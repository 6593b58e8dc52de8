"""Mistakes of a caller of `tenancy.sealing` are named; what it does costs no memory of the chunk's size."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest

from tenancy.keys.secret import SecretBytes
from tenancy.sealing import (
    LENGTH_MAX,
    SEG_LOG2_MAX,
    SEG_LOG2_MIN,
    BlobAddress,
    Opener,
    Sealed,
    Sealer,
    namespace_of,
    open_sealed,
    seal,
    sealed_length,
)
from tests.tenancy import samples
from tests.tenancy.samples import sealed_object


def test_an_incomplete_chunk_is_neither_sealed_nor_opened() -> None:
    made = sealed_object(200_000)
    blob = memoryview(bytearray(len(made.blob)))
    sealer = Sealer(samples.DATA_KEY, samples.NAMES.chunk_id, made.address, samples.SALT, blob)
    with pytest.raises(ValueError, match="0 of 4 segments were sealed"):
        sealer.finish()
    with pytest.raises(ValueError, match="segment 0 must have 65536 bytes, not 65535"):
        sealer.update(memoryview(made.plain)[:65_535])
    target = memoryview(bytearray(200_000))
    opener = Opener(samples.DATA_KEY, made.address, made.salt, made.sealed, memoryview(made.blob), target)
    for index in (0, 1, 2, 2):
        opener.open_segment(index)
    with pytest.raises(ValueError, match="3 of 4 segments were opened"):
        opener.finish()
    for index in (-1, 4):
        with pytest.raises(ValueError, match="segment must be from 0 to 3"):
            opener.open_segment(index)


def test_a_sealer_takes_no_segment_after_the_last() -> None:
    made = sealed_object(10)
    sealer = Sealer(samples.DATA_KEY, samples.NAMES.chunk_id, made.address, samples.SALT, memoryview(bytearray(282)))
    sealer.update(memoryview(made.plain))
    with pytest.raises(ValueError, match="all 1 segments"):
        sealer.update(memoryview(made.plain))


def test_wrong_buffers_and_arguments_are_named() -> None:
    made = sealed_object(100)
    key, names, plain = samples.DATA_KEY, samples.NAMES.chunk_id, memoryview(made.plain)
    blob = memoryview(bytearray(372))
    with pytest.raises(ValueError, match="target must have 372 bytes, not 371"):
        seal(key, names, made.address, samples.SALT, plain, blob[1:])
    with pytest.raises(ValueError, match="plaintext must have 100 bytes, not 99"):
        seal(key, names, made.address, samples.SALT, plain[1:], blob)
    with pytest.raises(ValueError, match="plaintext must be contiguous bytes"):
        seal(key, names, made.address, samples.SALT, memoryview(bytes(200))[::2], blob)
    with pytest.raises(ValueError, match="sealed must be contiguous bytes"):
        open_sealed(key, made.address, samples.SALT, made.sealed, blob.cast("I"), memoryview(bytearray(100)))
    with pytest.raises(ValueError, match="a salt has 32 bytes, not 31"):
        seal(key, names, made.address, samples.SALT[1:], plain, blob)
    with pytest.raises(ValueError, match="a key has 32 bytes, not 31"):
        seal(SecretBytes(bytes(31)), names, made.address, samples.SALT, plain, blob)
    with pytest.raises(ValueError, match="chunk id or tag root must be from 32 to 32, not 31"):
        short = Sealed(made.sealed.chunk_id[1:], made.sealed.tag_root)
        open_sealed(key, made.address, samples.SALT, short, memoryview(made.blob), memoryview(bytearray(100)))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("epoch", lambda good: replace(good, epoch=-1)),
        ("epoch", lambda good: replace(good, epoch=2**32)),
        ("length", lambda good: replace(good, length=0)),
        ("length", lambda good: replace(good, length=256 * 1024 * 1024 + 1)),
        ("created_ms", lambda good: replace(good, created_ms=2**64)),
        ("seg_log2", lambda good: replace(good, seg_log2=15)),
        ("seg_log2", lambda good: replace(good, seg_log2=23)),
        ("fingerprint", lambda good: replace(good, fingerprint=bytes(31))),
    ],
)
def test_an_address_outside_its_range_is_refused(field: str, change: Callable[[BlobAddress], BlobAddress]) -> None:
    with pytest.raises(ValueError, match=field):
        change(samples.address(10))


def test_sealing_and_opening_allocate_nothing_of_the_chunks_size() -> None:
    length = 4 * 1024 * 1024
    place = samples.address(length, 20)
    plain, target = memoryview(bytes(length)), memoryview(bytearray(length))
    blob = memoryview(bytearray(sealed_length(length)))
    tracemalloc.start()
    try:
        sealed = seal(samples.DATA_KEY, samples.NAMES.chunk_id, place, samples.SALT, plain, blob)
        open_sealed(samples.DATA_KEY, place, samples.SALT, sealed, blob, target)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024


def test_a_blobs_head_names_its_namespace_and_nothing_else_does() -> None:
    blob = sealed_object(100).blob
    assert namespace_of(blob) == namespace_of(blob[:96]) == samples.NAMESPACE
    for strange in (b"", blob[:95], b"X" + blob[1:], bytes(372)):
        assert namespace_of(strange) is None


@pytest.mark.parametrize(
    ("length", "seg_log2", "named"),
    [(0, 16, "length"), (-1, 16, "length"), (LENGTH_MAX + 1, 16, "length"), (1, SEG_LOG2_MIN - 1, "seg_log2"),
     (1, SEG_LOG2_MAX + 1, "seg_log2")],
)  # fmt: skip
def test_no_blob_has_a_length_that_no_chunk_has(length: int, seg_log2: int, named: str) -> None:
    with pytest.raises(ValueError, match=rf"{named} must be"):
        sealed_length(length, seg_log2)
    assert sealed_length(LENGTH_MAX, SEG_LOG2_MAX) > LENGTH_MAX
    assert sealed_length(1, SEG_LOG2_MIN) == 1 + 256 + 16


@pytest.mark.parametrize("length", [0, 99, 101])
def test_nothing_is_opened_into_a_buffer_of_another_length(length: int) -> None:
    made = sealed_object(100)
    target = memoryview(bytearray(length))
    with pytest.raises(ValueError, match=f"target must have 100 bytes, not {length}"):
        Opener(samples.DATA_KEY, made.address, made.salt, made.sealed, memoryview(made.blob), target)


def test_the_least_and_the_largest_of_an_address_are_taken() -> None:
    good = samples.address(100)
    least = replace(good, epoch=0, length=1, created_ms=0, seg_log2=SEG_LOG2_MIN)
    largest = replace(good, epoch=2**32 - 1, length=LENGTH_MAX, created_ms=2**64 - 1, seg_log2=SEG_LOG2_MAX)
    assert len(least.encode()) == len(largest.encode()) == 96
    assert least.encode() != largest.encode()
