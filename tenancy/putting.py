"""The catalog's part of a PUT: reserve, then commit or abort. Each is one transaction body.

Between reserve and commit nothing is visible; the reservation holds the quota. At commit equal content is stored once,
and of two writers of one key the first wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from tenancy import quota
from tenancy.births import Batch, NewChunk, attach_labels, insert_chunks, insert_entries
from tenancy.errors import ReservationExpired
from tenancy.model import DURABILITIES, Node, Scope
from tenancy.removal import doom_placements, remove_entries
from tenancy.schema import chunk, entry, owned, reservation
from tenancy.visible import lookup, reachable_content


@dataclass(frozen=True, slots=True)
class Reserved:
    """Answer of `reserve`: indices into the batch."""

    have: frozenset[int]
    wanted: tuple[int, ...]
    over_quota: frozenset[int]
    doomed: tuple[bytes, ...]
    """Blob ids of chunks that this reservation replaced; staging should forget them."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Answer of `commit`: indices into the batch, and blobs whose bytes nobody will ever point at."""

    stored: frozenset[int]
    have: frozenset[int]
    conflict: frozenset[int]
    discarded: tuple[bytes, ...]
    """Blob ids that lost to content that is already stored: delete their bytes."""
    doomed: tuple[bytes, ...]


def reserve(
    connection: Connection, batch: Batch, node: Node, reservation_id: bytes, lease_until_ms: int, now_ms: int
) -> Reserved:
    """Say which chunks are wanted and claim quota for a leading run of them."""
    scope = batch.scope
    usages = quota.lock(connection, scope)
    visible = lookup(connection, scope, [batch.format_id], batch.entry_keys, node, now_ms)
    have = frozenset(index for index, key in enumerate(batch.entry_keys) if key in visible)
    _refresh(connection, batch, [batch.entry_keys[index] for index in sorted(have)], now_ms)
    rest = [index for index in range(len(batch.entry_keys)) if index not in have]
    doomed = _clear_stale(connection, batch, [batch.entry_keys[index] for index in rest], now_ms)
    to_s3 = batch.sealed_length if any(tier == "s3" for tier, _ in batch.tiers) else 0
    each = quota.Change(batch.sealed_length, 1, to_s3)
    granted = quota.grant(usages, len(rest), each)
    if granted:
        total = quota.Change(granted * each.stored_bytes, granted, granted * each.s3_bytes)
        quota.apply(connection, scope, total)
        connection.execute(
            insert(reservation),
            {
                "tenant_id": scope.tenant,
                "namespace_id": scope.namespace,
                "reservation_id": reservation_id,
                "bytes": total.stored_bytes,
                "objects": total.objects,
                "s3_bytes": total.s3_bytes,
                "owner": node.boot,
                "expires_ms": lease_until_ms,
            },
        )
    return Reserved(have, tuple(rest[:granted]), frozenset(rest[granted:]), tuple(doomed))


def commit(
    connection: Connection, batch: Batch, node: Node, reservation_id: bytes, chunks: Sequence[NewChunk], now_ms: int
) -> Committed:
    """Announce `chunks`. Raises `ReservationExpired` when the reservation was reclaimed: then nothing is announced."""
    scope = batch.scope
    quota.lock(connection, scope)
    held = _end_reservation(connection, scope, reservation_id)
    stale = [batch.entry_keys[new.index] for new in chunks]
    taken = lookup(connection, scope, [batch.format_id], stale, node, now_ms)
    doomed = _clear_stale(connection, batch, [key for key in stale if key not in taken], now_ms)
    plan = _plan(connection, batch, node, chunks, {key: found.chunk_id for key, found in taken.items()})
    # The weaker copy leaves the index of live content before the stronger one enters it.
    _retire(connection, scope, [old for old, _ in plan.replaced])
    insert_chunks(connection, batch, node, plan.fresh, now_ms)
    _repoint(connection, scope, plan.replaced)
    insert_entries(connection, batch, plan.blob_of, now_ms)
    doomed += [old for old, _ in plan.replaced]
    s3_length = batch.sealed_length if any(tier == "s3" for tier, _ in batch.tiers) else 0
    used = quota.Change(len(plan.fresh) * batch.sealed_length, len(plan.fresh), len(plan.fresh) * s3_length)
    quota.apply(
        connection,
        scope,
        quota.Change(used.stored_bytes - held.stored_bytes, used.objects - held.objects, used.s3_bytes - held.s3_bytes),
    )
    return Committed(
        stored=frozenset(plan.blob_of),
        have=plan.have,
        conflict=plan.conflict,
        discarded=tuple(plan.discarded),
        doomed=tuple(doomed),
    )


def abort(connection: Connection, scope: Scope, reservation_id: bytes) -> None:
    """Give a reservation's quota back. One that is gone already is no error."""
    quota.lock(connection, scope)
    try:
        held = _end_reservation(connection, scope, reservation_id)
    except ReservationExpired:
        return
    quota.apply(connection, scope, quota.Change(-held.stored_bytes, -held.objects, -held.s3_bytes))


def reclaim_expired(connection: Connection, scope: Scope, now_ms: int) -> int:
    """End reservations whose lease ran out; their number."""
    quota.lock(connection, scope)
    rows = connection.execute(
        delete(reservation)
        .where(
            *owned(reservation, scope),
            reservation.c.expires_ms <= now_ms,
        )
        .returning(reservation.c.bytes, reservation.c.objects, reservation.c.s3_bytes)
    ).all()
    freed = quota.Change(
        -sum(row.bytes for row in rows), -sum(row.objects for row in rows), -sum(row.s3_bytes for row in rows)
    )
    quota.apply(connection, scope, freed)
    return len(rows)


