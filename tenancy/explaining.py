"""Why an entry cannot be had: what the catalog still knows of it. Nothing here is about another namespace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import Connection, Row, Select, exists, select

from tenancy.model import Node, Scope
from tenancy.schema import chunk, entry, gateway_process, kv_format, namespace, owned, placement, tombstone
from tenancy.visible import lookup

FORMATS_MAX: Final = 1000
"""Formats of a namespace that an unknown one is compared with: the newest."""


class Why(StrEnum):
    """The state of one key, as the gateway that was asked sees it."""

    VISIBLE = "visible"
    """It can be had."""
    UNKNOWN = "unknown"
    """Never stored, or ended so long ago that the catalog has forgotten it."""
    EXPIRED = "expired"
    EVICTED = "evicted"
    DELETED = "deleted"
    LOST = "lost"
    """Its bytes went with a gateway's memory, or were found damaged everywhere."""
    ELSEWHERE = "elsewhere"
    """Another gateway has it, and has not yet written it where this one could read it."""
    EPOCH_CLOSED = "epoch_closed"
    """It was sealed in a key epoch that the namespace does not open any more."""
    OVER_QUOTA = "over_quota"
    """The last PUT of it through this gateway was refused by a quota."""
    NAMESPACE_SUSPENDED = "namespace_suspended"
    FORMAT_UNKNOWN = "format_unknown"


@dataclass(frozen=True, slots=True)
class Known:
    """What the catalog knows of one key."""

    why: Why
    at_ms: int = 0
    """When that came about, or (`EXPIRED`) was due; 0 when nothing says so."""


def explain(
    connection: Connection, scope: Scope, format_id: int, entry_keys: Sequence[bytes], node: Node, now_ms: int
) -> list[Known]:
    """For each key, in the order of `entry_keys`, whether it can be had at `node`, or why not. Four statements."""
    visible = lookup(connection, scope, [format_id], entry_keys, node, now_ms)
    there = {row.entry_key: row for row in connection.execute(_entries(scope, format_id, entry_keys))}
    ended = {
        row.entry_key: Known(Why(row.reason), row.at_ms)
        for row in connection.execute(
            select(tombstone.c.entry_key, tombstone.c.reason, tombstone.c.at_ms).where(
                *owned(tombstone, scope), tombstone.c.format_id == format_id, tombstone.c.entry_key.in_(entry_keys)
            )
        )
    }
    floor = connection.scalar(select(namespace.c.min_decrypt_epoch).where(*owned(namespace, scope))) or 0
    found = []
    for key in entry_keys:
        if key in visible:
            found.append(Known(Why.VISIBLE))
        elif key in there:
            found.append(_hidden(there[key], floor, now_ms))
        else:
            found.append(ended.get(key, Known(Why.UNKNOWN)))
    return found


def canonical_forms(connection: Connection, scope: Scope) -> list[bytes]:
    """The newest formats of a namespace, in canonical form."""
    return list(
        connection.scalars(
            select(kv_format.c.canonical)
            .where(*owned(kv_format, scope))
            .order_by(kv_format.c.format_id.desc())
            .limit(FORMATS_MAX)
        )
    )


def _entries(scope: Scope, format_id: int, entry_keys: Sequence[bytes]) -> Select[Any]:
    placed = exists(
        select(1).where(
            *owned(placement, scope),
            placement.c.blob_id == chunk.c.blob_id,
            placement.c.state.in_(("ok", "due", "writing")),
        )
    ).correlate(chunk)
    home_lives = exists(
        select(1).where(gateway_process.c.boot_id == chunk.c.home_boot, gateway_process.c.left_ms.is_(None))
    ).correlate(chunk)
    return select(
        entry.c.entry_key, entry.c.expires_ms, chunk.c.epoch, placed.label("placed"), home_lives.label("home_lives")
    ).where(
        *owned(entry, scope),
        *owned(chunk, scope),
        entry.c.format_id == format_id,
        entry.c.entry_key.in_(entry_keys),
        chunk.c.blob_id == entry.c.blob_id,
    )


def _hidden(row: Row[*tuple[Any, ...]], floor: int, now_ms: int) -> Known:
    """Why an entry that is there is not visible."""
    if row.expires_ms <= now_ms:
        return Known(Why.EXPIRED, row.expires_ms)
    if row.epoch < floor:
        return Known(Why.EPOCH_CLOSED)
    return Known(Why.ELSEWHERE if row.placed or row.home_lives else Why.LOST)
