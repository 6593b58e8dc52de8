"""Sealed blob, version 1: one chunk, encrypted under its own key and bound to its address.

Layout and reading order are those of ``docs/formats.md``, "Sealed blob": a header of 256 bytes, then segments of
ciphertext and tag. The header is never believed: it is rebuilt from the catalog row and compared. The salt and the
root of the tags live in the catalog only, so that a blob without its row is noise.

`seal` and `open_sealed` do a whole chunk; `Sealer` and `Opener` do it segment by segment while data arrives. None
of them allocates in proportion to the chunk, and all release the GIL while they hash and encrypt. A wrong buffer or
argument is a `ValueError`: a mistake of the caller, not of the blob. Buffers hold plain bytes (``memoryview`` of
format B) and belong to this code until it returns: another thread that writes meanwhile could change what is sealed.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tenancy.errors import SealBroken, SealFault
from tenancy.keys.kdf import NONCE_BYTES, CommittingKey, committing_key
from tenancy.keys.secret import SecretBytes

LENGTH_MAX: Final = 256 * 1024 * 1024
"""Longest plaintext in bytes."""
HEADER_BYTES: Final = 256
TAG_BYTES: Final = 16
SEG_LOG2_MIN: Final = 16
SEG_LOG2_MAX: Final = 22
SEG_LOG2_DEFAULT: Final = 20

_NAME_BYTES = 32  # fingerprint, chunk id and tag root
_ADDRESS = struct.Struct(">4sBBHB3x16s16sIQQ32s")
_MAGIC, _VERSION, _SUITE = b"KVGW", 1, 1
_BOUND_BYTES = _ADDRESS.size + _NAME_BYTES  # the part of the header that the catalog row determines
_COMMITMENT_END = _BOUND_BYTES + 32
_RESERVED = bytes(HEADER_BYTES - _COMMITMENT_END)
_KEY_LABEL = b"kvgw/v1/blob+AEAD_AES_256_GCM\0"
_ROOT_LABEL = b"kvgw/v1/tagroot\0"
_SEGMENT_PLACE = struct.Struct(">IB")
_ZEROS = bytes(64 * 1024)


@dataclass(frozen=True, slots=True)
class BlobAddress:
    """What gives a blob its meaning, as its catalog row has it. Raises `ValueError` for a value outside its range."""

    tenant: UUID
    namespace: UUID
    epoch: int
    length: int
    """Plaintext bytes, 1 … `LENGTH_MAX`."""
    created_ms: int
    fingerprint: bytes
    """KV format, 32 bytes."""
    seg_log2: int = SEG_LOG2_DEFAULT
    """All segments but the last hold ``2 ** seg_log2`` bytes of plaintext."""

    def __post_init__(self) -> None:
        _check_range("epoch", self.epoch, 0, 2**32 - 1)
        _check_range("length", self.length, 1, LENGTH_MAX)
        _check_range("created_ms", self.created_ms, 0, 2**64 - 1)
        _check_range("seg_log2", self.seg_log2, SEG_LOG2_MIN, SEG_LOG2_MAX)
        _check_range("length of the fingerprint", len(self.fingerprint), _NAME_BYTES, _NAME_BYTES)

    @property
    def segments(self) -> int:
        """Number of segments."""
        return -(-self.length >> self.seg_log2)

    def place(self, index: int) -> tuple[int, int, int]:
        """Where segment `index` begins and ends in the plaintext, and how much later it begins in the sealed blob."""
        start = index << self.seg_log2
        return start, min(start + (1 << self.seg_log2), self.length), HEADER_BYTES + index * TAG_BYTES

    def plain_span(self, index: int) -> slice:
        """Where segment `index` lies in the plaintext."""
        start, stop, _ = self.place(index)
        return slice(start, stop)

    def sealed_span(self, index: int) -> slice:
        """Where segment `index` lies in the sealed blob, its tag included."""
        start, stop, shift = self.place(index)
        return slice(start + shift, stop + shift + TAG_BYTES)

    def encode(self) -> bytes:
        """The first 96 bytes of the header."""
        layout = (_MAGIC, _VERSION, _SUITE, HEADER_BYTES, self.seg_log2)
        place = (self.tenant.bytes, self.namespace.bytes, self.epoch)
        return _ADDRESS.pack(*layout, *place, self.length, self.created_ms, self.fingerprint)


def sealed_length(length: int, seg_log2: int = SEG_LOG2_DEFAULT) -> int:
    """Exact bytes of the blob of a chunk of `length` bytes."""
    _check_range("length", length, 1, LENGTH_MAX)
    _check_range("seg_log2", seg_log2, SEG_LOG2_MIN, SEG_LOG2_MAX)
    return HEADER_BYTES + length + TAG_BYTES * -(-length >> seg_log2)


@dataclass(frozen=True, slots=True)
class Sealed:
    """What the catalog keeps of a sealed chunk: its content address, and the fingerprint of the whole blob."""

    chunk_id: bytes
    tag_root: bytes


def namespace_of(head: bytes) -> UUID | None:
    """The namespace that a blob's first bytes name; None when they are not a blob's, or too few."""
    if len(head) < _ADDRESS.size or not head.startswith(_MAGIC):
        return None
    return UUID(bytes=_ADDRESS.unpack_from(head)[6])


def seal(
    data_key: SecretBytes,
    chunk_id_key: SecretBytes,
    address: BlobAddress,
    salt: bytes,
    plaintext: memoryview,
    target: memoryview,
) -> Sealed:
    """Hash and seal a whole chunk into `target`, which has exactly `sealed_length` bytes."""
    _check_buffer("plaintext", plaintext, address.length)
    sealer = Sealer(data_key, chunk_id_key, address, salt, target)
    for index in range(address.segments):
        sealer.update(plaintext[address.plain_span(index)])
    return sealer.finish()


def open_sealed(
    data_key: SecretBytes,
    address: BlobAddress,
    salt: bytes,
    expected: Sealed,
    sealed: memoryview,
    target: memoryview,
) -> None:
    """Verify and decrypt a whole blob into `target`, which has exactly ``address.length`` bytes.

    Raises `SealBroken` if `sealed` is not the blob of this address, salt, chunk id and tag root; `target` is all
    zero then.
    """
    opener = Opener(data_key, address, salt, expected, sealed, target)
    for index in range(address.segments):
        opener.open_segment(index)
    opener.finish()


class Sealer:
    """Seals one chunk while its segments arrive: each is hashed and encrypted in one pass, while it is in cache."""

    __slots__ = ("_address", "_chunk_id", "_cipher", "_derived", "_encoded", "_hasher", "_next", "_segments", "_target")

    def __init__(
        self,
        data_key: SecretBytes,
        chunk_id_key: SecretBytes,
        address: BlobAddress,
        salt: bytes,
        target: memoryview,
    ) -> None:
        """`salt`: 32 random bytes that were never used before. `target`: exactly `sealed_length` bytes."""
        self._segments = address.segments
        _check_buffer("target", target, HEADER_BYTES + address.length + TAG_BYTES * self._segments)
        self._address = address
        self._encoded = address.encode()
        self._derived = committing_key(data_key, _KEY_LABEL, salt, self._encoded)
        self._cipher = AESGCM(self._derived.key)
        self._hasher = blake3(key=chunk_id_key.reveal())
        self._chunk_id = b""
        self._target = target
        self._next = 0

    def update(self, segment: memoryview) -> None:
        """Seal the next segment: ``2 ** seg_log2`` bytes, or for the last one what remains of the length."""
        index = self._next
        if index == self._segments:
            raise ValueError(f"all {index} segments of this chunk are sealed already; call finish")
        start, stop, shift = self._address.place(index)
        _check_buffer(f"segment {index}", segment, stop - start)
        self._hasher.update(segment)
        if index == self._segments - 1:
            self._chunk_id = self._hasher.digest()
        room = self._target[start + shift : stop + shift + TAG_BYTES]
        self._cipher.encrypt_into(
            _segment_nonce(self._derived, index), segment, _segment_context(index, self._chunk_id), room
        )
        self._next = index + 1

    def finish(self) -> Sealed:
        """Write the header; only now is `target` a blob."""
        if self._next != self._segments:
            raise ValueError(f"{self._next} of {self._segments} segments were sealed; update with the rest")
        self._target[:HEADER_BYTES] = b"".join((self._encoded, self._chunk_id, self._derived.commitment, _RESERVED))
        return Sealed(self._chunk_id, _tag_root(self._address, self._target))


class Opener:
    """Opens one blob segment by segment; the header is checked before any decryption.

    A segment's bytes in `target` are verified once `open_segment` returned, whatever the order. The chunk as a whole
    is verified only when `finish` returned. On any failure `target` is zeroed and this opener refuses to go on.
    """

    __slots__ = ("_address", "_cipher", "_derived", "_expected", "_fault", "_opened", "_sealed", "_segments", "_target")

    def __init__(
        self,
        data_key: SecretBytes,
        address: BlobAddress,
        salt: bytes,
        expected: Sealed,
        sealed: memoryview,
        target: memoryview,
    ) -> None:
        """Check length, header and commitment; later segments of `sealed` may still be on their way."""
        _check_buffer("target", target, address.length)
        _check_plain("sealed", sealed)
        for name in (expected.chunk_id, expected.tag_root):
            _check_range("length of a chunk id or tag root", len(name), _NAME_BYTES, _NAME_BYTES)
        self._address, self._expected, self._sealed, self._target = address, expected, sealed, target
        self._segments = address.segments
        self._fault: SealFault | None = None
        self._opened: set[int] = set()
        encoded = address.encode()
        self._check_header(encoded)
        self._derived = committing_key(data_key, _KEY_LABEL, salt, encoded)
        if not hmac.compare_digest(sealed[_BOUND_BYTES:_COMMITMENT_END], self._derived.commitment):
            raise self._refuse("commitment", "it was sealed under another data key or salt")
        self._cipher = AESGCM(self._derived.key)

    def _check_header(self, encoded: bytes) -> None:
        sealed, length = self._sealed, HEADER_BYTES + self._address.length + TAG_BYTES * self._segments
        if len(sealed) != length:
            raise self._refuse("length", f"it has {len(sealed)} bytes where its row means {length}")
        if not hmac.compare_digest(sealed[:_BOUND_BYTES], encoded + self._expected.chunk_id):
            raise self._refuse("header", "its header is not the one that its row means")
        if sealed[_COMMITMENT_END:HEADER_BYTES] != _RESERVED:
            raise self._refuse("header", "reserved bytes of its header are not zero")

    def open_segment(self, index: int) -> None:
        """Verify and decrypt segment `index` into its place in `target`; raises `SealBroken`."""
        _check_range("segment", index, 0, self._segments - 1)
        self._check_unbroken()
        start, stop, shift = self._address.place(index)
        bound = _segment_context(index, self._expected.chunk_id if index == self._segments - 1 else b"")
        room = self._target[start:stop]
        segment = self._sealed[start + shift : stop + shift + TAG_BYTES]
        try:
            self._cipher.decrypt_into(_segment_nonce(self._derived, index), segment, bound, room)
        except InvalidTag as error:
            raise self._refuse("tag", f"segment {index} of {self._segments} was altered") from error
        self._opened.add(index)

    def finish(self) -> None:
        """Check that every segment was opened and that the blob is the very one that was stored."""
        self._check_unbroken()
        if len(self._opened) != self._segments:
            raise ValueError(f"{len(self._opened)} of {self._segments} segments were opened; open the rest")
        if not hmac.compare_digest(_tag_root(self._address, self._sealed), self._expected.tag_root):
            raise self._refuse("root", "it is a whole blob, but not the one that its row means")

    def _check_unbroken(self) -> None:
        if self._fault is not None:
            raise self._refuse(self._fault, "this blob was refused before")

    def _refuse(self, fault: SealFault, detail: str) -> SealBroken:
        self._fault = fault
        for start in range(0, len(self._target), len(_ZEROS)):
            room = self._target[start : start + len(_ZEROS)]
            room[:] = _ZEROS[: len(room)]
        return SealBroken(fault, detail)


def _segment_nonce(derived: CommittingKey, index: int) -> bytes:
    base = int.from_bytes(derived.nonce, "big")
    nonce = (base ^ index).to_bytes(NONCE_BYTES, "big")
    assert len(nonce) == NONCE_BYTES, "the library takes nonces of any length"
    return nonce


def _segment_context(index: int, chunk_id_of_last: bytes) -> bytes:
    """Associated data of a segment: its place, and for the last one that it ends the chunk with this id."""
    return _SEGMENT_PLACE.pack(index, 1 if chunk_id_of_last else 0) + chunk_id_of_last


def _tag_root(address: BlobAddress, sealed: memoryview) -> bytes:
    parts: list[bytes | memoryview] = [_ROOT_LABEL, sealed[:HEADER_BYTES]]
    for index in range(address.segments):
        _, stop, shift = address.place(index)
        parts.append(sealed[stop + shift : stop + shift + TAG_BYTES])
    return hashlib.sha256(b"".join(parts)).digest()


def _check_range(what: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{what} must be from {least} to {most}, not {value}")


def _check_buffer(what: str, buffer: memoryview, length: int) -> None:
    _check_plain(what, buffer)
    if len(buffer) != length:
        raise ValueError(f"{what} must have {length} bytes, not {len(buffer)}")


def _check_plain(what: str, buffer: memoryview) -> None:
    if buffer.format != "B" or buffer.ndim != 1 or not buffer.c_contiguous:
        raise ValueError(f"{what} must be contiguous bytes, not of format {buffer.format!r} and shape {buffer.shape}")
