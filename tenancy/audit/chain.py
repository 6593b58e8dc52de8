"""The audit log: what was done, by whom, in a chain of hashes, in the same transaction as the act itself.

Each record's hash covers all of its fields and the hash before it; the end of the chain is one row that whoever appends
locks. Call `record` last in a transaction: every one of them that appends waits for that row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

import msgspec
from sqlalchemy import BigInteger, Connection, bindparam, select, update

from tenancy.audit.printing import printable
from tenancy.prepared import KeyStatement, RowsInsert
from tenancy.schema import audit_head, audit_record

_DOMAIN: Final = b"kvgw/audit/v1\0"
DETAIL_BYTES_MAX: Final = 4096
TARGET_MAX: Final = 128

HEAD: Final = KeyStatement(lambda: select(audit_head.c.seq, audit_head.c.hash).with_for_update())
MOVED: Final = KeyStatement(
    lambda: update(audit_head).values(seq=bindparam("last", type_=BigInteger), hash=bindparam("digest"))
)
_RECORDS: Final = RowsInsert(
    audit_record,
    ("at_ms", "tenant_id", "namespace_id"),
    ("seq", "actor", "action", "target", "result", "detail", "previous", "hash"),
)

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

    def fields(self) -> tuple[str, ...]:
        """What its hash covers besides the hash before it, in the order of the hash."""
        return (
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

    def expected_hash(self) -> bytes:
        """What its hash must be."""
        return chained_hash(self.fields(), self.previous)


def chained_hash(fields: Sequence[str], previous: bytes) -> bytes:
    """SHA-256 over the fields, each after its length, and the hash before (32 bytes)."""
    parts = [_DOMAIN]
    for one in fields:
        data = one.encode()
        parts += (len(data).to_bytes(4, "big"), data)
    parts.append(previous)
    return hashlib.sha256(b"".join(parts)).digest()


def record(connection: Connection, act: Act, now_ms: int) -> int:
    """Append a record of `act` and return its number."""
    return record_all(connection, [act], now_ms)


def record_all(connection: Connection, acts: Sequence[Act], now_ms: int) -> int:
    """Append a record of each of `acts`, in their order, and return the last one's number."""
    ((seq, previous),) = HEAD.rows(connection, {})
    for act in acts:
        seq += 1
        unsealed = _unsealed(act, seq, previous, now_ms)
        digest = unsealed.expected_hash()
        _RECORDS.run(
            connection,
            {"at_ms": now_ms, "tenant_id": act.tenant, "namespace_id": act.namespace},
            [
                (
                    seq,
                    unsealed.actor,
                    unsealed.action,
                    unsealed.target,
                    unsealed.result,
                    unsealed.detail,
                    previous,
                    digest,
                )
            ],
        )
        previous = digest
    if acts:
        MOVED.count(connection, {"last": seq, "digest": previous})
    return int(seq)


def _unsealed(act: Act, seq: int, previous: bytes, now_ms: int) -> Record:
    plain = {printable(name): printable(one) if isinstance(one, str) else one for name, one in act.detail.items()}
    detail = msgspec.json.encode(plain, order="sorted").decode()
    target = printable(act.target)
    if len(detail.encode()) > DETAIL_BYTES_MAX or len(target) > TARGET_MAX:
        raise ValueError(f"an audit record's detail has at most {DETAIL_BYTES_MAX} bytes, its target {TARGET_MAX}")
    return Record(
        seq=seq,
        at_ms=now_ms,
        actor=printable(act.actor),
        action=printable(act.action),
        tenant=act.tenant,
        namespace=act.namespace,
        target=target,
        result=printable(act.result),
        detail=detail,
        previous=previous,
        hash=b"",
    )
