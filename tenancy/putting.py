"""The catalog's part of a PUT: reserve, then commit or abort. Each is one transaction body.

Between reserve and commit nothing is visible; the reservation holds the quota. At commit equal content is stored once,
and of two writers of one key the first wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import BigInteger, Connection, Select, Update, bindparam, select, update

from tenancy import quota, reservations
from tenancy.births import Batch, NewChunk, attach_labels, insert_chunks, insert_entries
from tenancy.errors import NamespaceUnknown, ReservationExpired
from tenancy.keys import epochs
from tenancy.model import FoundChunk, Node, Scope, suffices
from tenancy.planning import plan_commit
from tenancy.prepared import KeyStatement, Parameters, bound, owner
from tenancy.processes import PROCESS_LEASE_MS
from tenancy.removal import doom_placements, doom_unused, remove_entries
from tenancy.schema import chunk, entry, namespace, owned
from tenancy.visible import arriving, lookup


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
    fresh: frozenset[int]
    """Of those stored, the ones with an entry and bytes of their own: `born` says what a look-up would find."""


def _known(keys: Parameters) -> Select[Any]:
    return select(entry.c.entry_key, entry.c.expires_ms).where(
        *bound(entry), entry.c.format_id == bindparam("format"), entry.c.entry_key.in_(keys)
    )


def _extended(keys: Parameters) -> Update:
    until = bindparam("until", type_=BigInteger)
    return (
        update(entry)
        .where(
            *bound(entry),
            entry.c.format_id == bindparam("format"),
            entry.c.entry_key.in_(keys),
            entry.c.expires_ms - until < 0,  # an expression, as in `unexpired`
        )
        .values(expires_ms=until, ttl_ms=bindparam("ttl"))
    )


STATE: Final = KeyStatement(lambda: select(namespace.c.state).where(*bound(namespace)))
KNOWN: Final = KeyStatement(_known)
EXTENDED: Final = KeyStatement(_extended)


def reserve(
    connection: Connection, batch: Batch, node: Node, reservation_id: bytes, lease_until_ms: int, now_ms: int
) -> Reserved:
    """Say which chunks are wanted and claim quota for a leading run of them.

    What is there with less durability than is asked for is wanted again: ``have`` promises as much as ``stored``.
    Raises `NamespaceUnknown` when the namespace takes no chunks.
    """
    scope = batch.scope
    usages = quota.lock(connection, scope)
    _check_active(connection, scope)
    visible, stale = _present(connection, batch, batch.entry_keys, node, now_ms)
    strong = {key for key, found in visible.items() if suffices(found.durability, batch.durability)}
    have = frozenset(index for index, key in enumerate(batch.entry_keys) if key in strong)
    _refresh(connection, batch, [batch.entry_keys[index] for index in sorted(have)], now_ms)
    rest = [index for index in range(len(batch.entry_keys)) if index not in have]
    doomed = _clear_stale(connection, batch, stale, now_ms)
    to_s3 = batch.sealed_length if any(tier == "s3" for tier, _ in batch.tiers) else 0
    each = quota.Change(batch.sealed_length, 1, to_s3)
    granted = quota.grant(usages, len(rest), each)
    if granted:
        total = quota.Change(granted * each.stored_bytes, granted, granted * each.s3_bytes)
        quota.apply(connection, scope, total)
        reservations.begin(connection, scope, reservation_id, total, node.boot, lease_until_ms)
    return Reserved(have, tuple(rest[:granted]), frozenset(rest[granted:]), tuple(doomed))


def commit(
    connection: Connection, batch: Batch, node: Node, reservation_id: bytes, chunks: Sequence[NewChunk], now_ms: int
) -> Committed:
    """Announce `chunks`.

    Raises `ReservationExpired` when the reservation was reclaimed or the key of a chunk is used no more, and
    `NamespaceUnknown` when the namespace takes no chunks any more: then nothing is announced.
    """
    scope = batch.scope
    quota.lock(connection, scope)
    epochs.check_sealed(connection, scope, {new.epoch for new in chunks})
    held = reservations.end(connection, scope, reservation_id)
    taken, stale = _present(connection, batch, [batch.entry_keys[new.index] for new in chunks], node, now_ms)
    doomed = _clear_stale(connection, batch, stale, now_ms)
    plan = plan_commit(connection, batch, node, chunks, taken)
    # The weaker copy leaves the index of live content before the stronger one enters it.
    _retire(connection, scope, [old for old, _ in plan.replaced])
    insert_chunks(connection, batch, node, plan.fresh, now_ms)
    _repoint(connection, scope, plan.replaced)
    doomed += [old for old, _ in plan.replaced]
    stronger = {key: blob for index, blob in plan.blob_of.items() if (key := batch.entry_keys[index]) in taken}
    doomed += _strengthen(connection, batch, stronger, taken, now_ms)
    insert_entries(
        connection,
        batch,
        {index: blob for index, blob in plan.blob_of.items() if batch.entry_keys[index] not in taken},
        now_ms,
    )
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
        fresh=frozenset(new.index for new in plan.fresh if batch.entry_keys[new.index] not in taken),
    )


def abort(connection: Connection, scope: Scope, reservation_id: bytes) -> None:
    """Give a reservation's quota back. One that is gone already is no error."""
    quota.lock(connection, scope)
    try:
        held = reservations.end(connection, scope, reservation_id)
    except ReservationExpired:
        return
    quota.apply(connection, scope, quota.Change(-held.stored_bytes, -held.objects, -held.s3_bytes))


