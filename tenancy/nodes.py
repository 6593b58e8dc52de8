"""Forgetting a node that never returns: rows of its disk go, and with them what only that node had.

Each piece is a transaction that excludes the start of a gateway: a node that comes back meanwhile keeps the rest, and
whatever it still finds on its disk without a row is an orphan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, delete, exists, select

from tenancy import quota
from tenancy.errors import RegistryRefused
from tenancy.model import Node, Scope
from tenancy.processes import PROCESS_LEASE_MS, live_boots, serialise
from tenancy.removal import remove_entries
from tenancy.schema import chunk, entry, gateway_process, owned, placement
from tenancy.sweep import lose_unplaced, purge


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What one piece of work did."""

    placements: int
    """Rows of the node's disk that are gone; none: the namespace has no more of them."""
    entries: int
    """Entries that ended, as nobody else has their bytes."""
    chunks: int
    """Chunks whose rows are gone and whose quota is given back."""
    unneeded: tuple[bytes, ...]
    """Blobs that lost their last entry."""


def forget_placements(connection: Connection, scope: Scope, gone: str, by: Node, now_ms: int, limit: int) -> Forgotten:
    """Give up to `limit` NVMe placements of node `gone` in one namespace; in a call that finds none, its staging.

    Raises `RegistryRefused` when the node is alive, or is the one that asks.
    """
    serialise(connection)
    check_gone(connection, gone, by, now_ms)
    quota.lock(connection, scope)
    blob_ids = connection.scalars(
        select(placement.c.blob_id)
        .where(*owned(placement, scope), placement.c.tier == "nvme", placement.c.node == gone)
        .limit(limit)
    ).all()
    if blob_ids:
        connection.execute(
            delete(placement).where(
                *owned(placement, scope),
                placement.c.tier == "nvme",
                placement.c.node == gone,
                placement.c.blob_id.in_(blob_ids),
            )
        )
        live = sorted({*live_boots(connection, now_ms, PROCESS_LEASE_MS), by.boot})
        entries, unneeded = _end_unreachable(connection, scope, blob_ids, live, now_ms)
    else:
        entries, unneeded = lose_unplaced(connection, scope, by, now_ms)
    return Forgotten(len(blob_ids), entries, purge(connection, scope, by, [], limit), tuple(unneeded))


def forget_process(connection: Connection, gone: str, by: Node, now_ms: int) -> bool:
    """Drop the last that is remembered of a node; whether there was anything. Raises as `forget_placements`."""
    serialise(connection)
    check_gone(connection, gone, by, now_ms)
    return connection.execute(delete(gateway_process).where(gateway_process.c.node == gone)).rowcount > 0


def check_gone(connection: Connection, gone: str, by: Node, now_ms: int) -> None:
    """Raises `RegistryRefused` when node `gone` is the one that asks, or was heard within the lease."""
    if gone == by.node:
        raise RegistryRefused(
            f"node {gone!r} is this gateway's own: ask another gateway once this one is gone for good"
        )
    alive = connection.execute(
        select(gateway_process.c.boot_id, gateway_process.c.heartbeat_ms).where(
            gateway_process.c.node == gone,
            gateway_process.c.left_ms.is_(None),
            gateway_process.c.heartbeat_ms > now_ms - PROCESS_LEASE_MS,
        )
    ).first()
    if alive is not None:
        raise RegistryRefused(
            f"node {gone!r} is alive (boot {alive.boot_id}, last heard {(now_ms - alive.heartbeat_ms) / 1000:.1f} s "
            f"ago): stop its gateway first; after a crash it counts as gone {PROCESS_LEASE_MS / 1000:g} s later"
        )


def _end_unreachable(
    connection: Connection, scope: Scope, blob_ids: Sequence[bytes], live: Sequence[str], now_ms: int
) -> tuple[int, list[bytes]]:
    """End the entries of those chunks that are in no tier for good and in no living process's staging."""
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
            entry.c.blob_id.in_(blob_ids),
            chunk.c.blob_id == entry.c.blob_id,
            chunk.c.home_boot.not_in(live),
            ~placed,
        )
    ).all()
    names = [(row.format_id, row.entry_key) for row in rows]
    return len(names), remove_entries(connection, scope, names, "lost", now_ms)
