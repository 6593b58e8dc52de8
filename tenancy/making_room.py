"""Making room inside a quota: a namespace whose policy says so gives up its own least valuable entries for new ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, select

from tenancy import quota
from tenancy.model import Scope, Usage
from tenancy.removal import EntryName, remove_entries
from tenancy.schema import chunk, entry, owned

FULL: Final = 0.90
"""From here on room is made in the background."""
ROOMY: Final = 0.80
"""And until here."""
AT_ONCE: Final = 256
"""Entries that end in one transaction."""


def make_room(connection: Connection, scope: Scope, now_ms: int) -> list[bytes]:
    """End expired entries, then the least valuable ones, until the namespace's own quota is roomy; unneeded blobs.

    At most `AT_ONCE` entries. Nothing ends below `FULL`. Entries under a hold stay. Longest unused
    first; where use is equal a chain goes from its tail, so that no entry outlives one that it continues. A tenant's
    quota that others of its namespaces fill is no reason: giving up these entries would not empty it.
    """
    _, own = quota.lock(connection, scope)
    leaving = _leaving(connection, scope)
    if _share(own, leaving) < FULL:
        return []
    rows = connection.execute(
        select(
            entry.c.format_id,
            entry.c.entry_key,
            entry.c.blob_id,
            entry.c.expires_ms,
            entry.c.last_hit_ms,
            chunk.c.sealed_length,
        )
        .where(
            *owned(entry, scope),
            *owned(chunk, scope),
            chunk.c.blob_id == entry.c.blob_id,
            chunk.c.state == "live",
            entry.c.hold_until_ms <= now_ms,
        )
        .order_by((entry.c.expires_ms > now_ms), entry.c.last_hit_ms, entry.c.depth.desc())
        .limit(AT_ONCE)
    ).all()
    expired = [(row.format_id, row.entry_key) for row in rows if row.expires_ms <= now_ms]
    dead = remove_entries(connection, scope, expired, "expired", now_ms)
    living = [_Living((row.format_id, row.entry_key), row.blob_id, row.sealed_length) for row in rows[len(expired) :]]
    freed = leaving | {row.blob_id: row.sealed_length for row in rows[: len(expired)]}
    dead += remove_entries(connection, scope, _chosen(own, living, freed), "evicted", now_ms)
    return dead


def leaving(connection: Connection, scope: Scope) -> int:
    """Chunks that are charged still though nothing points at them: they end with the sweep."""
    return len(_leaving(connection, scope))


@dataclass(frozen=True, slots=True)
class _Living:
    name: EntryName
    blob_id: bytes
    length: int


def _chosen(own: Usage, living: Sequence[_Living], freed: Mapping[bytes, int]) -> list[EntryName]:
    """As many of the least valuable as bring the namespace's quota to `ROOMY`."""
    gone = dict(freed)
    chosen: list[EntryName] = []
    for one in living:  # at most a transaction's worth
        if _share(own, gone) <= ROOMY:
            break
        gone[one.blob_id] = one.length
        chosen.append(one.name)
    return chosen


def _leaving(connection: Connection, scope: Scope) -> dict[bytes, int]:
    """Chunks that are charged still and wait for the sweep: sealed length by blob id."""
    rows = connection.execute(
        select(chunk.c.blob_id, chunk.c.sealed_length).where(*owned(chunk, scope), chunk.c.state == "deleting")
    )
    return {row.blob_id: row.sealed_length for row in rows}


def _share(usage: Usage, gone: Mapping[bytes, int]) -> float:
    """How full a quota will be when these chunks are gone."""
    less = sum(gone.values())
    return max(
        (usage.stored_bytes - less) / usage.limit_bytes,
        (usage.objects - len(gone)) / usage.limit_objects,
        (usage.s3_bytes - less) / usage.limit_s3_bytes,
    )
