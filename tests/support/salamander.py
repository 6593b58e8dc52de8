"""A ciphertext that AES-GCM opens under two keys, after Dodis, Grubbs, Ristenpart and Woodage (CRYPTO 2018).

GCM's tag is linear in the ciphertext blocks over GF(2**128). With two keys there are two equations for one tag, and
one free block solves them. Whoever holds both keys can therefore make one blob that means two things, unless the
format commits to its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB

_REDUCTION = 0xE1 << 120  # x**128 + x**7 + x**2 + x + 1 in GCM's reflected bit order
_ONE = 1 << 127


@dataclass(frozen=True)
class GcmKey:
    """A key with the 12-byte nonce that it is used with."""

    key: bytes
    nonce: bytes

    def block(self, value: bytes) -> int:
        encryptor = Cipher(AES(self.key), ECB()).encryptor()
        return int.from_bytes(encryptor.update(value) + encryptor.finalize(), "big")

    @property
    def hash_key(self) -> int:
        return self.block(bytes(16))

    @property
    def tag_mask(self) -> int:
        return self.block(self.nonce + b"\0\0\0\1")


def two_key_ciphertext(first: GcmKey, second: GcmKey, associated: bytes, blocks: int) -> bytes:
    """``ciphertext ‖ tag`` of `blocks` 16-byte blocks that decrypts under both keys with the same associated data."""
    free = [bytes([17 * index & 255]) * 16 for index in range(blocks - 1)]
    tags, weights = [], []
    for key in (first, second):
        inputs = [*_padded_blocks(associated), *free, bytes(16), _lengths(len(associated), 16 * blocks)]
        tags.append(_ghash(key.hash_key, inputs) ^ key.tag_mask)
        weights.append(multiply(key.hash_key, key.hash_key))  # the last ciphertext block stands two steps from the end
    last = multiply(tags[0] ^ tags[1], inverse(weights[0] ^ weights[1]))
    tag = tags[0] ^ multiply(last, weights[0])
    return b"".join(free) + last.to_bytes(16, "big") + tag.to_bytes(16, "big")


def multiply(left: int, right: int) -> int:
    """Product in GCM's field, NIST SP 800-38D, algorithm 1."""
    product = 0
    for bit in range(127, -1, -1):
        if left >> bit & 1:
            product ^= right
        right = right >> 1 ^ (_REDUCTION if right & 1 else 0)
    return product


def inverse(value: int) -> int:
    """``value ** (2**128 - 2)``, the inverse in GCM's field."""
    result, power = _ONE, value
    for _ in range(127):
        power = multiply(power, power)
        result = multiply(result, power)
    return result


def _ghash(hash_key: int, inputs: Sequence[bytes]) -> int:
    state = 0
    for block in inputs:
        state = multiply(state ^ int.from_bytes(block, "big"), hash_key)
    return state


def _padded_blocks(data: bytes) -> list[bytes]:
    return [data[at : at + 16].ljust(16, b"\0") for at in range(0, len(data), 16)]


def _lengths(associated: int, ciphertext: int) -> bytes:
    return (8 * associated).to_bytes(8, "big") + (8 * ciphertext).to_bytes(8, "big")
