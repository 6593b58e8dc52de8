"""A root key from the environment: for development, where no file and no service is at hand.

Whoever may look at a process's environment has the key; nothing rests on it that must stay secret.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Collection
from typing import Final

from tenancy.errors import KeyDamaged, KeyRefused
from tenancy.keys.rootkey import HeldRootKeys
from tenancy.keys.secret import KEY_BYTES, SecretBytes
from tenancy.keys.wrapping import KeyContext
from tenancy.ports import RandomBytes

VARIABLE: Final = "KVGW_ROOT_KEY"
KEYS_MAX: Final = 8

_HEX = re.compile(r"[0-9a-fA-F]{64}")


class EnvironmentRootKey:
    """Root keys as text, separated by commas: the first wraps, the others open what they wrapped."""

    provider = "environment"

    def __init__(self, text: str, random_bytes: RandomBytes) -> None:
        """Raises `KeyDamaged`, without a character of `text`, unless each is 32 bytes in hexadecimal or base64."""
        parts = [part.strip() for part in text.split(",")]
        if len(parts) > KEYS_MAX:
            raise KeyDamaged(f"{VARIABLE} holds {len(parts)} keys; at most {KEYS_MAX}")
        self._held = HeldRootKeys([_parsed(part) for part in parts], random_bytes)

    @property
    def key_id(self) -> str:
        return self._held.current.ref

    async def wrap(self, key: SecretBytes, context: KeyContext) -> bytes:
        return self._held.wrap(key, context)

    async def unwrap(self, record: bytes, context: KeyContext) -> SecretBytes:
        return self._held.unwrap(record, context)

    async def check(self) -> None:
        """A new process has what its environment says; there is nothing to ask."""

    async def rotate(self) -> str:
        raise KeyRefused(
            f"the root key is in {VARIABLE}: put a new one before it, separated by a comma, restart every gateway, "
            "then run kvgw keys rewrap"
        )

    async def retire(self, needed: Collection[str]) -> list[str]:
        """What is in the environment can only be taken out of it by whoever put it there."""
        return []


def _parsed(text: str) -> SecretBytes:
    try:
        key = bytes.fromhex(text) if _HEX.fullmatch(text) else base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise KeyDamaged(
            f"{VARIABLE} must hold {KEY_BYTES} random bytes in hexadecimal or base64, as openssl rand -hex 32 prints"
        )
    return SecretBytes(key)
