"""One key for one message, with a commitment to it: the derivation that sealing and wrapping share.

``okm = HKDF-Expand(SHA-512, secret, info, 76)``: key = okm[0:32], nonce = okm[32:44], commitment = okm[44:76].
AES-GCM does not commit to its key: a ciphertext can be made that opens under two. The commitment, compared before
any GCM call, takes that away. A fresh salt in `info` makes every (key, nonce) pair new, without any counter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from tenancy.keys.secret import KEY_BYTES, SecretBytes

NONCE_BYTES: Final = 12
SALT_BYTES: Final = 32
COMMITMENT_BYTES: Final = 32


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class CommittingKey:
    """AES-256 key, 12-byte nonce (or base of nonces) and 32-byte commitment of one message."""

    key: bytes
    nonce: bytes
    commitment: bytes


def committing_key(secret: SecretBytes, label: bytes, salt: bytes, context: bytes) -> CommittingKey:
    """Derive the key of one message. `label` is constant for each use and ends in a zero byte.

    Raises `ValueError` for a secret or salt of another length than 32 bytes, `KeyUnavailable` for one that was wiped.
    """
    key = secret.reveal()
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    if len(salt) != SALT_BYTES:
        raise ValueError(f"a salt has {SALT_BYTES} bytes, not {len(salt)}")
    length = KEY_BYTES + NONCE_BYTES + COMMITMENT_BYTES
    okm = HKDFExpand(SHA512(), length, label + salt + context).derive(key)
    return CommittingKey(okm[:KEY_BYTES], okm[KEY_BYTES:-COMMITMENT_BYTES], okm[-COMMITMENT_BYTES:])
