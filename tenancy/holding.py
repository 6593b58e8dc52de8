"""Holds: entries of a paused session, kept from eviction for a while and within a quota of their own.

A hold defers eviction, not expiry and not deletion. What its namespace may hold is summed from the rows under the
namespace's lock, so that there is no counter to go wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, func, select, update

from tenancy import quota
from tenancy.model import Scope
from tenancy.schema import chunk, entry, namespace, owned, unexpired


def hold(
    connection: Connection, scope: Scope, format_id: int, entry_keys: Sequence[bytes], until_ms: int, now_ms: int
) -> int:
    """Hold the leading run of `entry_keys` that is there and fits the namespace's hold quota; its length.

    `until_ms` not in the future ends holds instead, of all of the keys.
    """
    quota.lock(connection, scope)
    there = {
        row.entry_key: row
        for row in connection.execute(
            select(entry.c.entry_key, entry.c.blob_id, entry.c.hold_until_ms, chunk.c.sealed_length).where(
                *owned(entry, scope),
                *owned(chunk, scope),
                entry.c.format_id == format_id,
                entry.c.entry_key.in_(entry_keys),
                unexpired(now_ms),
                chunk.c.blob_id == entry.c.blob_id,
                chunk.c.state == "live",
            )
        )
    }
    if until_ms <= now_ms:
        return _set(connection, scope, format_id, [key for key in entry_keys if key in there], 0)
    room = _room(connection, scope, now_ms)
    run: list[bytes] = []
    for key in entry_keys:
        row = there.get(key)
        if row is None:
            break
        if row.hold_until_ms <= now_ms:
            room -= row.sealed_length
        if room < 0:
            break
        run.append(key)
    return _set(connection, scope, format_id, run, until_ms)


def _room(connection: Connection, scope: Scope, now_ms: int) -> int:
    """Bytes that may still come under a hold."""
    limit = connection.scalar(select(namespace.c.hold_bytes).where(*owned(namespace, scope))) or 0
    held = connection.scalar(
        select(func.coalesce(func.sum(chunk.c.sealed_length), 0)).where(
            *owned(entry, scope),
            *owned(chunk, scope),
            entry.c.hold_until_ms > now_ms,
            chunk.c.blob_id == entry.c.blob_id,
        )
    )
    return int(limit) - int(held or 0)


def _set(connection: Connection, scope: Scope, format_id: int, entry_keys: Sequence[bytes], until_ms: int) -> int:
    if not entry_keys:
        return 0
    return connection.execute(
        update(entry)
        .where(*owned(entry, scope), entry.c.format_id == format_id, entry.c.entry_key.in_(entry_keys))
        .values(hold_until_ms=until_ms)
    ).rowcount
