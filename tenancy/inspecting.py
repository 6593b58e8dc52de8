"""What a check of the house asks of the rows: page by page, so that nobody waits long, and again for what it suspects.

Every transaction keeps these rules: a live chunk has an entry, an entry's chunk is live, a chunk on its way out has
only doomed placements. What breaks one of them is a bug, or a hand that edited the database.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from sqlalchemy import ColumnElement, Connection, exists, func, or_, select, update

from tenancy import quota
from tenancy.inspecting_statements import LOOKED_AT, PLACED
from tenancy.model import Node, Scope
from tenancy.prepared import owner
from tenancy.removal import doom_placements, doom_unused, remove_entries
from tenancy.repair import abandon_unreadable
from tenancy.schema import UNSETTLED, chunk, entry, kv_format, owned, placement, reservation

ABOVE_ALL: Final = b"\xff" * 17
"""No blob id is as high."""

Fault = Literal["unreferenced", "headless", "undoomed", "stranded"]


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement that says ``ok``: a read expects `length` bytes. `updated_ms` tells one writing from the next."""

    blob_id: bytes
    length: int
    updated_ms: int


@dataclass(frozen=True, slots=True)
class Sealing:
    """A placement that says ``ok``, with everything that opening its blob takes."""

    placed: Placed
    chunk_id: bytes
    salt: bytes
    tag_root: bytes
    epoch: int
    seg_log2: int
    length: int
    created_ms: int
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Faults:
    """A page of chunks, and what is wrong with some of them."""

    looked: int
    last: bytes
    """Blob id of the page's last chunk; empty when there was none."""
    found: dict[bytes, Fault]


@dataclass(frozen=True, slots=True)
class Overdue:
    """What a lease should have ended long ago: ids, with the times (Unix ms) at which the leases ended."""

    reservations: list[tuple[bytes, int]]
    writes: list[tuple[bytes, str, int]]
    """Blob id, tier, end of the lease."""


@dataclass(frozen=True, slots=True)
class Mended:
    """What a transaction set right."""

    count: int
    dead: list[bytes] = field(default_factory=list)
    """Blobs that nothing needs any more."""


def count_placed(connection: Connection, scope: Scope, tier: str, node: str) -> int:
    """How many placements in this tier say ``ok``."""
    return connection.scalar(select(func.count()).where(*_placed_in(scope, tier, node))) or 0


def placed(
    connection: Connection, scope: Scope, tier: str, node: str, after: bytes, until: bytes | None, limit: int
) -> list[Placed]:
    """Up to `limit` placements that say ``ok``, by rising blob id: above `after`, below `until`."""
    return _read_placed(connection, scope, tier, node, after, ABOVE_ALL if until is None else until, limit)


def sealings(connection: Connection, scope: Scope, tier: str, node: str, after: bytes, limit: int) -> list[Sealing]:
    """Up to `limit` placements of live chunks that say ``ok``, by rising blob id above `after`."""
    rows = connection.execute(
        select(
            placement.c.blob_id,
            chunk.c.sealed_length,
            placement.c.updated_ms,
            chunk.c.chunk_id,
            chunk.c.salt,
            chunk.c.tag_root,
            chunk.c.epoch,
            chunk.c.seg_log2,
            chunk.c.length,
            chunk.c.created_ms,
            kv_format.c.fingerprint,
        )
        .where(
            *_placed_in(scope, tier, node),
            *owned(chunk, scope),
            *owned(kv_format, scope),
            chunk.c.blob_id == placement.c.blob_id,
            chunk.c.state == "live",
            kv_format.c.format_id == chunk.c.format_id,
            placement.c.blob_id > after,
        )
        .order_by(placement.c.blob_id)
        .limit(limit)
    ).all()
    return [Sealing(Placed(*row[:3]), *row[3:]) for row in rows]


def still_placed(connection: Connection, scope: Scope, tier: str, node: str, seen: Sequence[Placed]) -> list[Placed]:
    """Those of `seen` that are what they were: ``ok``, and not written anew since."""
    if not seen:
        return []
    named = [one.blob_id for one in seen]
    now = set(_read_placed(connection, scope, tier, node, b"", ABOVE_ALL, len(seen), named))
    return [one for one in seen if one in now]


def end_dangling(
    connection: Connection, scope: Scope, tier: str, node: str, seen: Sequence[Placed], now_ms: int
) -> Mended:
    """Quarantine placements whose bytes are not there, if they are what they were; their last hope gone, entries end.

    Where the other tier has the bytes, the placement is due again.
    """
    quota.lock(connection, scope)
    blob_ids = [one.blob_id for one in still_placed(connection, scope, tier, node, seen)]
    these = (
        *owned(placement, scope),
        placement.c.blob_id.in_(blob_ids),
        placement.c.tier == tier,
        placement.c.node == node,
    )
    connection.execute(
        update(placement).where(*these, placement.c.state == "ok").values(state="quarantined", updated_ms=now_ms)
    )
    dead = abandon_unreadable(connection, scope, blob_ids, now_ms)
    copy = placement.alias("copy")
    connection.execute(
        update(placement)
        .where(
            *these,
            placement.c.state == "quarantined",
            exists(
                select(1).where(
                    *owned(copy, scope),
                    copy.c.blob_id == placement.c.blob_id,
                    copy.c.tier != tier,
                    copy.c.state == "ok",
                )
            ),
        )
        .values(state="due", attempts=0, not_before_ms=now_ms, updated_ms=now_ms)
    )
    return Mended(len(blob_ids), dead)


