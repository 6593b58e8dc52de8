"""Versions of tenants: how gateways that answer from memory hear that something ended (law 5).

A transaction that may end something raises its tenant's version. A gateway that remembers anything of a tenant has a
row that says which version it has seen: nothing in its memory is older. Statements here are transactions of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, and_, case, delete, exists, func, literal, select
from sqlalchemy.dialects import postgresql

from tenancy.schema import VERSION_MAX, gateway_process, tenant, tenant_version, version_seen

_AHEAD_MAX: Final = 2**62
"""Versions go round: one is ahead of another by less than this."""


@dataclass(frozen=True, slots=True)
class Version:
    """What the catalog says of one tenant, in one moment."""

    current: int
    seen: int | None
    """By the gateway that asks; None: it has no row."""


@dataclass(frozen=True, slots=True)
class Look:
    """What the catalog says of several tenants, in one moment."""

    versions: Mapping[UUID, Version]
    everyone_raises: bool
    """Else a gateway of an earlier release lives, whose deletions raise no version."""


def behind(one: int, other: int) -> bool:
    """Whether version `one` is older than `other`."""
    return 0 < (other - one) % (VERSION_MAX + 1) < _AHEAD_MAX


def raise_version(connection: Connection, tenant_id: UUID) -> int | None:
    """Make a tenant's version one higher, at the end of a transaction; the new one. None: there is no such tenant."""
    first = select(tenant.c.tenant_id, literal(1)).where(tenant.c.tenant_id == tenant_id)
    higher = case((tenant_version.c.version < VERSION_MAX, tenant_version.c.version + 1), else_=0)
    statement = (
        postgresql.insert(tenant_version)
        .from_select(["tenant_id", "version"], first)
        .on_conflict_do_update(index_elements=["tenant_id"], set_={"version": higher})
        .returning(tenant_version.c.version)
    )
    raised = connection.execute(statement).first()
    return None if raised is None else int(raised.version)


def look(connection: Connection, boot: str, tenants: Collection[UUID], heard_since_ms: int) -> Look:
    """Versions of those of `tenants` that there are, and what gateway `boot` has seen of them: one statement."""
    silent = exists(
        select(1).where(
            gateway_process.c.coherent.is_(False),
            gateway_process.c.left_ms.is_(None),
            gateway_process.c.heartbeat_ms > heard_since_ms,
        )
    )
    rows = connection.execute(
        select(
            tenant.c.tenant_id,
            func.coalesce(tenant_version.c.version, 0).label("current"),
            version_seen.c.version.label("seen"),
            silent.label("silent"),
        )
        .outerjoin(tenant_version, tenant_version.c.tenant_id == tenant.c.tenant_id)
        .outerjoin(version_seen, and_(version_seen.c.tenant_id == tenant.c.tenant_id, version_seen.c.boot_id == boot))
        .where(tenant.c.tenant_id.in_(tenants))
    ).all()
    versions = {row.tenant_id: Version(row.current, row.seen) for row in rows}
    return Look(versions, not any(row.silent for row in rows))


def confirm(connection: Connection, boot: str, seen: Mapping[UUID, int]) -> None:
    """Gateway `boot` remembers nothing of these tenants that is older than their versions here.

    A row never goes back: a statement that the network kept for long must not undo what was said since.
    """
    statement = postgresql.insert(version_seen)
    ahead = (statement.excluded.version - version_seen.c.version).op("&")(literal(VERSION_MAX))
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["tenant_id", "boot_id"],
            set_={"version": statement.excluded.version},
            where=ahead < _AHEAD_MAX,
        ),
        # In one order, so that no two gateways' statements wait for each other.
        [{"tenant_id": one, "boot_id": boot, "version": seen[one]} for one in sorted(seen)],
    )


def readers(connection: Connection, tenant_id: UUID) -> dict[str, int]:
    """Which gateways may remember something of a tenant, and which version each has seen."""
    rows = connection.execute(
        select(version_seen.c.boot_id, version_seen.c.version).where(version_seen.c.tenant_id == tenant_id)
    )
    return {row.boot_id: row.version for row in rows}


def drop_reader(connection: Connection, tenant_id: UUID, boot: str, seen: int) -> None:
    """A gateway's lease is over that had still seen `seen` only: nobody need wait for it again."""
    connection.execute(
        delete(version_seen).where(
            version_seen.c.tenant_id == tenant_id, version_seen.c.boot_id == boot, version_seen.c.version == seen
        )
    )


def leave(connection: Connection, boot: str) -> None:
    """Gateway `boot` answers no more."""
    connection.execute(delete(version_seen).where(version_seen.c.boot_id == boot))


def forget_gone(connection: Connection) -> None:
    """Drop what gateways left that are not even remembered: their nodes have begun anew, or were forgotten."""
    connection.execute(delete(version_seen).where(version_seen.c.boot_id.not_in(select(gateway_process.c.boot_id))))
