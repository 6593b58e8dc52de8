"""Receipts of deletions: what was deleted, who looked where afterwards, what that rests on and what it leaves out.

A receipt is one JSON object in canonical form (keys sorted, no spaces, UTF-8); its signature (Ed25519) covers the
object without the field ``signature``, in that same form. ``docs/formats.md`` has every field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import msgspec

from tenancy.deletion.jobs import Job
from tenancy.deletion.merkle import merkle_root
from tenancy.keys.signing import RECEIPT, Signer, signed_by

VERSION: Final = 1
NAMES_MAX: Final = 20_000
"""Most blob ids that a receipt lists; of more it has the number and the Merkle root."""

RESTS_ON: Final = {
    "chunks": "each chunk was sealed with a key derived from a salt that was kept in its catalog row alone: without "
    "the row no copy of its bytes opens",
    "namespace": "the namespace's key was destroyed in the key store: without it no copy of its bytes opens, whatever "
    "copies of the catalog there are",
    "tenant": "the receipts of its namespaces, listed here by their SHA-256",
}
EXCLUDES: Final = {
    "chunks": (
        "copies of the catalog database made before the deletion, until they are destroyed: they hold the salts",
        "PostgreSQL: dead rows until vacuum, and write-ahead logs until they are recycled or their archive ends",
    ),
    "namespace": ("copies of the key store that were made outside kvgw and are kept together with the root key",),
    "tenant": (),
    "": (
        "copies of objects that the S3 service keeps elsewhere: replicas, backups, locked versions",
        "what a disk keeps of deleted files and overwritten sectors: it does not open either",
        "memory of engines and clients, and whatever they wrote elsewhere",
        "chunks whose entries had ended before the request: expired, evicted or replaced ones, which the sweep deletes",
    ),
}


@dataclass(frozen=True, slots=True)
class Part:
    """A namespace of a deleted tenant: its own receipt."""

    namespace: UUID
    job_id: bytes
    sha256: str
    root: str


@dataclass(frozen=True, slots=True)
class Subject:
    """What a receipt is about, and what was found when it was written."""

    job: Job
    tenant_name: str
    namespace_name: str
    blobs: Sequence[bytes]
    retained: Sequence[bytes]
    retained_count: int
    entries: int
    chunks: int
    bytes: int
    parts: Sequence[Part] = ()
    unseen: Sequence[str] = ()
    """Nodes that could not look, since no gateway of theirs is alive."""


def write(subject: Subject, signer: Signer, now_ms: int, audit_seq: int) -> str:
    """The signed receipt of a job that was verified."""
    job = subject.job
    ground = job.kind if job.kind in ("namespace", "tenant") else "chunks"
    listed = len(subject.blobs) <= NAMES_MAX
    statement: dict[str, Any] = {
        "version": VERSION,
        "job": job.job_id.hex(),
        "kind": job.kind,
        "selector": msgspec.to_builtins(job.selector),
        "tenant": {"id": str(job.scope.tenant), "name": subject.tenant_name},
        "namespace": None if job.kind == "tenant" else {"id": str(job.scope.namespace), "name": subject.namespace_name},
        "requested": {"by": job.requested_by, "at_ms": job.requested_ms},
        "finished_ms": now_ms,
        "attempts": job.progress.attempt,
        "counts": {"entries": subject.entries, "chunks": subject.chunks, "bytes": subject.bytes},
        "blobs": {
            "count": len(subject.blobs),
            "root": root_of(subject).hex(),
            "ids": [one.hex() for one in subject.blobs] if listed else None,
        },
        "retained": {"count": subject.retained_count, "ids": [one.hex() for one in subject.retained]},
        "looks": [
            {
                "tier": look.tier,
                "node": look.node,
                "boot": look.boot,
                "method": look.method,
                "result": "clean",
                "at_ms": look.at_ms,
            }
            for look in job.progress.looks
        ],
        "key_destroyed_ms": job.progress.key_destroyed_ms or None,
        "parts": [
            {"namespace": str(one.namespace), "job": one.job_id.hex(), "sha256": one.sha256, "root": one.root}
            for one in subject.parts
        ],
        "rests_on": [RESTS_ON[ground]],
        "excludes": [
            *EXCLUDES[ground],
            *EXCLUDES[""],
            *(f"the disk of node {node}, of which no gateway was alive to look" for node in subject.unseen),
        ],
        "audit_seq": audit_seq,
        "public_key": signer.public_key.hex(),
    }
    statement["signature"] = signer.sign(RECEIPT, canonical(statement)).hex()
    return canonical(statement).decode()


def root_of(subject: Subject) -> bytes:
    """The Merkle root over blob ids in ascending order; for a tenant, over the roots of its namespaces."""
    if subject.job.kind == "tenant":
        return merkle_root(bytes.fromhex(one.root) for one in subject.parts)
    return merkle_root(subject.blobs)


def canonical(statement: dict[str, Any]) -> bytes:
    """The bytes that are signed: keys sorted, no spaces."""
    return msgspec.json.encode(statement, order="sorted")


def faults(text: bytes, public_key: bytes | None) -> list[str]:
    """What is wrong with a receipt by itself: its form, its signature, its Merkle root; nothing for a genuine one.

    `public_key`: the key that must have signed it; None trusts the key that the receipt names, and proves only that
    nobody has changed it since.
    """
    try:
        statement = msgspec.json.decode(text, type=dict[str, Any])
        signature = bytes.fromhex(statement.pop("signature"))
        named = bytes.fromhex(statement["public_key"])
        blobs = statement["blobs"]
        ids = None if blobs["ids"] is None else [bytes.fromhex(one) for one in blobs["ids"]]
        roots = [bytes.fromhex(part["root"]) for part in statement["parts"]]
        tenants = statement["kind"] == "tenant"
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        return [f"this is no receipt of a deletion: {type(error).__name__}: {error}"]
    found: list[str] = []
    if statement.get("version") != VERSION:
        found.append(f"its version is {statement.get('version')!r}; this release reads {VERSION}")
    if public_key is not None and named != public_key:
        found.append("it was signed by another installation's key than the one it is compared with")
    if not signed_by(named, RECEIPT, canonical(statement), signature):
        found.append("its signature does not fit: it was changed, or signed by another key")
    if tenants and merkle_root(roots).hex() != blobs["root"]:
        found.append("its Merkle root is not that of its parts")
    if not tenants and ids is not None and (len(ids) != blobs["count"] or merkle_root(ids).hex() != blobs["root"]):
        found.append("its Merkle root is not that of the blob ids that it lists")
    return found
