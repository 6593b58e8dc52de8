"""After the pointer, the bytes: what the sweep deletes, and the rows that go once the bytes are gone.

Also the other ways in which entries end by themselves: expiry, and loss of a staging that died.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Select,
    bindparam,
    delete,
    exists,
    or_,
    select,
)

from tenancy import quota
from tenancy.model import Node, Scope
from tenancy.prepared import KeyStatement, Parameters, Statement, bound, owner
from tenancy.processes import PROCESS_LEASE_MS, alive
from tenancy.removal import doom_unused, end_entries, remove_entries
from tenancy.schema import UNSETTLED, chunk, entry, owned, placement, states, tombstone
from tenancy.timekeeping import FURTHEST_MS


@dataclass(frozen=True, slots=True)
class DoomedPlacement:
    """Bytes that must leave a tier."""

    blob_id: bytes
    tier: str
    object_name: str


def _here() -> tuple[ColumnElement[bool], ...]:
    """Doomed placements in a tier that this node may clear."""
    return (
        *bound(placement),
        placement.c.tier == bindparam("in_tier"),
        placement.c.state == states.DOOMED,
        or_(placement.c.tier == states.S3, placement.c.node == bindparam("on_node")),
    )


def _doomed() -> Select[Any]:
    not_before = placement.c.not_before_ms
    return (
        select(placement.c.blob_id, placement.c.object)
        .where(*_here(), UNSETTLED, or_(not_before <= bindparam("now"), not_before > bindparam("furthest")))
        .limit(bindparam("most", type_=BigInteger))
    )


def _dropped(blob_ids: Parameters) -> Statement:
    return delete(placement).where(*_here(), placement.c.blob_id.in_(blob_ids)).returning(placement.c.length)


def _bare() -> Select[Any]:
    placed = exists(select(1).where(*bound(placement), placement.c.blob_id == chunk.c.blob_id))
    return (
        select(chunk.c.blob_id)
        .where(*bound(chunk), chunk.c.state == states.DELETING, ~placed)
        .limit(bindparam("most", type_=BigInteger))
    )


def _forgotten(blob_ids: Parameters) -> Statement:
    return delete(chunk).where(*bound(chunk), chunk.c.blob_id.in_(blob_ids)).returning(chunk.c.sealed_length)


DOOMED: Final = KeyStatement(_doomed)
DROPPED: Final = KeyStatement(_dropped)
BARE: Final = KeyStatement(_bare)
FORGOTTEN: Final = KeyStatement(_forgotten)


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
    blob_ids = end_entries(connection, scope, format_id, entry_keys, "deleted", now_ms)
    return len(blob_ids), doom_unused(connection, scope, sorted(set(blob_ids)))


def doomed(
    connection: Connection, scope: Scope, node: Node, tier: str, now_ms: int, limit: int
) -> list[DoomedPlacement]:
    """Placements in a tier whose bytes this node may delete now; a write in flight has had its time."""
    values = {
        **owner(scope),
        "in_tier": tier,
        "on_node": node.node,
        "now": now_ms,
        "furthest": now_ms + FURTHEST_MS,
        "most": limit,
    }
    return [DoomedPlacement(blob_id, tier, name) for blob_id, name in DOOMED.rows(connection, values)]


def purge(connection: Connection, scope: Scope, node: Node, gone: Sequence[DoomedPlacement], limit: int) -> int:
    """Drop placements whose bytes are gone, then every dead chunk that has none left; the number of chunks.

    Dropping the chunk's row destroys the only copy of its salt: what bytes may be found again stay closed for good.
    """
    quota.lock(connection, scope)
    for tier in {one.tier for one in gone}:
        at = {**owner(scope), "in_tier": tier, "on_node": node.node}
        dropped = DROPPED.rows(connection, at, [one.blob_id for one in gone if one.tier == tier])
        if tier == "s3":
            quota.apply(connection, scope, quota.Change(s3_bytes=-sum(length for (length,) in dropped)))
    return _purge_chunks(connection, scope, limit)


def _purge_chunks(connection: Connection, scope: Scope, limit: int) -> int:
    dead = [blob_id for (blob_id,) in BARE.rows(connection, {**owner(scope), "most": limit})]
    if not dead:
        return 0
    lengths = [length for (length,) in FORGOTTEN.rows(connection, owner(scope), dead)]
    quota.apply(connection, scope, quota.Change(-sum(lengths), -len(lengths)))
    return len(lengths)


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
