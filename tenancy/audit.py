"""The audit log: what was done, by whom, in a chain of hashes, in the same transaction as the act itself.

Each record's hash covers all of its fields and the hash before it; the end of the chain is one row that whoever appends
locks. Call `record` last in a transaction: every one of them that appends waits for that row.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

import msgspec
from sqlalchemy import Connection, insert, select, update

from tenancy.schema import audit_head, audit_record

_DOMAIN: Final = b"kvgw/audit/v1\0"
DETAIL_BYTES_MAX: Final = 4096
TARGET_MAX: Final = 128

Detail = Mapping[str, str | int | bool | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One thing that was done, or refused. Never holds a token, a key, a prompt or a plain engine key."""

    actor: str
    """The caller's name: ``owner``, ``token:<id>`` or ``gateway``."""
    action: str
    """Verb and noun with a dot, as in ``namespace.create``."""
    target: str = ""
    tenant: UUID | None = None
    namespace: UUID | None = None
    result: str = "done"
    detail: Detail = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Record:
    """A row of the log."""

    seq: int
    at_ms: int
    actor: str
    action: str
    tenant: UUID | None
    namespace: UUID | None
    target: str
    result: str
    detail: str
    """JSON, keys sorted."""
    previous: bytes
    hash: bytes

    def expected_hash(self) -> bytes:
        """What its hash must be."""
        fields = (
            str(self.seq),
            str(self.at_ms),
            self.actor,
            self.action,
            str(self.tenant or ""),
            str(self.namespace or ""),
            self.target,
            self.result,
            self.detail,
        )
        parts = [_DOMAIN]
        for one in fields:
            data = one.encode()
            parts += (struct.pack(">I", len(data)), data)
        parts.append(self.previous)
        return hashlib.sha256(b"".join(parts)).digest()


def record(connection: Connection, act: Act, now_ms: int) -> int:
    """Append a record of `act` and return its number."""
    head = connection.execute(select(audit_head.c.seq, audit_head.c.hash).with_for_update()).one()
    detail = msgspec.json.encode(dict(act.detail), order="sorted").decode()
    if len(detail.encode()) > DETAIL_BYTES_MAX or len(act.target) > TARGET_MAX:
        raise ValueError(f"an audit record's detail has at most {DETAIL_BYTES_MAX} bytes, its target {TARGET_MAX}")
    unsealed = Record(
        seq=head.seq + 1,
        at_ms=now_ms,
        actor=act.actor,
        action=act.action,
        tenant=act.tenant,
        namespace=act.namespace,
        target=act.target,
        result=act.result,
        detail=detail,
        previous=head.hash,
        hash=b"",
    )
    digest = unsealed.expected_hash()
    connection.execute(
        insert(audit_record),
        {
            "seq": unsealed.seq,
            "at_ms": now_ms,
            "actor": act.actor,
            "action": act.action,
            "tenant_id": act.tenant,
            "namespace_id": act.namespace,
            "target": act.target,
            "result": act.result,
            "detail": detail,
            "previous": head.hash,
            "hash": digest,
        },
    )
    connection.execute(update(audit_head).values(seq=unsealed.seq, hash=digest))
    return unsealed.seq