def reclaim_expired(connection: Connection, scope: Scope, now_ms: int) -> int:
    """End reservations whose lease ran out; their number."""
    quota.lock(connection, scope)
    count, held = reservations.end_expired(connection, scope, now_ms)
    quota.apply(connection, scope, quota.Change(-held.stored_bytes, -held.objects, -held.s3_bytes))
    return count


def _present(
    connection: Connection, batch: Batch, keys: Sequence[bytes], node: Node, now_ms: int
) -> tuple[dict[bytes, FoundChunk], list[tuple[bytes, int]]]:
    """Entries that this gateway can read, and those that another one has and is about to write where all can.

    Beside them the entries under these keys that are neither: expired, or their bytes are lost; each with its expiry.
    """
    known = KNOWN.rows(connection, {**owner(batch.scope), "format": batch.format_id}, keys) if keys else []
    if not known:
        return {}, []
    there = [key for key, _ in known]
    heard_since_ms = now_ms - PROCESS_LEASE_MS
    on_their_way = arriving(connection, batch.scope, batch.format_id, there, heard_since_ms, now_ms)
    visible = on_their_way | lookup(connection, batch.scope, [batch.format_id], there, node, now_ms)
    return visible, [(key, expires_ms) for key, expires_ms in known if key not in visible]


def _check_active(connection: Connection, scope: Scope) -> None:
    if [tuple(row) for row in STATE.rows(connection, owner(scope))] != [("active",)]:
        raise NamespaceUnknown("the namespace takes no chunks: it is suspended or on its way out")


def _refresh(connection: Connection, batch: Batch, keys: Sequence[bytes], now_ms: int) -> None:
    """A PUT of what is there extends its life and attaches its labels."""
    if not keys:
        return
    EXTENDED.count(
        connection,
        {**owner(batch.scope), "format": batch.format_id, "until": now_ms + batch.ttl_ms, "ttl": batch.ttl_ms},
        keys,
    )
    attach_labels(connection, batch, keys)


def _clear_stale(connection: Connection, batch: Batch, stale: Sequence[tuple[bytes, int]], now_ms: int) -> list[bytes]:
    """Entries that are not visible, each with its expiry, make way; the blobs that nothing needs any more."""
    expired = [(batch.format_id, key) for key, expires_ms in stale if expires_ms <= now_ms]
    lost = [(batch.format_id, key) for key, expires_ms in stale if expires_ms > now_ms]
    return [
        *remove_entries(connection, batch.scope, expired, "expired", now_ms),
        *remove_entries(connection, batch.scope, lost, "lost", now_ms),
    ]


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


def _strengthen(
    connection: Connection, batch: Batch, blob_of: Mapping[bytes, bytes], taken: Mapping[bytes, FoundChunk], now_ms: int
) -> list[bytes]:
    """Give entries that are there the same content with more durability; the blobs that nothing needs any more."""
    moved = {key: blob_id for key, blob_id in blob_of.items() if taken[key].blob_id != blob_id}
    if moved:
        connection.execute(
            update(entry)
            .where(
                *owned(entry, batch.scope),
                entry.c.format_id == batch.format_id,
                entry.c.entry_key == bindparam("key"),
            )
            .values(blob_id=bindparam("new_blob")),
            [{"key": key, "new_blob": blob_id} for key, blob_id in moved.items()],
        )
    _refresh(connection, batch, list(blob_of), now_ms)
    return doom_unused(connection, batch.scope, sorted({taken[key].blob_id for key in moved}))
