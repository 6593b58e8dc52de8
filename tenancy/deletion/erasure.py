"""What a deletion job does to entries and chunks, and what the catalog still has of them. Transaction bodies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import ColumnElement, Connection, and_, exists, func, insert, select, update

from tenancy import quota
from tenancy.deletion import selection
from tenancy.deletion.jobs import Job, at, key_of
from tenancy.model import Scope
from tenancy.removal import EntryName, doom_unused, remove_entries
from tenancy.schema import chunk, deletion_blob, deletion_job, entry, owned, placement, reservation, tombstone

LEFT_MAX: Final = 20
"""Most leftovers that a look names."""


@dataclass(frozen=True, slots=True)
class Removed:
    """What one transaction of a removal did."""

    last: EntryName | None
    """Where to go on; none when nothing is left behind it."""
    unneeded: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Outstanding:
    """What the catalog still has of a job."""

    chunks: int
    reservations: int
    nodes: tuple[str, ...]
    """Nodes on whose disk some of it is."""

    @property
    def nothing(self) -> bool:
        return not self.chunks and not self.reservations


def remove(connection: Connection, job: Job, after: EntryName | None, now_ms: int, limit: int) -> Removed:
    """End up to `limit` of the entries that the job selects, those behind `after`."""
    quota.lock(connection, job.scope)
    names = selection.find(connection, job.scope, job.selector, after, limit)
    return Removed(names[-1] if len(names) == limit else None, _end(connection, job, names, now_ms))


def remove_named(connection: Connection, job: Job, names: Sequence[EntryName], now_ms: int) -> tuple[bytes, ...]:
    """End these entries for the job; those of their blobs that nothing needs any more."""
    quota.lock(connection, job.scope)
    return _end(connection, job, names, now_ms)


def doom_stray(connection: Connection, job: Job, limit: int) -> tuple[bytes, ...]:
    """Doom live chunks of a namespace that no entry points at, and note them for the job."""
    quota.lock(connection, job.scope)
    pointed_at = exists(select(1).where(*owned(entry, job.scope), entry.c.blob_id == chunk.c.blob_id))
    blob_ids = connection.scalars(
        select(chunk.c.blob_id).where(*owned(chunk, job.scope), chunk.c.state == "live", ~pointed_at).limit(limit)
    ).all()
    _note_blobs(connection, job, blob_ids)
    return tuple(doom_unused(connection, job.scope, blob_ids))


def note_dying(connection: Connection, job: Job, limit: int) -> int:
    """Note for the job up to `limit` chunks of its namespace whose deletion had begun before it; how many."""
    quota.lock(connection, job.scope)
    dying = connection.scalars(
        select(chunk.c.blob_id).where(*owned(chunk, job.scope), chunk.c.state == "deleting", ~_noted(job)).limit(limit)
    ).all()
    _note_blobs(connection, job, dying)
    return len(dying)


def outstanding(connection: Connection, job: Job) -> Outstanding:
    """What of the job's chunks has not been purged; for a whole namespace, whatever it still has."""
    if job.kind == "namespace":
        which = [*owned(chunk, job.scope)]
        reserved = select(func.count()).select_from(reservation).where(*owned(reservation, job.scope))
        reservations = connection.scalar(reserved) or 0
    else:
        which = [*owned(chunk, job.scope), chunk.c.state == "deleting", _noted(job)]
        reservations = 0
    count = connection.scalar(select(func.count()).select_from(chunk).where(*which)) or 0
    nodes = connection.scalars(
        select(placement.c.node)
        .distinct()
        .where(*owned(placement, job.scope), placement.c.blob_id == chunk.c.blob_id, placement.c.tier == "nvme", *which)
    ).all()
    return Outstanding(count, reservations, tuple(sorted(nodes)))


def blobs(connection: Connection, job: Job, after: bytes, limit: int) -> list[bytes]:
    """Ids of the blobs that the job deletes, ascending behind `after`: those that are not retained."""
    return list(
        connection.scalars(
            select(deletion_blob.c.blob_id)
            .where(*_mine(job), deletion_blob.c.blob_id > after, ~_live(job))
            .order_by(deletion_blob.c.blob_id)
            .limit(limit)
        )
    )


def retained(connection: Connection, job: Job, limit: int) -> tuple[int, int, list[bytes]]:
    """Chunks that the job met and that another entry keeps: their number, their bytes, and the first ids."""
    kept = (*owned(chunk, job.scope), chunk.c.state == "live", _noted(job))
    count, length = connection.execute(
        select(func.count(), func.coalesce(func.sum(chunk.c.sealed_length), 0)).where(*kept)
    ).one()
    ids = connection.scalars(select(chunk.c.blob_id).where(*kept).order_by(chunk.c.blob_id).limit(limit)).all()
    return int(count), int(length), list(ids)


