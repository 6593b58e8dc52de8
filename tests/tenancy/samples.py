"""What the tests of keys and sealing share: the format page's values, objects sealed with them, inline workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

from tenancy.keys.secret import SecretBytes
from tenancy.naming import NameKeys
from tenancy.sealing import BlobAddress, Sealed, open_sealed, seal, sealed_length

Result = TypeVar("Result")

DATA_KEY = SecretBytes(bytes(range(0x20)))
ID_KEY = SecretBytes(bytes(range(0x20, 0x40)))
SALT = bytes(range(0x40, 0x60))
NAMES = NameKeys.derive(ID_KEY)
TENANT = UUID(bytes=b"\x11" * 16)
NAMESPACE = UUID(bytes=b"\x22" * 16)
FINGERPRINT = bytes.fromhex("624ff5fb3b940617556c9881ac020617593ec87f6c664ae6e848f7822416ba93")


def address(length: int, seg_log2: int = 16) -> BlobAddress:
    return BlobAddress(TENANT, NAMESPACE, 7, length, 1_700_000_000_000, FINGERPRINT, seg_log2)


def plaintext(length: int) -> bytes:
    return (bytes(range(256)) * (length // 256 + 1))[:length]


@dataclass(frozen=True)
class SealedObject:
    """A sealed chunk with all that its catalog row knows."""

    address: BlobAddress
    salt: bytes
    sealed: Sealed
    blob: bytes
    plain: bytes

    def open(self, blob: bytes | None = None, *, row: BlobAddress | None = None) -> bytes:
        """Open `blob` (default: its own) as the row says; on `SealBroken` asserts that nothing was left behind."""
        address = row or self.address
        target = bytearray(b"\xaa" * address.length)
        view = memoryview(self.blob if blob is None else blob)
        try:
            open_sealed(DATA_KEY, address, self.salt, self.sealed, view, memoryview(target))
        except Exception:
            assert target == bytes(address.length), "a failed open left bytes in its target"
            raise
        return bytes(target)


def sealed_object(length: int, *, plain: bytes | None = None, salt: bytes = SALT) -> SealedObject:
    plain = plaintext(length) if plain is None else plain
    place = address(length)
    blob = bytearray(sealed_length(length, place.seg_log2))
    sealed = seal(DATA_KEY, NAMES.chunk_id, place, salt, memoryview(plain), memoryview(blob))
    return SealedObject(place, salt, sealed, bytes(blob), plain)


class InlineWorkers:
    """Workers without threads."""

    async def run(self, work: Callable[[], Result]) -> Result:
        return work()
