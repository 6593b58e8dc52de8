"""Removing entries: invisible at once; a chunk that no entry needs any more is on its way out.

The one mechanism behind delete, expiry, eviction and replacement. The namespace's quota row is locked by the caller.
The chunk's row stays, in state ``deleting`` and still charged, until `tenancy.sweep.purge` has seen its bytes go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, FromClause, and_, delete, exists, or_, select, update

from tenancy import quota
from tenancy.model import Scope
from tenancy.schema import chunk, entry, owned, placement, tombstone

EntryName = tuple[int, bytes]
"""Format id and entry key."""


def remove_entries(
    connection: Connection, scope: Scope, names: Sequence[EntryName], reason: str, now_ms: int
) -> list[bytes]:
    """Delete entries, leave tombstones, and doom the chunks that lost their last entry: their blob ids."""
    if not names:
        return []
    gone = connection.execute(
        delete(entry)
        .where(
            *owned(entry, scope),
            _named(entry, names),
        )
        .returning(entry.c.format_id, entry.c.entry_key, entry.c.blob_id)
    ).all()
    _leave_tombstones(connection, scope, [(row.format_id, row.entry_key) for row in gone], reason, now_ms)
    return doom_unused(connection, scope, sorted({row.blob_id for row in gone}))


def doom_unused(connection: Connection, scope: Scope, blob_ids: Sequence[bytes]) -> list[bytes]:
    """Turn those live chunks that no entry points at to ``deleting``: bytes go after the pointer (law 1)."""
    if not blob_ids:
        return []
    unused = connection.scalars(
        update(chunk)
        .where(
            *owned(chunk, scope),
            chunk.c.blob_id.in_(blob_ids),
            chunk.c.state == "live",
            ~exists(
                select(1).where(
                    *owned(entry, scope),
                    entry.c.blob_id == chunk.c.blob_id,
                )
            ),
        )
        .values(state="deleting")
        .returning(chunk.c.blob_id)
    ).all()
    doom_placements(connection, scope, unused)
    return list(unused)


def doom_placements(connection: Connection, scope: Scope, blob_ids: Sequence[bytes], tier: str | None = None) -> None:
    """Placements not begun vanish; those that may have bytes wait for the sweep as ``doomed``."""
    if not blob_ids:
        return
    which = [
        *owned(placement, scope),
        placement.c.blob_id.in_(blob_ids),
    ]
    if tier is not None:
        which.append(placement.c.tier == tier)
    never_begun = connection.execute(
        delete(placement).where(*which, placement.c.state == "due").returning(placement.c.tier, placement.c.length)
    ).all()
    freed = sum(row.length for row in never_begun if row.tier == "s3")
    quota.apply(connection, scope, quota.Change(s3_bytes=-freed))
    # A write in flight keeps its lease: the sweep waits for it to end before it believes the name is gone.
    connection.execute(
        update(placement).where(*which, placement.c.state.in_(("ok", "quarantined"))).values(state="doomed")
    )
    connection.execute(
        update(placement)
        .where(*which, placement.c.state == "writing")
        .values(state="doomed", not_before_ms=placement.c.lease_ms, owner=None, lease_ms=None)
    )


def _leave_tombstones(
    connection: Connection, scope: Scope, names: Sequence[EntryName], reason: str, now_ms: int
) -> None:
    if not names:
        return
    connection.execute(
        delete(tombstone).where(
            *owned(tombstone, scope),
            _named(tombstone, names),
        )
    )
    connection.execute(
        tombstone.insert(),
        [
            {
                "tenant_id": scope.tenant,
                "namespace_id": scope.namespace,
                "format_id": format_id,
                "entry_key": entry_key,
                "reason": reason,
                "at_ms": now_ms,
            }
            for format_id, entry_key in names
        ],
    )


def _named(table: FromClause, names: Sequence[EntryName]) -> ColumnElement[bool]:
    """The rows of these entries: format by format, since SQLite uses no index for pairs of values."""
    by_format: defaultdict[int, list[bytes]] = defaultdict(list)
    for format_id, entry_key in names:
        by_format[format_id].append(entry_key)
    return or_(
        *(and_(table.c.format_id == format_id, table.c.entry_key.in_(keys)) for format_id, keys in by_format.items())
    )
