"""C01: every sealing vector of the format page. C22: the writer is byte-stable and reads what it once wrote."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tenancy.keys.kdf import committing_key
from tenancy.sealing import Opener, Sealed, Sealer, sealed_length
from tests.tenancy import samples

GOLDEN = Path(__file__).parent / "golden" / "blob-v1.bin"
GOLDEN_ROW = Sealed(
    chunk_id=bytes.fromhex("a57c050594f3d2ff96b9b871fc519b74c1a574e3baedd91f0f0ebcdd5883573d"),
    tag_root=bytes.fromhex("7a91dad3471b592d2d9ccf189210b0a317997f47fc76b1e687c2adef1d05e281"),
)

# length: chunk id, key, base, commitment, tag 0, tag root, blob bytes, SHA-256 of the blob
VECTORS = {
    200_000: (
        "5c59e4a50ff3fc0b841b7467b604fc21144aa35ec455f01992b048cd33d5373c",
        "a6cae7a06e8caab00353b070ebc9d15ce14c6340a27cc3a3743bdc83f9d170b3",
        "476c91011f529939aa295133",
        "699c91eecbf5039d16f263bf93e7ed4a829bffc176bddf71c0c2217161a4ee03",
        "2e8efc4e5ae53946d51eff7819703069",
        "52e55c6a2ec2ae1578d39eb22ae7ca755cf877bd3a3f78ce67ed03bdae0db3a6",
        200_320,
        "35a8d46281953b5eb66ad256c3f057789fe90412355d417d19168b3fc6fa9267",
    ),
    131_072: (
        "261c2078de611e516f42884ed41c777cba956517f35830c866f931c7360a885a",
        "59be847a4d196ea7b72ac788e15604fd617a11b19d1e7a193750cf0c0769d1d3",
        "79f58f9d6e56c0e1682d04af",
        "0ba8bea7c3ce6f0bafece2aeec8c8f0a2514c73ba473b398e930146660c770e4",
        "3d5f9845e9a76c0b140529a598c58b31",
        "6fa753cbe59459b5c5dc1a82afe20879eb2886ea55fca3e36bb3241605de9261",
        131_360,
        "c38178e47375b77f1555c38ce5d68c85929f46df3a4e4c257f15c8db8ddc3219",
    ),
    1: (
        "02dca063372dcc5e20e0c024cc08c35345b88acfa4b88588980a30daa786e99c",
        "86ffd32e232df873f53517c23db0301e0eb6445bc8ead273df50176103c5e315",
        "fe96062dddc93ef9a3b95046",
        "9d77746e7a4a3078e054b2d95ebfbf81b7a8c43e1d70ec3fbe743ea1beeb871a",
        "32e4e155f73c32fbf74dc679f175444f",
        "cc94909992990e6e58622c3bd8a1530cb72517c2e1904ad9a13f04c4a405eef8",
        273,
        "b84121530fe396da545ef31d70a343b31c720050495b7abc1b14160248c7a273",
    ),
}


@pytest.mark.parametrize("length", VECTORS)
def test_c01_vectors_of_the_format_page(length: int) -> None:
    chunk_id, key, base, commitment, tag, root, size, digest = VECTORS[length]
    made = samples.sealed_object(length)
    label = b"kvgw/v1/blob+AEAD_AES_256_GCM\0"
    derived = committing_key(samples.DATA_KEY, label, samples.SALT, made.address.encode())
    first_tag_end = made.address.sealed_span(0).stop

    assert (derived.key.hex(), derived.nonce.hex(), derived.commitment.hex()) == (key, base, commitment)
    assert (made.sealed.chunk_id.hex(), made.sealed.tag_root.hex()) == (chunk_id, root)
    assert made.blob[96:128].hex() == chunk_id
    assert made.blob[128:160].hex() == commitment
    assert made.blob[first_tag_end - 16 : first_tag_end].hex() == tag
    assert len(made.blob) == size == sealed_length(length, 16)
    assert hashlib.sha256(made.blob).hexdigest() == digest
    assert made.open() == made.plain


def test_c22_golden_blob_is_read_and_written_byte_for_byte() -> None:
    made = samples.sealed_object(1000)
    golden = GOLDEN.read_bytes()
    assert made.blob == golden
    assert made.sealed == GOLDEN_ROW
    assert made.open(golden) == samples.plaintext(1000)


@pytest.mark.parametrize("seg_log2", [16, 20, 22])
@pytest.mark.parametrize("around", [-1, 0, 1])
def test_lengths_around_a_segment_come_back(seg_log2: int, around: int) -> None:
    length = (1 << seg_log2) + around
    place = samples.address(length, seg_log2)
    blob = memoryview(bytearray(sealed_length(length, seg_log2)))
    plain = memoryview(samples.plaintext(length))
    target = memoryview(bytearray(length))
    sealer = Sealer(samples.DATA_KEY, samples.NAMES.chunk_id, place, samples.SALT, blob)
    for index in range(place.segments):
        sealer.update(plain[place.plain_span(index)])
    opener = Opener(samples.DATA_KEY, place, samples.SALT, sealer.finish(), blob, target)
    for index in reversed(range(place.segments)):  # any order will do
        opener.open_segment(index)
    opener.finish()
    assert place.segments == (2 if around == 1 else 1)
    assert target == plain


def test_a_segment_may_be_sealed_where_it_lies() -> None:
    made = samples.sealed_object(70_000)
    place = made.address
    blob = memoryview(bytearray(len(made.blob)))
    for index in range(place.segments):
        plain, sealed = place.plain_span(index), place.sealed_span(index)
        blob[sealed.start : sealed.stop - 16] = made.plain[plain]
    sealer = Sealer(samples.DATA_KEY, samples.NAMES.chunk_id, place, samples.SALT, blob)
    for index in range(place.segments):
        sealed = place.sealed_span(index)
        sealer.update(blob[sealed.start : sealed.stop - 16])
    assert sealer.finish() == made.sealed
    assert blob == made.blob
