"""Removing entries: invisible at once; a chunk that no entry needs any more is on its way out.

The one mechanism behind delete, expiry, eviction and replacement. The namespace's quota row is locked by the caller.
The chunk's row stays, in state ``deleting`` and still charged, until `tenancy.sweep.purge` has seen its bytes go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from sqlalchemy import (
    Connection,
    Delete,
    Update,
    bindparam,
    delete,
    exists,
    null,
    or_,
    select,
    update,
)

from tenancy import quota
from tenancy.model import Scope
from tenancy.prepared import KeyStatement, Parameters, RowsInsert, Statement, bound, owner, pieces
from tenancy.schema import chunk, entry, placement, states, tombstone

EntryName = tuple[int, bytes]
"""Format id and entry key."""


def _unnamed(keys: Parameters) -> Statement:
    return (
        delete(entry)
        .where(*bound(entry), entry.c.format_id == bindparam("format"), entry.c.entry_key.in_(keys))
        .returning(entry.c.entry_key, entry.c.blob_id)
    )


def _unburied(keys: Parameters) -> Delete:
    return delete(tombstone).where(
        *bound(tombstone), tombstone.c.format_id == bindparam("format"), tombstone.c.entry_key.in_(keys)
    )


def _unused(blob_ids: Parameters) -> Update:
    needed = exists(select(1).where(*bound(entry), entry.c.blob_id == chunk.c.blob_id))
    return (
        update(chunk)
        .where(*bound(chunk), chunk.c.blob_id.in_(blob_ids), chunk.c.state == states.LIVE, ~needed)
        .values(state=states.DELETING)
        .returning(chunk.c.blob_id)
    )


def _never_begun(blob_ids: Parameters) -> Statement:
    return (
        delete(placement)
        .where(*bound(placement), placement.c.blob_id.in_(blob_ids), placement.c.state == states.DUE)
        .returning(placement.c.tier, placement.c.length)
    )


def _written(blob_ids: Parameters) -> Update:
    state = placement.c.state
    return (
        update(placement)
        .where(
            *bound(placement), placement.c.blob_id.in_(blob_ids), or_(state == states.OK, state == states.QUARANTINED)
        )
        .values(state=states.DOOMED)
    )


def _in_flight(blob_ids: Parameters) -> Update:
    return (
        update(placement)
        .where(*bound(placement), placement.c.blob_id.in_(blob_ids), placement.c.state == states.WRITING)
        .values(state=states.DOOMED, not_before_ms=placement.c.lease_ms, owner=null(), lease_ms=null())
    )


UNNAMED: Final = KeyStatement(_unnamed)
UNBURIED: Final = KeyStatement(_unburied)
UNUSED: Final = KeyStatement(_unused)
NEVER_BEGUN: Final = KeyStatement(_never_begun)
WRITTEN: Final = KeyStatement(_written)
IN_FLIGHT: Final = KeyStatement(_in_flight)
_TOMBSTONES: Final = RowsInsert(
    tombstone, ("tenant_id", "namespace_id", "format_id", "reason", "at_ms"), ("entry_key",)
)


def remove_entries(
    connection: Connection, scope: Scope, names: Sequence[EntryName], reason: str, now_ms: int
) -> list[bytes]:
    """Delete entries, leave tombstones, and doom the chunks that lost their last entry: their blob ids."""
    by_format: defaultdict[int, list[bytes]] = defaultdict(list)
    for format_id, key in names:
        by_format[format_id].append(key)
    blob_ids = [
        blob_id
        for format_id, keys in by_format.items()
        for blob_id in end_entries(connection, scope, format_id, keys, reason, now_ms)
    ]
    return doom_unused(connection, scope, sorted(set(blob_ids)))


def end_entries(
    connection: Connection, scope: Scope, format_id: int, keys: Sequence[bytes], reason: str, now_ms: int
) -> list[bytes]:
    """Delete those entries of one format that are there, and leave tombstones; the blob id of each.

    What they pointed at is to be passed to `doom_unused`.
    """
    at = {**owner(scope), "format": format_id}
    blob_ids = []
    for some in pieces(keys):
        gone = UNNAMED.rows(connection, at, some)
        if not gone:
            continue
        UNBURIED.count(connection, at, [key for key, _ in gone])
        shared = {
            "tenant_id": scope.tenant,
            "namespace_id": scope.namespace,
            "format_id": format_id,
            "reason": reason,
            "at_ms": now_ms,
        }
        _TOMBSTONES.run(connection, shared, [(key,) for key, _ in gone])
        blob_ids += [blob_id for _, blob_id in gone]
    return blob_ids


def doom_unused(connection: Connection, scope: Scope, blob_ids: Sequence[bytes]) -> list[bytes]:
    """Turn those live chunks that no entry points at to ``deleting``: bytes go after the pointer (law 1)."""
    unused = [blob_id for some in pieces(blob_ids) for (blob_id,) in UNUSED.rows(connection, owner(scope), some)]
    doom_placements(connection, scope, unused)
    return unused


def doom_placements(connection: Connection, scope: Scope, blob_ids: Sequence[bytes]) -> None:
    """Placements not begun vanish; those that may have bytes wait for the sweep as ``doomed``."""
    at = owner(scope)
    for some in pieces(blob_ids):
        never_begun = NEVER_BEGUN.rows(connection, at, some)
        freed = sum(length for tier, length in never_begun if tier == "s3")
        quota.apply(connection, scope, quota.Change(s3_bytes=-freed))
        WRITTEN.count(connection, at, some)
        # A write in flight keeps its lease: the sweep waits until `settle_writes` hears of its end, or the lease ends.
        IN_FLIGHT.count(connection, at, some)
