"""Making room on a node's NVMe: which chunks are dear least, and giving them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, exists, func, or_, select, update

from tenancy import quota
from tenancy.model import Node, Scope
from tenancy.removal import remove_entries
from tenancy.schema import UNSETTLED, chunk, entry, owned, placement


@dataclass(frozen=True, slots=True)
class Candidate:
    """An NVMe placement that could make room, with how dear its chunk is."""

    scope: Scope
    blob_id: bytes
    object_name: str
    length: int
    last_hit_ms: int
    depth: int


def eviction_candidates(connection: Connection, scope: Scope, node: Node, now_ms: int, limit: int) -> list[Candidate]:
    """The least valuable chunks on this node's NVMe: longest unused first, and of those the deepest in its chain.

    A chunk's value is that of its most recently used entry; with equal use a chain goes from its tail. A chunk with an
    entry under a hold is none of them.
    """
    last_hit = func.max(entry.c.last_hit_ms).label("last_hit")
    depth = func.max(entry.c.depth).label("depth")
    rows = connection.execute(
        select(placement.c.blob_id, placement.c.object, placement.c.length, last_hit, depth)
        .where(
            *owned(placement, scope),
            placement.c.tier == "nvme",
            placement.c.node == node.node,
            placement.c.state == "ok",
            *owned(entry, scope),
            entry.c.blob_id == placement.c.blob_id,
        )
        .group_by(placement.c.blob_id, placement.c.object, placement.c.length)
        .having(func.max(entry.c.hold_until_ms) <= now_ms)
        .order_by(last_hit, depth.desc())
        .limit(limit)
    )
    return [Candidate(scope, row.blob_id, row.object, row.length, row.last_hit, row.depth) for row in rows]


def on_nvme(connection: Connection, scope: Scope, node: Node) -> int:
    """Bytes of a namespace on this node's NVMe that nobody has given up."""
    length = connection.scalar(
        select(func.sum(placement.c.length)).where(
            *owned(placement, scope),
            placement.c.tier == "nvme",
            placement.c.state == "ok",
            placement.c.node == node.node,
        )
    )
    return int(length or 0)


def leaving_nvme(connection: Connection, scope: Scope, node: Node) -> int:
    """Bytes on this node's NVMe that were given up already and wait for the sweep."""
    length = connection.scalar(
        select(func.sum(placement.c.length)).where(
            *owned(placement, scope),
            placement.c.tier == "nvme",
            placement.c.state == "doomed",
            UNSETTLED,
            placement.c.node == node.node,
        )
    )
    return int(length or 0)


def evict_nvme(connection: Connection, scope: Scope, node: Node, blob_ids: Sequence[bytes], now_ms: int) -> list[bytes]:
    """Give up NVMe placements. Entries whose bytes are in no other tier go with them; their unneeded blobs."""
    quota.lock(connection, scope)
    connection.execute(
        update(placement)
        .where(
            *owned(placement, scope),
            placement.c.blob_id.in_(blob_ids),
            placement.c.tier == "nvme",
            placement.c.node == node.node,
            placement.c.state == "ok",
        )
        .values(state="doomed")
    )
    # A write to S3 that is still due needs its source: this process's staging, else the very bytes that are given up.
    staged = exists(
        select(1).where(
            *owned(chunk, scope),
            chunk.c.blob_id == entry.c.blob_id,
            chunk.c.home_node == node.node,
            chunk.c.home_boot == node.boot,
        )
    )
    copied = _placed(scope, placement.c.state == "ok")
    on_its_way = _placed(scope, placement.c.tier == "s3", placement.c.state.in_(("due", "writing")))
    rows = connection.execute(
        select(entry.c.format_id, entry.c.entry_key).where(
            *owned(entry, scope),
            entry.c.blob_id.in_(blob_ids),
            ~or_(copied, and_(on_its_way, staged)),
        )
    ).all()
    return remove_entries(connection, scope, [(row.format_id, row.entry_key) for row in rows], "evicted", now_ms)


def _placed(scope: Scope, *conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    return exists(
        select(1).where(
            *owned(placement, scope),
            placement.c.blob_id == entry.c.blob_id,
            *conditions,
        )
    )
