"""A key in memory that does not find its way into logs, errors, pickles or comparisons by accident."""

from __future__ import annotations

import hmac
from typing import Final, NoReturn

from tenancy.errors import KeyUnavailable

KEY_BYTES: Final = 32
"""Length of every key of the hierarchy."""


class SecretBytes:
    """Secret bytes whose repr shows their length only; equal in constant time, neither hashable nor picklable.

    `wipe` zeroes this copy. It cannot reach what `reveal` gave out, nor copies inside OpenSSL and Python's own
    temporaries: those go when they are freed, and only a process without core dumps and swap keeps them in RAM.
    """

    __slots__ = ("_value",)
    __hash__ = None  # type: ignore[assignment]  # a hash of a secret is a way to compare it in variable time

    def __init__(self, value: bytes | bytearray) -> None:
        self._value: bytearray | None = bytearray(value)

    def reveal(self) -> bytes:
        """The bytes, for the one call that needs them. Raises `KeyUnavailable` after `wipe`."""
        value = self._value
        copy = b"" if value is None else bytes(value)
        if self._value is None:  # looked at after the copy: another thread may have wiped it in between
            raise KeyUnavailable("this copy of a key was wiped from memory; ask for the key again")
        return copy

    def wipe(self) -> None:
        """Zero and forget the bytes; a second call does nothing."""
        value, self._value = self._value, None
        if value is not None:
            value[:] = bytes(len(value))

    def __len__(self) -> int:
        return len(self._value or b"")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SecretBytes):
            return NotImplemented
        return hmac.compare_digest(self.reveal(), other.reveal())

    def __repr__(self) -> str:
        return "SecretBytes(wiped)" if self._value is None else f"SecretBytes({len(self._value)} bytes)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SecretBytes is never pickled or copied")
