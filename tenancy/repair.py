"""Placements that proved wrong, what becomes of their chunks, and the copies that take their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import ColumnElement, Connection, and_, exists, insert, or_, select, update

from tenancy import quota
from tenancy.model import Node, Scope
from tenancy.removal import remove_entries
from tenancy.schema import UNSETTLED, chunk, entry, owned, placement

REST_MS: Final = 60_000
"""A placement that proved wrong rests for so long, times the square of its tries, before it is written anew."""


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


def renew(connection: Connection, scope: Scope, node: Node, now_ms: int, limit: int) -> int:
    """Up to `limit` quarantined placements that this node can write anew from another tier are due again; how many.

    It is the same blob, so its name still means the same bytes. Each time it proves wrong again it rests for longer:
    nobody has looked whether the other copy is any better.
    """
    quota.lock(connection, scope)
    copy = placement.alias("copy")
    readable = or_(
        and_(placement.c.tier == "s3", copy.c.tier == "nvme", copy.c.node == node.node),
        and_(placement.c.tier == "nvme", placement.c.node == node.node, copy.c.tier == "s3"),
    )
    tries = placement.c.attempts + 1
    rows = connection.execute(
        select(placement.c.blob_id, placement.c.tier, placement.c.node)
        .where(
            *owned(placement, scope),
            placement.c.state == "quarantined",
            UNSETTLED,
            or_(placement.c.updated_ms + REST_MS * tries * tries <= now_ms, placement.c.updated_ms > now_ms),
            exists(
                select(1).where(
                    *owned(copy, scope), copy.c.blob_id == placement.c.blob_id, copy.c.state == "ok", readable
                )
            ),
        )
        .limit(limit)
    ).all()
    for tier, at in {(row.tier, row.node) for row in rows}:
        connection.execute(
            update(placement)
            .where(
                *owned(placement, scope),
                placement.c.tier == tier,
                placement.c.node == at,
                placement.c.blob_id.in_([row.blob_id for row in rows if (row.tier, row.node) == (tier, at)]),
                placement.c.state == "quarantined",
            )
            .values(state="due", attempts=tries, not_before_ms=now_ms, updated_ms=now_ms)
        )
    return len(rows)


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
