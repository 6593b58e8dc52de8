"""Wrapped keys: a key encrypted under another one and bound to the place that it belongs to.

Record: ``"KVKW" ‖ u8 version = 1 ‖ u8 algorithm = 1 ‖ LP16(ref) ‖ u32 key version ‖ salt[32] ‖ commitment[32] ‖
AES-256-GCM(key)[48]``, 124 bytes and the ref. Key, nonce and commitment of a record are derived from the wrapping
key, a fresh salt and the context, so that nothing has to be counted and a record that was moved does not open.

With algorithm 2 a key management service wrapped the key: ``… ‖ LP16(ref) ‖ ciphertext``, whose form is the service's.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tenancy.errors import KeyDamaged, KeyMismatch
from tenancy.keys.kdf import COMMITMENT_BYTES, SALT_BYTES, committing_key
from tenancy.keys.secret import KEY_BYTES, SecretBytes
from tenancy.naming import length_prefixed
from tenancy.ports import RandomBytes

REF_BYTES_MAX: Final = 128
RECORD_BYTES_MAX: Final = 2048
"""Longest record of any provider in bytes; a parser need not look at more."""

Purpose: TypeAlias = Literal["namespace", "data", "id", "token"]
"""What a wrapped key is for; see ``docs/formats.md``, "Keys"."""

_HEAD = struct.Struct(">4sBBH")
_KEY_VERSION = struct.Struct(">I")
_MAGIC, _VERSION = b"KVKW", 1
_LOCAL, _REMOTE = 1, 2
"""Algorithms: wrapped in this process, or by a service that keeps the wrapping key to itself."""

_LABEL = b"kvgw/v1/wrap\0"
_SEALED_BYTES = KEY_BYTES + 16

_UNKNOWN = (
    "a wrapped-key record of version {version}, algorithm {algorithm} is unknown here, where version 1, algorithm "
    "{known} is read; use the release, or the keys.provider, that wrote it"
)
_IMPOSSIBLE = "a wrapped-key record names its wrapping key by impossible bytes; restore it from a backup"


@dataclass(frozen=True, slots=True)
class KeyContext:
    """The place that a wrapped key belongs to. `epoch`: its version among the keys of its purpose."""

    tenant: UUID
    namespace: UUID
    purpose: Purpose
    epoch: int

    def fields(self) -> Mapping[str, str]:
        """As names and values in text, sorted by name: what a key management service takes as its context."""
        return {
            "epoch": str(self.epoch),
            "namespace": str(self.namespace),
            "purpose": self.purpose,
            "tenant": str(self.tenant),
        }

    def encode(self) -> bytes:
        return length_prefixed(*(part.encode() for pair in self.fields().items() for part in pair))


@dataclass(frozen=True, slots=True)
class WrappingKey:
    """A key that wraps others. `ref` names it in every record, 1 to 128 printable ASCII characters."""

    ref: str
    version: int
    secret: SecretBytes

    def __post_init__(self) -> None:
        if not (self.ref.isascii() and self.ref.isprintable() and 1 <= len(self.ref) <= REF_BYTES_MAX):
            raise ValueError(f"a key's ref must be 1 to {REF_BYTES_MAX} printable ASCII characters, not {self.ref!r}")
        if not 1 <= self.version < 2**32:
            raise ValueError(f"a key's version must be from 1 to 2**32-1, not {self.version}")


@dataclass(frozen=True, slots=True, repr=False)
class WrappedKey:
    """A wrapped-key record, taken apart. It opens only with the wrapping key that `ref` and `version` name."""

    ref: str
    version: int
    salt: bytes
    commitment: bytes
    sealed: bytes

    def encode(self) -> bytes:
        ref = self.ref.encode("ascii")
        head = _HEAD.pack(_MAGIC, _VERSION, _LOCAL, len(ref)) + ref + _KEY_VERSION.pack(self.version)
        return head + self.salt + self.commitment + self.sealed

    @classmethod
    def parse(cls, record: bytes) -> WrappedKey:
        """Take a record apart; raises `KeyDamaged` for any byte string that `encode` would not write."""
        algorithm, ref, rest = _take_apart(record)
        if algorithm != _LOCAL:
            raise KeyDamaged(_UNKNOWN.format(version=_VERSION, algorithm=algorithm, known=_LOCAL))
        if len(rest) != _KEY_VERSION.size + SALT_BYTES + COMMITMENT_BYTES + _SEALED_BYTES:
            raise KeyDamaged(
                f"a wrapped-key record of {len(record)} bytes with a ref of {len(ref)} cannot be whole; "
                "restore it from a backup"
            )
        return cls._from_parts(ref, rest)

    @classmethod
    def _from_parts(cls, ref: str, rest: bytes) -> WrappedKey:
        (version,) = _KEY_VERSION.unpack_from(rest)
        if version < 1:
            raise KeyDamaged(_IMPOSSIBLE)
        salt_end = _KEY_VERSION.size + SALT_BYTES
        return cls(
            ref=ref,
            version=version,
            salt=rest[_KEY_VERSION.size : salt_end],
            commitment=rest[salt_end:-_SEALED_BYTES],
            sealed=rest[-_SEALED_BYTES:],
        )


def remote_record(ref: str, ciphertext: bytes) -> bytes:
    """The record of a key that the service key `ref` wrapped. Raises `ValueError` for what would not fit."""
    name = ref.encode("ascii")
    record = _HEAD.pack(_MAGIC, _VERSION, _REMOTE, len(name)) + name + ciphertext
    if not (1 <= len(name) <= REF_BYTES_MAX and ciphertext and len(record) <= RECORD_BYTES_MAX):
        raise ValueError(f"a ref of {len(name)} and a ciphertext of {len(ciphertext)} bytes make no record")
    return record


def remote_parts(record: bytes) -> tuple[str, bytes]:
    """The service key's ref and the ciphertext in a record. Raises `KeyDamaged`, also for one not by a service."""
    algorithm, ref, ciphertext = _take_apart(record)
    if algorithm != _REMOTE:
        raise KeyDamaged(_UNKNOWN.format(version=_VERSION, algorithm=algorithm, known=_REMOTE))
    if not ciphertext:
        raise KeyDamaged("a wrapped-key record has no ciphertext; restore it from a backup")
    return ref, ciphertext


