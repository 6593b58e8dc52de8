"""A cold start: forget every chunk, keep tenants, namespaces, tokens, formats and policies."""

from __future__ import annotations

from sqlalchemy import Connection, delete

from tenancy import quota
from tenancy.model import Scope
from tenancy.schema import chunk, entry, entry_label, owned, placement, reservation, tombstone

_FORGOTTEN = (entry_label, entry, placement, chunk, reservation, tombstone)
"""Children first."""


def forget_chunks(connection: Connection, scope: Scope) -> int:
    """Drop all chunks of a namespace with everything that points at them; how many there were."""
    usage = quota.lock(connection, scope)[1]
    gone = 0
    for table in _FORGOTTEN:
        dropped = connection.execute(delete(table).where(*owned(table, scope))).rowcount
        gone = dropped if table is chunk else gone
    quota.apply(connection, scope, quota.Change(-usage.stored_bytes, -usage.objects, -usage.s3_bytes))
    return gone
