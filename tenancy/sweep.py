"""After the pointer, the bytes: what the sweep deletes, and the rows that go once the bytes are gone.

Also the other ways in which entries end by themselves: expiry, and loss of a staging that died.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, delete, exists, or_, select

from tenancy import quota
from tenancy.model import Node, Scope
from tenancy.processes import PROCESS_LEASE_MS, alive
from tenancy.removal import remove_entries
from tenancy.schema import UNSETTLED, chunk, entry, owned, placement, tombstone
from tenancy.timekeeping import FURTHEST_MS


@dataclass(frozen=True, slots=True)
class DoomedPlacement:
    """Bytes that must leave a tier."""

    blob_id: bytes
    tier: str
    object_name: str


def expire(connection: Connection, scope: Scope, now_ms: int, limit: int) -> tuple[int, list[bytes]]:
    """Remove up to `limit` expired entries. Returns their number and the blobs that nothing needs any more."""
    quota.lock(connection, scope)
    rows = connection.execute(
        select(entry.c.format_id, entry.c.entry_key)
        .where(
            *owned(entry, scope),
            entry.c.expires_ms <= now_ms,
        )
        .order_by(entry.c.expires_ms)
        .limit(limit)
    ).all()
    names = [(row.format_id, row.entry_key) for row in rows]
    return len(names), remove_entries(connection, scope, names, "expired", now_ms)


def delete_keys(
    connection: Connection, scope: Scope, format_id: int, entry_keys: Sequence[bytes], now_ms: int
) -> tuple[int, list[bytes]]:
    """Remove the entries of these keys, all or nothing. Returns how many there were, and their unneeded blobs."""
    quota.lock(connection, scope)
    found = connection.scalars(
        select(entry.c.entry_key).where(
            *owned(entry, scope),
            entry.c.format_id == format_id,
            entry.c.entry_key.in_(entry_keys),
        )
    ).all()
    names = [(format_id, key) for key in found]
    return len(names), remove_entries(connection, scope, names, "deleted", now_ms)


def doomed(
    connection: Connection, scope: Scope, node: Node, tier: str, now_ms: int, limit: int
) -> list[DoomedPlacement]:
    """Placements in a tier whose bytes this node may delete now; a write in flight has had its time."""
    rows = connection.execute(
        select(placement.c.blob_id, placement.c.tier, placement.c.object)
        .where(
            *owned(placement, scope),
            placement.c.tier == tier,
            placement.c.state == "doomed",
            UNSETTLED,
            or_(placement.c.tier == "s3", placement.c.node == node.node),
            or_(placement.c.not_before_ms <= now_ms, placement.c.not_before_ms > now_ms + FURTHEST_MS),
        )
        .limit(limit)
    )
    return [DoomedPlacement(row.blob_id, row.tier, row.object) for row in rows]


def purge(connection: Connection, scope: Scope, node: Node, gone: Sequence[DoomedPlacement], limit: int) -> int:
    """Drop placements whose bytes are gone, then every dead chunk that has none left; the number of chunks.

    Dropping the chunk's row destroys the only copy of its salt: what bytes may be found again stay closed for good.
    """
    quota.lock(connection, scope)
    for tier in {one.tier for one in gone}:
        dropped = connection.execute(
            delete(placement)
            .where(
                *owned(placement, scope),
                placement.c.tier == tier,
                placement.c.state == "doomed",
                or_(placement.c.tier == "s3", placement.c.node == node.node),
                placement.c.blob_id.in_([one.blob_id for one in gone if one.tier == tier]),
            )
            .returning(placement.c.length)
        ).all()
        if tier == "s3":
            quota.apply(connection, scope, quota.Change(s3_bytes=-sum(row.length for row in dropped)))
    return _purge_chunks(connection, scope, limit)


def _purge_chunks(connection: Connection, scope: Scope, limit: int) -> int:
    placed = exists(
        select(1).where(
            *owned(placement, scope),
            placement.c.blob_id == chunk.c.blob_id,
        )
    )
    dead = connection.scalars(
        select(chunk.c.blob_id)
        .where(
            *owned(chunk, scope),
            chunk.c.state == "deleting",
            ~placed,
        )
        .limit(limit)
    ).all()
    if not dead:
        return 0
    rows = connection.execute(
        delete(chunk)
        .where(
            *owned(chunk, scope),
            chunk.c.blob_id.in_(dead),
        )
        .returning(chunk.c.sealed_length)
    ).all()
    quota.apply(connection, scope, quota.Change(-sum(row.sealed_length for row in rows), -len(rows)))
    return len(rows)


def forget_tombstones(connection: Connection, scope: Scope, before_ms: int) -> int:
    """Drop tombstones older than `before_ms`; their number."""
    result = connection.execute(
        delete(tombstone).where(
            *owned(tombstone, scope),
            tombstone.c.at_ms < before_ms,
        )
    )
    return result.rowcount


def lose_unplaced(connection: Connection, scope: Scope, node: Node, now_ms: int) -> tuple[int, list[bytes]]:
    """Chunks whose only home was the staging of a process that is not alive any more are lost; their entries end.

    `node`, which asks, is alive. Who else is, the same statement sees: a gateway that comes meanwhile loses nothing.
    """
    quota.lock(connection, scope)
    placed = exists(
        select(1).where(
            *owned(placement, scope),
            placement.c.blob_id == chunk.c.blob_id,
            placement.c.state == "ok",
        )
    )
    rows = connection.execute(
        select(entry.c.format_id, entry.c.entry_key).where(
            *owned(entry, scope),
            *owned(chunk, scope),
            chunk.c.blob_id == entry.c.blob_id,
            chunk.c.home_boot != node.boot,
            chunk.c.home_boot.not_in(alive(now_ms, PROCESS_LEASE_MS)),
            ~placed,
        )
    ).all()
    names = [(row.format_id, row.entry_key) for row in rows]
    return len(names), remove_entries(connection, scope, names, "lost", now_ms)
