"""Placements as the outbox of write-back: due → writing (owner, lease) → ok; doomed ones belong to the sweep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sqlalchemy import Connection, func, select

from tenancy import outbox_statements as statements
from tenancy import quota
from tenancy.model import Node, Scope
from tenancy.prepared import owner
from tenancy.repair import abandon_unreadable
from tenancy.schema import UNSETTLED, owned, placement
from tenancy.timekeeping import FURTHEST_MS


@dataclass(frozen=True, slots=True)
class DueWrite:
    """A blob that this process has taken on to write into a tier, until its lease ends."""

    scope: Scope
    blob_id: bytes
    object_name: str
    tier: str
    node: str
    length: int
    attempts: int
    sources: frozenset[str]
    """Tiers from which this node can read the blob, besides its staging."""
    lease_until_ms: int


@dataclass(frozen=True, slots=True)
class Claim:
    """How much to take on next, and until when: at most `limit` writes, of `bytes_max` bytes in all."""

    tier: str
    lease_until_ms: int
    limit: int
    bytes_max: int | None = None


@dataclass(frozen=True, slots=True)
class Endings:
    """How writes of one namespace ended."""

    done: Sequence[DueWrite] = ()
    failed: Sequence[tuple[DueWrite, int]] = ()
    """Each with the time (Unix ms) from which it is due again."""
    lost: Sequence[DueWrite] = ()
    """Their source is gone."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Answer of `settle_writes`."""

    unneeded: frozenset[bytes]
    """Blobs whose bytes wait for the sweep: of writes that are not wanted any more, or of chunks that were lost."""
    settled: frozenset[bytes]
    """Those of the blobs that have no write left: staging may evict them."""
    due: list[DueWrite]
    """What was claimed."""


def claim_due(
    connection: Connection,
    scope: Scope,
    node: Node,
    tier: str,
    lease_until_ms: int,
    now_ms: int,
    limit: int,
    bytes_max: int | None = None,
) -> list[DueWrite]:
    """Take on writes into a tier that are due, or whose owner let its lease run out, or was this disk's before us.

    Only of blobs that this process can read: from its staging, this node's NVMe, or S3. At most `limit`, and of
    `bytes_max` bytes in all, but one whatever its size. Since when they are due is not changed by trying.
    """
    values = {
        **owner(scope),
        "in_tier": tier,
        "here": node.node,
        "boot": node.boot,
        "now": now_ms,
        "furthest": now_ms + FURTHEST_MS,
        "most": limit,
    }
    due = [
        DueWrite(scope, blob_id, name, tier, at, length, attempts, _sources(on_nvme, on_s3), lease_until_ms)
        for blob_id, name, at, length, attempts, on_nvme, on_s3 in statements.FREE.rows(connection, values)
    ]
    if bytes_max is not None:
        sums = accumulate(write.length for write in due)
        due = due[: max(1, sum(total <= bytes_max for total in sums))]
    for address, blob_ids in _by_place(scope, due):
        statements.CLAIMED.count(connection, {**address, "boot": node.boot, "until": lease_until_ms}, blob_ids)
    return due


def _sources(on_nvme: object, on_s3: object) -> frozenset[str]:
    return frozenset(tier for tier, there in (("nvme", on_nvme), ("s3", on_s3)) if there)


def _by_place(scope: Scope, writes: Iterable[DueWrite]) -> Iterator[tuple[dict[str, object], list[bytes]]]:
    """Blobs by the tier and node that they are for: all of them are for one, as a rule."""
    places: defaultdict[tuple[str, str], list[bytes]] = defaultdict(list)
    for write in writes:
        places[write.tier, write.node].append(write.blob_id)
    for (tier, node), blob_ids in places.items():
        yield {**owner(scope), "in_tier": tier, "on_node": node}, blob_ids


def _finish(connection: Connection, scope: Scope, node: Node, done: Sequence[DueWrite], now_ms: int) -> set[bytes]:
    """Mark written blobs ``ok``. Returns those that are no longer wanted: they were doomed meanwhile."""
    unwanted: set[bytes] = set()
    for address, blob_ids in _by_place(scope, done):
        values = {**address, "boot": node.boot, "now": now_ms}
        finished = statements.FINISHED.rows(connection, values, blob_ids)
        rest = set(blob_ids).difference(blob_id for (blob_id,) in finished)
        if rest:  # whoever took a write over may have finished it
            rest.difference_update(blob_id for (blob_id,) in statements.WHOLE.rows(connection, address, list(rest)))
        unwanted |= rest
    _end_waits(connection, scope, [write for write in done if write.blob_id in unwanted], now_ms)
    return unwanted