def faults(
    connection: Connection,
    scope: Scope,
    live_boots: Sequence[str],
    after: bytes,
    limit: int,
    among: Sequence[bytes] | None = None,
) -> Faults:
    """Look at up to `limit` chunks above blob id `after`, by rising id; `among`: only at these."""
    if among is not None and not among:
        return Faults(0, b"", {})
    values = {**owner(scope), "after": after, "most": limit}
    rows = LOOKED_AT.rows(connection, values, *(() if among is None else (among,)))
    alive, found = set(live_boots), dict[bytes, Fault]()
    for blob_id, state, home_boot, named, readable, kept in rows:
        if state == "live" and not named:
            found[blob_id] = "unreferenced"
        elif state == "live" and not readable and home_boot not in alive:
            found[blob_id] = "stranded"
        elif state == "deleting" and named:
            found[blob_id] = "headless"
        elif state == "deleting" and kept:
            found[blob_id] = "undoomed"
    return Faults(len(rows), rows[-1][0] if rows else b"", found)


def mend_chunks(connection: Connection, scope: Scope, blob_ids: Sequence[bytes], now_ms: int) -> Mended:
    """Let those of these chunks that break a rule keep it: what is not whole goes, entries first (law 1)."""
    quota.lock(connection, scope)
    wrong = faults(connection, scope, (), b"", len(blob_ids), blob_ids).found
    by_fault = {kind: [one for one, fault in wrong.items() if fault == kind] for kind in ("unreferenced", "headless")}
    rows = connection.execute(
        select(entry.c.format_id, entry.c.entry_key).where(
            *owned(entry, scope), entry.c.blob_id.in_(by_fault["headless"])
        )
    ).all()
    remove_entries(connection, scope, [(row.format_id, row.entry_key) for row in rows], "lost", now_ms)
    dead = doom_unused(connection, scope, by_fault["unreferenced"])
    leaving = [one for one, fault in wrong.items() if fault in ("headless", "undoomed")]
    doom_placements(connection, scope, leaving)
    return Mended(len(leaving) + len(dead), [*leaving, *dead])


def overdue(connection: Connection, scope: Scope, node: Node, before_ms: int, limit: int) -> Overdue:
    """Up to `limit` each of the reservations and of this node's writes whose leases ended before `before_ms`."""
    reserved = connection.execute(
        select(reservation.c.reservation_id, reservation.c.expires_ms)
        .where(*owned(reservation, scope), reservation.c.expires_ms <= before_ms)
        .limit(limit)
    )
    writes = connection.execute(
        select(placement.c.blob_id, placement.c.tier, placement.c.lease_ms)
        .where(*_left_writing(scope, node, before_ms))
        .limit(limit)
    )
    return Overdue(
        [(row.reservation_id, row.expires_ms) for row in reserved],
        [(row.blob_id, row.tier, row.lease_ms) for row in writes],
    )


def end_writes(connection: Connection, scope: Scope, node: Node, before_ms: int, now_ms: int) -> Mended:
    """Put writes whose owner let the lease run out back into the outbox."""
    quota.lock(connection, scope)
    ended = connection.execute(
        update(placement)
        .where(*_left_writing(scope, node, before_ms))
        .values(state="due", owner=None, lease_ms=None, not_before_ms=now_ms)
    )
    return Mended(ended.rowcount)


def _placed_in(scope: Scope, tier: str, node: str) -> tuple[ColumnElement[bool], ...]:
    return (
        *owned(placement, scope),
        placement.c.tier == tier,
        placement.c.node == node,
        placement.c.state == "ok",
    )


def _read_placed(
    connection: Connection,
    scope: Scope,
    tier: str,
    node: str,
    after: bytes,
    below: bytes,
    limit: int,
    *among: Sequence[bytes],
) -> list[Placed]:
    values = {
        **owner(scope),
        "in_tier": tier,
        "on_node": node,
        "after": after,
        "below": below,
        "most": limit,
    }
    return [Placed(*row) for row in PLACED.rows(connection, values, *among)]


def _left_writing(scope: Scope, node: Node, before_ms: int) -> tuple[ColumnElement[bool], ...]:
    return (
        *owned(placement, scope),
        placement.c.state == "writing",
        UNSETTLED,
        placement.c.lease_ms <= before_ms,
        or_(placement.c.tier == "s3", placement.c.node == node.node),
    )