def wrapped_by(record: bytes) -> str:
    """The ref of the key that wrapped a record, whoever holds it. Raises `KeyDamaged`."""
    return _take_apart(record)[1]


def _take_apart(record: bytes) -> tuple[int, str, bytes]:
    """Algorithm, ref, and what comes after them."""
    if len(record) < _HEAD.size:
        raise KeyDamaged(f"a wrapped-key record breaks off after {len(record)} bytes; restore it from a backup")
    magic, version, algorithm, ref_length = _HEAD.unpack_from(record)
    if magic != _MAGIC:
        raise KeyDamaged("this is not a wrapped-key record: wrong magic; restore it from a backup")
    if version != _VERSION or algorithm not in (_LOCAL, _REMOTE):
        raise KeyDamaged(_UNKNOWN.format(version=version, algorithm=algorithm, known=_LOCAL))
    ref = record[_HEAD.size : _HEAD.size + ref_length]
    if not 1 <= ref_length <= REF_BYTES_MAX or len(ref) != ref_length or len(record) > RECORD_BYTES_MAX:
        raise KeyDamaged(
            f"a wrapped-key record of {len(record)} bytes with a ref of {ref_length} cannot be whole; "
            "restore it from a backup"
        )
    if not (ref.isascii() and ref.decode("latin-1").isprintable()):
        raise KeyDamaged(_IMPOSSIBLE)
    return algorithm, ref.decode("ascii"), record[_HEAD.size + ref_length :]


def wrap(kek: WrappingKey, key: SecretBytes, context: KeyContext, random_bytes: RandomBytes) -> bytes:
    """The record of `key` (32 bytes) under `kek`, bound to `context`."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key to be wrapped has {KEY_BYTES} bytes, not {len(key)}")
    salt = random_bytes(SALT_BYTES)
    derived = committing_key(kek.secret, _LABEL, salt, context.encode())
    sealed = AESGCM(derived.key).encrypt(derived.nonce, key.reveal(), None)
    return WrappedKey(kek.ref, kek.version, salt, derived.commitment, sealed).encode()


def unwrap(kek: WrappingKey, record: bytes, context: KeyContext) -> SecretBytes:
    """The key inside `record`.

    Raises `KeyMismatch` if another key wrapped it or it belongs to another context, `KeyDamaged` if it is malformed.
    """
    wrapped = WrappedKey.parse(record)
    if (wrapped.ref, wrapped.version) != (kek.ref, kek.version):
        raise KeyMismatch(
            f"the {context.purpose} key of namespace {context.namespace} was wrapped by key {wrapped.ref!r} version "
            f"{wrapped.version}, not by key {kek.ref!r} version {kek.version}; bring back the key that wrapped it"
        )
    derived = committing_key(kek.secret, _LABEL, wrapped.salt, context.encode())
    if not hmac.compare_digest(wrapped.commitment, derived.commitment):
        raise KeyMismatch(
            f"the record of the {context.purpose} key {context.epoch} of namespace {context.namespace} was made for "
            f"another place or altered: key {kek.ref!r} version {kek.version} does not open it; restore the record"
        )
    try:
        return SecretBytes(AESGCM(derived.key).decrypt(derived.nonce, wrapped.sealed, None))
    except InvalidTag as error:
        raise KeyDamaged(
            f"the record of the {context.purpose} key {context.epoch} of namespace {context.namespace} was altered; "
            "restore it from a backup"
        ) from error