def _end_waits(connection: Connection, scope: Scope, over: Sequence[DueWrite], now_ms: int) -> list[bytes]:
    """The sweep need not wait any longer for those of the writes that were doomed, now that they are over: their blobs.

    But for what was tried before: that attempt failed, and may arrive after all. See `tenancy.removal`.
    """
    ended: list[bytes] = []
    by_lease: defaultdict[int, list[DueWrite]] = defaultdict(list)
    for write in over:
        if not write.attempts:
            by_lease[write.lease_until_ms].append(write)
    for lease_until_ms, writes in by_lease.items():
        for address, blob_ids in _by_place(scope, writes):
            values = {**address, "now": now_ms, "until": lease_until_ms}
            ended += [blob_id for (blob_id,) in statements.WAIT_ENDED.rows(connection, values, blob_ids)]
    return ended


def _postpone(connection: Connection, scope: Scope, node: Node, failed: Sequence[tuple[DueWrite, int]]) -> None:
    """Put writes that did not succeed back into the outbox, each until its own time (Unix ms)."""
    if not failed:
        return
    statements.POSTPONED.each(
        connection,
        {**owner(scope), "boot": node.boot},
        [
            {"blob": write.blob_id, "in_tier": write.tier, "on_node": write.node, "again_ms": again_ms}
            for write, again_ms in failed
        ],
    )


def _drop(connection: Connection, scope: Scope, node: Node, lost: Sequence[DueWrite], now_ms: int) -> list[bytes]:
    """Give up writes whose source is gone; entries that nothing else holds go with them. Returns unneeded blobs."""
    if not lost:
        return []
    dropped = [
        row
        for address, blob_ids in _by_place(scope, lost)
        for row in statements.DROPPED.rows(connection, {**address, "boot": node.boot}, blob_ids)
    ]
    quota.apply(connection, scope, quota.Change(s3_bytes=-sum(length for tier, length in dropped if tier == "s3")))
    ended = _end_waits(connection, scope, lost, now_ms)
    return [*ended, *abandon_unreadable(connection, scope, [write.blob_id for write in lost], now_ms)]


def outstanding(connection: Connection, scope: Scope, blob_ids: Sequence[bytes]) -> set[bytes]:
    """Those blobs that still have a placement to be written."""
    if not blob_ids:
        return set()
    return {blob_id for (blob_id,) in statements.OUTSTANDING.rows(connection, owner(scope), blob_ids)}


def settle_writes(
    connection: Connection, scope: Scope, node: Node, ended: Endings, claim: Claim | None, now_ms: int
) -> Turn:
    """Write down how writes ended, and take on the next ones, in one transaction."""
    quota.lock(connection, scope)
    unwanted = _finish(connection, scope, node, ended.done, now_ms)
    _postpone(connection, scope, node, ended.failed)
    dropped = _drop(connection, scope, node, ended.lost, now_ms)
    blob_ids = [one.blob_id for one in (*ended.done, *(one for one, _ in ended.failed), *ended.lost)]
    settled = frozenset(blob_ids) - outstanding(connection, scope, blob_ids)
    due: list[DueWrite] = []
    if claim is not None:
        due = claim_due(connection, scope, node, claim.tier, claim.lease_until_ms, now_ms, claim.limit, claim.bytes_max)
    return Turn(frozenset(unwanted) | frozenset(dropped), settled, due)


def outbox_length(connection: Connection, scope: Scope) -> dict[str, tuple[int, int, int]]:
    """Per tier: placements to be written, their bytes, and since when (Unix ms) the oldest has waited."""
    rows = connection.execute(
        select(placement.c.tier, func.count(), func.sum(placement.c.length), func.min(placement.c.updated_ms))
        .where(
            *owned(placement, scope),
            placement.c.state.in_(("due", "writing")),
            UNSETTLED,
        )
        .group_by(placement.c.tier)
    )
    return {tier: (count, int(length), oldest) for tier, count, length, oldest in rows}


def known_objects(connection: Connection, scope: Scope, tier: str, node: str, blob_ids: Sequence[bytes]) -> set[bytes]:
    """Those blobs that have any placement in this tier; a blob in a listing that has none is an orphan."""
    values = {**owner(scope), "in_tier": tier, "on_node": node}
    return {blob_id for (blob_id,) in statements.KNOWN.rows(connection, values, blob_ids)}
