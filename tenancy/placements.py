"""Placements as the outbox of write-back: due → writing (owner, lease) → ok; doomed ones belong to the sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from sqlalchemy import ColumnElement, Connection, and_, bindparam, delete, exists, func, or_, select, update

from tenancy import quota
from tenancy.model import Node, Scope
from tenancy.repair import abandon_unreadable
from tenancy.schema import UNSETTLED, chunk, owned, placement


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
    connection: Connection,
    scope: Scope,
    node: Node,
    tier: str,
    lease_until_ms: int,
    now_ms: int,
    limit: int,
    bytes_max: int | None = None,
) -> list[DueWrite]:
    """Take on writes into a tier that are due, or whose owner let its lease run out, or was this disk's before us.

    Only of blobs that this process can read: from its staging, this node's NVMe, or S3. At most `limit`, and of
    `bytes_max` bytes in all, but one whatever its size. Since when they are due is not changed by trying.
    """
    mine = or_(placement.c.tier == "s3", placement.c.node == node.node)
    free = or_(
        and_(placement.c.state == "due", placement.c.not_before_ms <= now_ms),
        and_(placement.c.state == "writing", placement.c.lease_ms <= now_ms),
        # The folder is one process's at a time: whoever else began a write into it has ended.
        and_(placement.c.state == "writing", placement.c.tier == "nvme", placement.c.owner != node.boot),
    )
    names = connection.execute(
        select(placement.c.blob_id, placement.c.tier, placement.c.node, placement.c.length)
        .where(
            *owned(placement, scope),
            placement.c.tier == tier,
            placement.c.state.in_(("due", "writing")),
            UNSETTLED,
            mine,
            free,
            or_(_at_home(scope, node), _readable(scope, node)),
        )
        .order_by(placement.c.not_before_ms)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
    if not names:
        return []
    if bytes_max is not None:
        sums = accumulate(row.length for row in names)
        names = names[: max(1, sum(total <= bytes_max for total in sums))]
    connection.execute(
        update(placement)
        .where(*_this_placement(scope))
        .values(state="writing", owner=node.boot, lease_ms=lease_until_ms),
        [{"blob": row.blob_id, "in_tier": row.tier, "on_node": row.node} for row in names],
    )
    return _describe(connection, scope, node, [(row.blob_id, row.tier, row.node) for row in names])


def _at_home(scope: Scope, node: Node) -> ColumnElement[bool]:
    return exists(
        select(1).where(*owned(chunk, scope), chunk.c.blob_id == placement.c.blob_id, chunk.c.home_boot == node.boot)
    )


def _readable(scope: Scope, node: Node) -> ColumnElement[bool]:
    copy = placement.alias("copy")
    return exists(
        select(1).where(
            *owned(copy, scope),
            copy.c.blob_id == placement.c.blob_id,
            copy.c.state == "ok",
            or_(copy.c.tier == "s3", copy.c.node == node.node),
        )
    )


def _address(write: DueWrite) -> dict[str, object]:
    return {"blob": write.blob_id, "in_tier": write.tier, "on_node": write.node}


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
    found = {(row.blob_id, row.tier, row.node): row for row in rows}
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
        for row in map(found.__getitem__, claimed)
    ]


def finish_writes(
    connection: Connection, scope: Scope, node: Node, done: Sequence[DueWrite], now_ms: int
) -> set[bytes]:
    """Mark written blobs ``ok``. Returns those that are no longer wanted: they were doomed meanwhile."""
    if not done:
        return set()
    quota.lock(connection, scope)
    connection.execute(
        update(placement)
        .where(*_this_placement(scope), placement.c.state == "writing", placement.c.owner == node.boot)
        .values(state="ok", owner=None, lease_ms=None, updated_ms=now_ms),
        [_address(write) for write in done],
    )
    kept = connection.execute(
        select(placement.c.blob_id, placement.c.tier, placement.c.node).where(
            *owned(placement, scope),
            placement.c.blob_id.in_([write.blob_id for write in done]),
            placement.c.state == "ok",
        )
    ).all()
    there = {(row.blob_id, row.tier, row.node) for row in kept}
    return {write.blob_id for write in done if (write.blob_id, write.tier, write.node) not in there}


def postpone_writes(connection: Connection, scope: Scope, node: Node, failed: Sequence[tuple[DueWrite, int]]) -> None:
    """Put writes that did not succeed back into the outbox, each until its own time (Unix ms)."""
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
            not_before_ms=bindparam("again_ms"),
        ),
        [{**_address(write), "again_ms": again_ms} for write, again_ms in failed],
    )


def drop_writes(connection: Connection, scope: Scope, node: Node, lost: Sequence[DueWrite], now_ms: int) -> list[bytes]:
    """Give up writes whose source is gone; entries that nothing else holds go with them. Returns unneeded blobs."""
    if not lost:
        return []
    quota.lock(connection, scope)
    blob_ids = [write.blob_id for write in lost]
    dropped = [
        connection.execute(
            delete(placement)
            .where(
                *owned(placement, scope),
                placement.c.blob_id.in_([write.blob_id for write in lost if write.tier == tier]),
                placement.c.tier == tier,
                placement.c.node == tier_node,
                placement.c.state == "writing",
                placement.c.owner == node.boot,
            )
            .returning(placement.c.tier, placement.c.length)
        ).all()
        for tier, tier_node in {(write.tier, write.node) for write in lost}
    ]
    freed = sum(row.length for rows in dropped for row in rows if row.tier == "s3")
    quota.apply(connection, scope, quota.Change(s3_bytes=-freed))
    return abandon_unreadable(connection, scope, blob_ids, now_ms)


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
            UNSETTLED,
        )
        .group_by(placement.c.tier)
    )
    return {tier: (count, int(length), oldest) for tier, count, length, oldest in rows}


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
