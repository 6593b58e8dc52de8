"""What a client process stores and where it reads to: memory taken once, new keys and new bytes in each round."""

from __future__ import annotations

import os
from typing import Final

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from kvgw.bench.plan import BenchError

KEY_BYTES: Final = 32
SAMPLE: Final = 4
"""Chunks that are compared after a GET."""


class Content:
    """Payload of one round, cut into calls, and buffers for one call. The memory is touched before it is used."""

    def __init__(self, stored: memoryview, read: memoryview) -> None:
        """Memory for the payload of the largest round, and for that of the largest call."""
        self._stored = stored
        self._read = read
        randomize(self._read)
        self.keys: list[list[bytes]] = []
        """Of each call."""
        self.chunks: list[list[memoryview]] = []
        """Of each call; what is stored."""
        self.into: list[memoryview] = []
        """Where each call reads to."""

    def renew(self, chunk_bytes: int, batch: int, calls: int) -> None:
        """New random keys and incompressible content, different from any before."""
        randomize(self._stored[: chunk_bytes * batch * calls])
        self.keys = [[os.urandom(KEY_BYTES) for _ in range(batch)] for _ in range(calls)]
        self.chunks = [_cut(self._stored, call * batch, batch, chunk_bytes) for call in range(calls)]
        self.into = _cut(self._read, 0, batch, chunk_bytes)

    def check(self) -> None:
        """Compare some of what the last call read with what it should be. Raises `BenchError`."""
        wanted = self.chunks[-1]
        step = max(1, len(wanted) // SAMPLE)
        for index in range(0, len(wanted), step):
            # Comparing memoryviews goes byte by byte; comparing bytes is a memcmp.
            if bytes(wanted[index]) != bytes(self.into[index]):
                raise BenchError(f"chunk {index} of {len(wanted)} was read with other bytes than were stored")


def randomize(view: memoryview) -> None:
    """Make memory incompressible, and different at each call: encrypt it in place under a new key."""
    cipher = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(os.urandom(16)))
    cipher.encryptor().update_into(view, view)


def _cut(memory: memoryview, first: int, count: int, length: int) -> list[memoryview]:
    return [memory[index * length : (index + 1) * length] for index in range(first, first + count)]