def _end_reservation(connection: Connection, scope: Scope, reservation_id: bytes) -> quota.Change:
    row = connection.execute(
        delete(reservation)
        .where(
            *owned(reservation, scope),
            reservation.c.reservation_id == reservation_id,
        )
        .returning(reservation.c.bytes, reservation.c.objects, reservation.c.s3_bytes)
    ).first()
    if row is None:
        raise ReservationExpired("the reservation of this PUT expired before it was finished; send it again")
    return quota.Change(row.bytes, row.objects, row.s3_bytes)


def _refresh(connection: Connection, batch: Batch, keys: Sequence[bytes], now_ms: int) -> None:
    """A PUT of what is there extends its life and attaches its labels."""
    if not keys:
        return
    connection.execute(
        update(entry)
        .where(
            *owned(entry, batch.scope),
            entry.c.format_id == batch.format_id,
            entry.c.entry_key.in_(keys),
            entry.c.expires_ms < now_ms + batch.ttl_ms,
        )
        .values(expires_ms=now_ms + batch.ttl_ms, ttl_ms=batch.ttl_ms)
    )
    attach_labels(connection, batch, keys)


def _clear_stale(connection: Connection, batch: Batch, keys: Sequence[bytes], now_ms: int) -> list[bytes]:
    """Entries under these keys that are not visible (expired, or their bytes are lost) make way."""
    if not keys:
        return []
    rows = connection.execute(
        select(entry.c.format_id, entry.c.entry_key, entry.c.expires_ms).where(
            *owned(entry, batch.scope),
            entry.c.format_id == batch.format_id,
            entry.c.entry_key.in_(keys),
        )
    ).all()
    expired = [(row.format_id, row.entry_key) for row in rows if row.expires_ms <= now_ms]
    lost = [(row.format_id, row.entry_key) for row in rows if row.expires_ms > now_ms]
    return [
        *remove_entries(connection, batch.scope, expired, "expired", now_ms),
        *remove_entries(connection, batch.scope, lost, "lost", now_ms),
    ]


@dataclass(frozen=True, slots=True)
class _Plan:
    fresh: list[NewChunk]
    """Chunks that get a row of their own."""
    blob_of: dict[int, bytes]
    """Batch index → blob of every entry to insert."""
    have: frozenset[int]
    conflict: frozenset[int]
    discarded: list[bytes]
    replaced: list[tuple[bytes, bytes]]
    """(old, new) blob ids of equal content, where the new one is more durable or the old one unreachable."""


def _plan(
    connection: Connection, batch: Batch, node: Node, chunks: Sequence[NewChunk], taken: dict[bytes, bytes]
) -> _Plan:
    contents = [new.chunk_id for new in chunks]
    epochs = {new.epoch for new in chunks}
    live: dict[tuple[int, bytes], tuple[bytes, str]] = {}
    strong: dict[tuple[int, bytes], bytes] = {}
    for epoch in epochs:
        for content, blob_id in _live_content(connection, batch, epoch, contents):
            live[epoch, content] = (blob_id, "")
        reachable = reachable_content(connection, batch.scope, batch.format_id, epoch, contents, node)
        for content, (blob_id, durability) in reachable.items():
            if DURABILITIES.index(durability) >= DURABILITIES.index(batch.durability):
                strong[epoch, content] = blob_id
    plan = _Plan([], {}, *_split_taken(batch, chunks, taken), [], [])
    for new in chunks:
        if new.index in plan.have or new.index in plan.conflict:
            plan.discarded.append(new.blob_id)
            continue
        address = (new.epoch, new.chunk_id)
        if address in strong:
            plan.blob_of[new.index] = strong[address]
            plan.discarded.append(new.blob_id)
            continue
        if address in live:
            plan.replaced.append((live[address][0], new.blob_id))
        strong[address] = new.blob_id
        plan.fresh.append(new)
        plan.blob_of[new.index] = new.blob_id
    return plan


def _split_taken(
    batch: Batch, chunks: Sequence[NewChunk], taken: dict[bytes, bytes]
) -> tuple[frozenset[int], frozenset[int]]:
    same = {new.index for new in chunks if taken.get(batch.entry_keys[new.index]) == new.chunk_id}
    other = {new.index for new in chunks if batch.entry_keys[new.index] in taken} - same
    return frozenset(same), frozenset(other)


def _live_content(
    connection: Connection, batch: Batch, epoch: int, contents: Sequence[bytes]
) -> list[tuple[bytes, bytes]]:
    rows = connection.execute(
        select(chunk.c.chunk_id, chunk.c.blob_id).where(
            *owned(chunk, batch.scope),
            chunk.c.format_id == batch.format_id,
            chunk.c.epoch == epoch,
            chunk.c.state == "live",
            chunk.c.chunk_id.in_(contents),
        )
    )
    return [(row.chunk_id, row.blob_id) for row in rows]


def _retire(connection: Connection, scope: Scope, blob_ids: Sequence[bytes]) -> None:
    if not blob_ids:
        return
    connection.execute(
        update(chunk)
        .where(
            *owned(chunk, scope),
            chunk.c.blob_id.in_(blob_ids),
        )
        .values(state="deleting")
    )
    doom_placements(connection, scope, blob_ids)


def _repoint(connection: Connection, scope: Scope, replaced: Sequence[tuple[bytes, bytes]]) -> None:
    if not replaced:
        return
    connection.execute(
        update(entry)
        .where(
            *owned(entry, scope),
            entry.c.blob_id == bindparam("old_blob"),
        )
        .values(blob_id=bindparam("new_blob")),
        [{"old_blob": old, "new_blob": new} for old, new in replaced],
    )
