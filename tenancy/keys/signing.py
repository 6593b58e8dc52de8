"""Signatures of the gateways: on deletion receipts and on checkpoints of the audit log (Ed25519).

The key is derived from the secret that all gateways of a catalog share in the key store, so that there is one more key
and nothing more to keep. Every kind of statement has a domain of its own: a signature on one is none on another.
"""

from __future__ import annotations

import hmac
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tenancy.keys.secret import SecretBytes

RECEIPT: Final = b"kvgw/v1/receipt\0"
CHECKPOINT: Final = b"kvgw/v1/audit-checkpoint\0"
PUBLIC_BYTES: Final = 32

_SEED: Final = b"kvgw/v1/signing-key\0"


class Signer:
    """Signs what this installation says; whoever has `public_key` can check it."""

    def __init__(self, shared: SecretBytes) -> None:
        """`shared`: the secret of the gateways."""
        self._key = Ed25519PrivateKey.from_private_bytes(hmac.digest(shared.reveal(), _SEED, "sha256"))

    @property
    def public_key(self) -> bytes:
        """32 bytes; not secret."""
        return self._key.public_key().public_bytes_raw()

    def sign(self, domain: bytes, statement: bytes) -> bytes:
        """The signature (64 bytes) on a statement of a domain."""
        return self._key.sign(domain + statement)


def signed_by(public_key: bytes, domain: bytes, statement: bytes, signature: bytes) -> bool:
    """Whether `signature` is that of `public_key` on this statement of this domain; False for malformed keys too."""
    if len(public_key) != PUBLIC_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, domain + statement)
    except (InvalidSignature, ValueError):
        return False
    return True
