"""Placements as the outbox of write-back: due → writing (owner, lease) → ok; doomed ones belong to the sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, bindparam, delete, exists, func, insert, or_, select, update

from tenancy import quota
from tenancy.model import Node, Scope
from tenancy.removal import remove_entries
from tenancy.schema import chunk, entry, owned, placement


@dataclass(frozen=True, slots=True)
class DueWrite:
    """A blob that this process has taken on to write into a tier, until its lease ends."""

    scope: Scope
    blob_id: bytes
    object_name: str
    tier: str
    node: str
    length: int
    attempts: int
    sources: frozenset[str]
    """Tiers from which this node can read the blob, besides its staging."""


def claim_due(
    connection: Connection, scope: Scope, node: Node, lease_until_ms: int, now_ms: int, limit: int
) -> list[DueWrite]:
    """Take on writes that are due, or whose owner let its lease run out."""
    mine = or_(placement.c.tier == "s3", placement.c.node == node.node)
    free = or_(
        and_(placement.c.state == "due", placement.c.not_before_ms <= now_ms),
        and_(placement.c.state == "writing", placement.c.lease_ms <= now_ms),
    )
    names = connection.execute(
        select(placement.c.blob_id, placement.c.tier, placement.c.node)
        .where(
            *owned(placement, scope),
            placement.c.state.in_(("due", "writing")),
            mine,
            free,
        )
        .order_by(placement.c.not_before_ms)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
    if not names:
        return []
    connection.execute(
        update(placement)
        .where(*_this_placement(scope))
        .values(state="writing", owner=node.boot, lease_ms=lease_until_ms, updated_ms=now_ms),
        [{"blob": row.blob_id, "in_tier": row.tier, "on_node": row.node} for row in names],
    )
    return _describe(connection, scope, node, [(row.blob_id, row.tier, row.node) for row in names])


def _this_placement(scope: Scope) -> tuple[ColumnElement[bool], ...]:
    return (
        *owned(placement, scope),
        placement.c.blob_id == bindparam("blob"),
        placement.c.tier == bindparam("in_tier"),
        placement.c.node == bindparam("on_node"),
    )


def _describe(
    connection: Connection, scope: Scope, node: Node, claimed: Sequence[tuple[bytes, str, str]]
) -> list[DueWrite]:
    rows = connection.execute(
        select(
            placement.c.blob_id,
            placement.c.tier,
            placement.c.node,
            placement.c.object,
            placement.c.length,
            placement.c.state,
            placement.c.attempts,
        ).where(
            *owned(placement, scope),
            placement.c.blob_id.in_([blob for blob, _, _ in claimed]),
        )
    ).all()
    readable: dict[bytes, set[str]] = {}
    for row in rows:
        if row.state == "ok" and (row.tier == "s3" or row.node == node.node):
            readable.setdefault(row.blob_id, set()).add(row.tier)
    taken = set(claimed)
    return [
        DueWrite(
            scope,
            row.blob_id,
            row.object,
            row.tier,
            row.node,
            row.length,
            row.attempts,
            frozenset(readable.get(row.blob_id, ())),
        )
        for row in rows
        if (row.blob_id, row.tier, row.node) in taken
    ]


def finish_writes(
    connection: Connection, scope: Scope, node: Node, done: Sequence[DueWrite], now_ms: int
) -> set[bytes]:
    """Mark written blobs ``ok``. Returns those that are no longer wanted: they were doomed meanwhile."""
    quota.lock(connection, scope)
    unwanted: set[bytes] = set()
    for write in done:
        result = connection.execute(
            update(placement)
            .where(*_this_placement(scope), placement.c.state == "writing", placement.c.owner == node.boot)
            .values(state="ok", owner=None, lease_ms=None, updated_ms=now_ms),
            {"blob": write.blob_id, "in_tier": write.tier, "on_node": write.node},
        )
        if result.rowcount == 0:
            unwanted.add(write.blob_id)
    return unwanted


def postpone_writes(
    connection: Connection, scope: Scope, node: Node, failed: Sequence[DueWrite], not_before_ms: int, now_ms: int
) -> None:
    """Put writes that did not succeed back into the outbox."""
    if not failed:
        return
    connection.execute(
        update(placement)
        .where(*_this_placement(scope), placement.c.state == "writing", placement.c.owner == node.boot)
        .values(
            state="due",
            owner=None,
            lease_ms=None,
            attempts=placement.c.attempts + 1,
            not_before_ms=not_before_ms,
            updated_ms=now_ms,
        ),
        [{"blob": write.blob_id, "in_tier": write.tier, "on_node": write.node} for write in failed],
    )


def drop_writes(connection: Connection, scope: Scope, lost: Sequence[DueWrite], now_ms: int) -> list[bytes]:
    """Give up writes whose source is gone; entries that nothing else holds go with them. Returns unneeded blobs."""
    if not lost:
        return []
    quota.lock(connection, scope)
    for write in lost:
        connection.execute(
            delete(placement).where(*_this_placement(scope), placement.c.state == "writing"),
            {"blob": write.blob_id, "in_tier": write.tier, "on_node": write.node},
        )
    freed = sum(write.length for write in lost if write.tier == "s3")
    quota.apply(connection, scope, quota.Change(s3_bytes=-freed))
    dead: list[bytes] = []
    for write in lost:
        dead += abandon_unreadable(connection, scope, write.blob_id, now_ms)
    return dead


def outstanding(connection: Connection, scope: Scope, blob_ids: Sequence[bytes]) -> set[bytes]:
    """Those blobs that still have a placement to be written."""
    rows = connection.scalars(
        select(placement.c.blob_id).where(
            *owned(placement, scope),
            placement.c.blob_id.in_(blob_ids),
            placement.c.state.in_(("due", "writing")),
        )
    )
    return set(rows)


def outbox_length(connection: Connection, scope: Scope) -> dict[str, tuple[int, int, int]]:
    """Per tier: placements to be written, their bytes, and since when (Unix ms) the oldest has waited."""
    rows = connection.execute(
        select(placement.c.tier, func.count(), func.sum(placement.c.length), func.min(placement.c.updated_ms))
        .where(
            *owned(placement, scope),
            placement.c.state.in_(("due", "writing")),
        )
        .group_by(placement.c.tier)
    )
    return {tier: (count, int(length), oldest) for tier, count, length, oldest in rows}


def promote(connection: Connection, scope: Scope, node: Node, blob_ids: Sequence[bytes], now_ms: int) -> set[bytes]:
    """Make NVMe placements on this node due for live chunks that were read from below; those that were added."""
    quota.lock(connection, scope)
    here = exists(
        select(1).where(
            *owned(placement, scope),
            placement.c.blob_id == chunk.c.blob_id,
            placement.c.tier == "nvme",
            placement.c.node == node.node,
        )
    )
    source = placement.alias("source")
    rows = connection.execute(
        select(chunk.c.blob_id, chunk.c.sealed_length, source.c.object)
        .join(
            source,
            and_(
                source.c.tenant_id == chunk.c.tenant_id,
                source.c.namespace_id == chunk.c.namespace_id,
                source.c.blob_id == chunk.c.blob_id,
                source.c.tier == "s3",
                source.c.state == "ok",
            ),
        )
        .where(
            *owned(chunk, scope),
            source.c.tenant_id == scope.tenant,
            chunk.c.blob_id.in_(blob_ids),
            chunk.c.state == "live",
            ~here,
        )
    ).all()
    if rows:
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
                for row in rows
            ],
        )
    return {row.blob_id for row in rows}


def known_objects(connection: Connection, scope: Scope, tier: str, node: str, blob_ids: Sequence[bytes]) -> set[bytes]:
    """Those blobs that have any placement in this tier; a blob in a listing that has none is an orphan."""
    rows = connection.scalars(
        select(placement.c.blob_id).where(
            *owned(placement, scope),
            placement.c.tier == tier,
            placement.c.node == node,
            placement.c.blob_id.in_(blob_ids),
        )
    )
    return set(rows)


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


def abandon_unreadable(connection: Connection, scope: Scope, blob_id: bytes, now_ms: int) -> list[bytes]:
    """Remove the entries of a chunk none of whose placements is usable or can still become so."""
    quota.lock(connection, scope)
    hope = exists(
        select(1).where(
            *owned(placement, scope),
            placement.c.blob_id == blob_id,
            placement.c.state.in_(("ok", "due", "writing")),
        )
    )
    rows = connection.execute(
        select(entry.c.format_id, entry.c.entry_key).where(
            *owned(entry, scope),
            entry.c.blob_id == blob_id,
            ~hope,
        )
    ).all()
    names = [(row.format_id, row.entry_key) for row in rows]
    return remove_entries(connection, scope, names, "lost", now_ms)
