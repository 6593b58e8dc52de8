"""Checkpoints of the audit log: signed statements of how long it was and what its last hash was, at a time.

A note in the form of C2SP's signed notes (c2sp.org/signed-note). Its text is four lines: origin, number of records, the
last record's hash in base64, and the time. The hash is the end of the chain of hashes, not the root of a Merkle tree,
so a note is no "tlog-checkpoint"; and because the signature is made under a domain of kvgw's own
(`tenancy.keys.signing.CHECKPOINT`), its type is 0xff with that domain's name, and not plain Ed25519.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from typing import Final

from tenancy.keys.signing import CHECKPOINT, Signer, signed_by

NOTE_CHARACTERS_MAX: Final = 1024
HASH_BYTES: Final = 32

_KEY_ID_BYTES: Final = 4
_KIND: Final = b"\xffkvgw/v1/audit-checkpoint"
_NOTE: Final = re.compile(
    r"(?P<text>(?P<origin>kvgw-audit/[0-9a-f]{16})\n(?P<seq>[1-9][0-9]{0,18})\n(?P<hash>[A-Za-z0-9+/]{43}=)\n"
    r"time (?P<at_ms>[0-9]{1,15})\n)\n— (?P<signer>\S+) (?P<signature>[A-Za-z0-9+/]+=*)\n"
)


class CheckpointBroken(ValueError):
    """A note that is malformed, or not signed by this installation; the sentence says which."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """At `at_ms` the log had `seq` records, the last of them with `hash` (32 bytes)."""

    seq: int
    hash: bytes
    at_ms: int
    note: str


def origin_of(public_key: bytes) -> str:
    """The name under which the holder of a key signs: two installations have two."""
    return f"kvgw-audit/{hashlib.sha256(public_key).hexdigest()[:16]}"


def sign(signer: Signer, seq: int, digest: bytes, at_ms: int) -> Checkpoint:
    """The checkpoint of a log that ends with record `seq` and its hash `digest`."""
    origin = origin_of(signer.public_key)
    text = f"{origin}\n{seq}\n{base64.b64encode(digest).decode()}\ntime {at_ms}\n"
    signature = signer.sign(CHECKPOINT, text.encode())
    signed = base64.b64encode(_key_id(origin, signer.public_key) + signature).decode()
    return Checkpoint(seq, digest, at_ms, f"{text}\n— {origin} {signed}\n")


def read(note: str, public_key: bytes) -> Checkpoint:
    """What a note says. Raises `CheckpointBroken` unless it is whole and signed by `public_key`."""
    parts = _NOTE.fullmatch(note) if len(note) <= NOTE_CHARACTERS_MAX else None
    if parts is None:
        raise CheckpointBroken("it is not a checkpoint of a kvgw audit log")
    origin = origin_of(public_key)
    if parts["origin"] != origin or parts["signer"] != origin:
        raise CheckpointBroken(f"it is of {parts['origin']}, signed by {parts['signer']}, not of this log, {origin}")
    try:
        signed = base64.b64decode(parts["signature"], validate=True)
        digest = base64.b64decode(parts["hash"], validate=True)
    except binascii.Error:
        raise CheckpointBroken("its signature or hash is not base64") from None
    key_id, signature = signed[:_KEY_ID_BYTES], signed[_KEY_ID_BYTES:]
    if key_id != _key_id(origin, public_key) or not signed_by(
        public_key, CHECKPOINT, parts["text"].encode(), signature
    ):
        raise CheckpointBroken("its signature is not that of this installation's key")
    if len(digest) != HASH_BYTES:
        raise CheckpointBroken(f"its hash has {len(digest)} bytes, not {HASH_BYTES}")
    return Checkpoint(int(parts["seq"]), digest, int(parts["at_ms"]), note)


def _key_id(origin: str, public_key: bytes) -> bytes:
    return hashlib.sha256(origin.encode() + b"\n" + _KIND + public_key).digest()[:_KEY_ID_BYTES]
