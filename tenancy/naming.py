"""Keyed names: nobody without a namespace's id key can test a guess about a prompt (``docs/formats.md``, "Names").

Every name is a keyed BLAKE3 of 32 bytes, never truncated. The four keys are derived from the namespace's id key.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from tenancy.keys.secret import KEY_BYTES, SecretBytes


@dataclass(frozen=True, slots=True)
class NameKeys:
    """The four naming keys of a namespace, 32 bytes each."""

    chunk_id: SecretBytes
    fingerprint: SecretBytes
    entry: SecretBytes
    label: SecretBytes

    @classmethod
    def derive(cls, id_key: SecretBytes) -> NameKeys:
        """Derive them from the namespace's id key.

        Raises `ValueError` for another length than 32 bytes, `KeyUnavailable` for a key that was wiped.
        """
        secret = id_key.reveal()
        if len(secret) != KEY_BYTES:
            raise ValueError(f"an id key has {KEY_BYTES} bytes, not {len(secret)}")
        return cls(
            chunk_id=SecretBytes(hmac.digest(secret, b"kvgw/v1/chunk-id\0", "sha256")),
            fingerprint=SecretBytes(hmac.digest(secret, b"kvgw/v1/format-fp\0", "sha256")),
            entry=SecretBytes(hmac.digest(secret, b"kvgw/v1/entry-key\0", "sha256")),
            label=SecretBytes(hmac.digest(secret, b"kvgw/v1/label\0", "sha256")),
        )


def length_prefixed(*fields: bytes) -> bytes:
    """LP of the format page: each field preceded by its length as u32, so that no two field lists collide."""
    return b"".join(part for field in fields for part in (len(field).to_bytes(4, "big"), field))


def format_fingerprint(fingerprint_key: SecretBytes, canonical: bytes) -> bytes:
    """Name of a KV format in one namespace, from its canonical form."""
    return blake3(canonical, key=fingerprint_key.reveal()).digest()


def entry_keys(entry_key: SecretBytes, fingerprint: bytes, engine_keys: Sequence[bytes]) -> list[bytes]:
    """Names of the entries of `engine_keys` in one KV format, in their order."""
    # All names share the key and the fingerprint, so that much is hashed once; `length_prefixed` is written out.
    shared = blake3(length_prefixed(fingerprint), key=entry_key.reveal())
    return [shared.copy().update(len(key).to_bytes(4, "big") + key).digest() for key in engine_keys]


def label_mac(label_key: SecretBytes, kind: str, value: str) -> bytes:
    """Name of a label: the catalog finds entries by label without holding the label itself."""
    return blake3(length_prefixed(kind.encode(), value.encode()), key=label_key.reveal()).digest()