def left_in_catalog(connection: Connection, job: Job) -> list[str]:
    """What rows there still are of what the job deletes: chunks with their salts, placements, entries."""
    found: list[str] = []
    gone = () if job.kind == "namespace" else (_noted(job), chunk.c.state != "live")
    rows = connection.scalars(select(chunk.c.blob_id).where(*owned(chunk, job.scope), *gone).limit(LEFT_MAX))
    found += [f"the row, with its salt, of chunk {blob_id.hex()}" for blob_id in rows]
    if job.kind == "namespace":
        for table in (entry, placement, reservation, tombstone):
            count = connection.scalar(select(func.count()).select_from(table).where(*owned(table, job.scope)))
            if count:
                found.append(f"{count} rows of {table.name}")
        return found
    placed = connection.scalars(
        select(placement.c.blob_id)
        .join(
            deletion_blob,
            and_(
                deletion_blob.c.blob_id == placement.c.blob_id,
                deletion_blob.c.tenant_id == placement.c.tenant_id,
                deletion_blob.c.namespace_id == placement.c.namespace_id,
            ),
        )
        .where(*owned(placement, job.scope), *_mine(job), ~_live(job))
        .limit(LEFT_MAX)
    )
    return found + [f"the placement of blob {blob_id.hex()}" for blob_id in placed]


def rows_left(connection: Connection, scope: Scope, blob_ids: Sequence[bytes], whole: bool) -> list[str]:
    """Chunks, each with its salt, among these blobs, or any of the whole namespace."""
    these = () if whole else (chunk.c.blob_id.in_(blob_ids),)
    rows = connection.scalars(select(chunk.c.blob_id).where(*owned(chunk, scope), *these).limit(LEFT_MAX))
    return [f"the row, with its salt, of chunk {blob_id.hex()}" for blob_id in rows]


def drop_tombstones(connection: Connection, scope: Scope, limit: int) -> int:
    """Drop up to `limit` tombstones of a namespace that goes; how many there were."""
    rows = connection.execute(
        select(tombstone.c.format_id, tombstone.c.entry_key).where(*owned(tombstone, scope)).limit(limit)
    ).all()
    if rows:
        connection.execute(
            tombstone.delete().where(
                *owned(tombstone, scope),
                tombstone.c.format_id.in_({row.format_id for row in rows}),
                tombstone.c.entry_key.in_([row.entry_key for row in rows]),
            )
        )
    return len(rows)


def _end(connection: Connection, job: Job, names: Sequence[EntryName], now_ms: int) -> tuple[bytes, ...]:
    """End entries, and note their blobs for the job. The namespace is locked."""
    if not names:
        return ()
    rows = connection.execute(
        select(entry.c.blob_id).where(
            *owned(entry, job.scope),
            entry.c.format_id.in_({format_id for format_id, _ in names}),
            entry.c.entry_key.in_([key for _, key in names]),
        )
    ).all()
    _note_blobs(connection, job, sorted({row.blob_id for row in rows}))
    connection.execute(update(deletion_job).where(*at(job)).values(entries=deletion_job.c.entries + len(rows)))
    return tuple(remove_entries(connection, job.scope, names, "deleted", now_ms))


def _note_blobs(connection: Connection, job: Job, blob_ids: Sequence[bytes]) -> None:
    if not blob_ids:
        return
    known = set(
        connection.scalars(select(deletion_blob.c.blob_id).where(*_mine(job), deletion_blob.c.blob_id.in_(blob_ids)))
    )
    new = [blob_id for blob_id in blob_ids if blob_id not in known]
    if not new:
        return
    length = connection.scalar(
        select(func.sum(chunk.c.sealed_length)).where(*owned(chunk, job.scope), chunk.c.blob_id.in_(new))
    )
    connection.execute(insert(deletion_blob), [{**key_of(job), "blob_id": blob_id} for blob_id in new])
    connection.execute(
        update(deletion_job)
        .where(*at(job))
        .values(chunks=deletion_job.c.chunks + len(new), bytes=deletion_job.c.bytes + int(length or 0))
    )


def _mine(job: Job) -> tuple[ColumnElement[bool], ...]:
    return (*owned(deletion_blob, job.scope), deletion_blob.c.job_id == job.job_id)


def _noted(job: Job) -> ColumnElement[bool]:
    """The chunk is one that the job has met."""
    return exists(select(1).where(*_mine(job), deletion_blob.c.blob_id == chunk.c.blob_id)).correlate(chunk)


def _live(job: Job) -> ColumnElement[bool]:
    """Another entry keeps the blob's chunk."""
    alive = (*owned(chunk, job.scope), chunk.c.blob_id == deletion_blob.c.blob_id, chunk.c.state == "live")
    return exists(select(1).where(*alive)).correlate(deletion_blob)
