"""Placements that proved wrong, what becomes of their chunks, and the copies that take their place."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, and_, exists, insert, select, update

from tenancy import quota
from tenancy.model import Node, Scope
from tenancy.removal import remove_entries
from tenancy.schema import chunk, entry, owned, placement


def quarantine(connection: Connection, scope: Scope, blob_id: bytes, tier: str, node: str, now_ms: int) -> None:
    """A placement's bytes proved wrong: nobody reads it again. The chunk lives on if another tier has it."""
    quota.lock(connection, scope)
    connection.execute(
        update(placement)
        .where(
            *owned(placement, scope),
            placement.c.blob_id == blob_id,
            placement.c.tier == tier,
            placement.c.node == node,
            placement.c.state == "ok",
        )
        .values(state="quarantined", updated_ms=now_ms)
    )


def abandon_unreadable(connection: Connection, scope: Scope, blob_ids: Sequence[bytes], now_ms: int) -> list[bytes]:
    """Remove the entries of chunks none of whose placements is usable or can still become so; unneeded blobs."""
    quota.lock(connection, scope)
    hope = exists(
        select(1).where(
            *owned(placement, scope),
            placement.c.blob_id == entry.c.blob_id,
            placement.c.state.in_(("ok", "due", "writing")),
        )
    )
    rows = connection.execute(
        select(entry.c.format_id, entry.c.entry_key).where(
            *owned(entry, scope),
            entry.c.blob_id.in_(blob_ids),
            ~hope,
        )
    ).all()
    names = [(row.format_id, row.entry_key) for row in rows]
    return remove_entries(connection, scope, names, "lost", now_ms)


def promote(connection: Connection, scope: Scope, node: Node, blob_ids: Sequence[bytes], now_ms: int) -> set[bytes]:
    """Make NVMe placements on this node due for live chunks that were read from below; those that were made due.

    A quarantined placement is due again: the good bytes take the place of those that proved wrong.
    """
    quota.lock(connection, scope)
    rows = connection.execute(
        select(chunk.c.blob_id, chunk.c.sealed_length, placement.c.object)
        .join(
            placement,
            and_(
                placement.c.tenant_id == chunk.c.tenant_id,
                placement.c.namespace_id == chunk.c.namespace_id,
                placement.c.blob_id == chunk.c.blob_id,
                placement.c.tier == "s3",
                placement.c.state == "ok",
            ),
        )
        .where(*owned(chunk, scope), chunk.c.blob_id.in_(blob_ids), chunk.c.state == "live")
    ).all()
    if not rows:
        return set()
    here = _nvme_states(connection, scope, node, [row.blob_id for row in rows])
    renewed = [row.blob_id for row in rows if here.get(row.blob_id) == "quarantined"]
    added = [row for row in rows if row.blob_id not in here]
    if renewed:
        connection.execute(
            update(placement)
            .where(*_on_nvme(scope, node, renewed))
            .values(state="due", attempts=0, not_before_ms=now_ms, updated_ms=now_ms)
        )
    if added:
        connection.execute(
            insert(placement),
            [
                {
                    "tenant_id": scope.tenant,
                    "namespace_id": scope.namespace,
                    "blob_id": row.blob_id,
                    "tier": "nvme",
                    "node": node.node,
                    "object": row.object,
                    "offset": 0,
                    "length": row.sealed_length,
                    "state": "due",
                    "owner": None,
                    "lease_ms": None,
                    "not_before_ms": now_ms,
                    "attempts": 0,
                    "updated_ms": now_ms,
                }
                for row in added
            ],
        )
    return {row.blob_id for row in added}.union(renewed)


def _nvme_states(connection: Connection, scope: Scope, node: Node, blob_ids: Sequence[bytes]) -> dict[bytes, str]:
    rows = connection.execute(
        select(placement.c.blob_id, placement.c.state).where(*_on_nvme(scope, node, blob_ids))
    ).all()
    return {row.blob_id: row.state for row in rows}


def _on_nvme(scope: Scope, node: Node, blob_ids: Sequence[bytes]) -> tuple[ColumnElement[bool], ...]:
    return (
        *owned(placement, scope),
        placement.c.blob_id.in_(blob_ids),
        placement.c.tier == "nvme",
        placement.c.node == node.node,
    )
