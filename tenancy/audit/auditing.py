"""Reading the audit log: page by page, for whoever lists, exports or verifies it; and its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Row, insert, select, true

from tenancy.audit.chain import Record
from tenancy.audit.checkpoints import Checkpoint
from tenancy.schema import audit_checkpoint, audit_head, audit_record

PAGE_MAX: Final = 2000
"""Records in one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which records; what is None or empty does not matter."""

    tenant: UUID | None = None
    namespace: UUID | None = None
    actor: str = ""
    action: str = ""
    """The whole action, or its beginning up to a dot: ``token`` finds ``token.create``."""
    since_ms: int | None = None
    until_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """The end of the chain: number and hash of the last record."""

    seq: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class Page:
    """Records in rising order, and the head as it was no later than they were read."""

    head: Head
    records: list[Record]


_COLUMNS = (
    audit_record.c.seq,
    audit_record.c.at_ms,
    audit_record.c.actor,
    audit_record.c.action,
    audit_record.c.tenant_id,
    audit_record.c.namespace_id,
    audit_record.c.target,
    audit_record.c.result,
    audit_record.c.detail,
    audit_record.c.previous,
    audit_record.c.hash,
)


def newest(connection: Connection, wanted: Wanted, before: int | None, limit: int) -> list[Record]:
    """Up to `limit` records below number `before`, the newest first."""
    below = true() if before is None else audit_record.c.seq < before
    rows = connection.execute(
        select(*_COLUMNS).where(*_matching(wanted), below).order_by(audit_record.c.seq.desc()).limit(limit)
    )
    return [_record(row) for row in rows]


def page(connection: Connection, tenant: UUID | None, after: int, limit: int) -> Page:
    """Up to `limit` records above number `after`: all there are, or (`tenant`) one tenant's."""
    end = head(connection)
    own = true() if tenant is None else audit_record.c.tenant_id == tenant
    rows = connection.execute(
        select(*_COLUMNS).where(own, audit_record.c.seq > after).order_by(audit_record.c.seq).limit(limit)
    )
    return Page(end, [_record(row) for row in rows])


def head(connection: Connection) -> Head:
    """The head row."""
    row = connection.execute(select(audit_head.c.seq, audit_head.c.hash)).one()
    return Head(row.seq, bytes(row.hash))


def notes(connection: Connection, after: int, limit: int) -> list[tuple[int, str]]:
    """Up to `limit` checkpoints above record number `after`: number and note."""
    rows = connection.execute(
        select(audit_checkpoint.c.seq, audit_checkpoint.c.note)
        .where(audit_checkpoint.c.seq > after)
        .order_by(audit_checkpoint.c.seq)
        .limit(limit)
    )
    return [(row.seq, row.note) for row in rows]


def last_checkpoint(connection: Connection) -> tuple[int, int, str] | None:
    """The newest checkpoint in the database: record number, time, note."""
    row = connection.execute(
        select(audit_checkpoint.c.seq, audit_checkpoint.c.at_ms, audit_checkpoint.c.note)
        .order_by(audit_checkpoint.c.seq.desc())
        .limit(1)
    ).first()
    return None if row is None else (row.seq, row.at_ms, row.note)


def add_checkpoint(connection: Connection, one: Checkpoint) -> bool:
    """Keep a checkpoint; False when there is one of this record already."""
    connection.execute(select(audit_head.c.seq).with_for_update())  # two gateways may believe that they lead
    if connection.scalar(select(audit_checkpoint.c.seq).where(audit_checkpoint.c.seq == one.seq)) is not None:
        return False
    connection.execute(insert(audit_checkpoint), {"seq": one.seq, "at_ms": one.at_ms, "note": one.note})
    return True


def _matching(wanted: Wanted) -> Sequence[ColumnElement[bool]]:
    column = audit_record.c
    conditions: list[ColumnElement[bool]] = []
    if wanted.tenant is not None:
        conditions.append(column.tenant_id == wanted.tenant)
    if wanted.namespace is not None:
        conditions.append(column.namespace_id == wanted.namespace)
    if wanted.actor:
        conditions.append(column.actor == wanted.actor)
    if wanted.action:
        conditions.append(
            (column.action == wanted.action) | column.action.startswith(f"{wanted.action}.", autoescape=True)
        )
    if wanted.since_ms is not None:
        conditions.append(column.at_ms >= wanted.since_ms)
    if wanted.until_ms is not None:
        conditions.append(column.at_ms < wanted.until_ms)
    return conditions


def _record(row: Row[*tuple[Any, ...]]) -> Record:
    return Record(
        seq=row.seq,
        at_ms=row.at_ms,
        actor=row.actor,
        action=row.action,
        tenant=row.tenant_id,
        namespace=row.namespace_id,
        target=row.target,
        result=row.result,
        detail=row.detail,
        previous=bytes(row.previous),
        hash=bytes(row.hash),
    )
