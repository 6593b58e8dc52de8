"""What is used, and by whom: counters for `stat`, the status page, and later billing."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import BigInteger, Connection, bindparam, case, func, literal, select, update

from tenancy import quota
from tenancy.model import Scope, Usage
from tenancy.schema import chunk, entry, kv_format, owned, placement, reservation, unexpired


def namespace_usage(connection: Connection, scope: Scope) -> tuple[Usage, int, int, int]:
    """Quota counters of the namespace, and how many entries, live chunks and formats it has."""
    _, usage = quota.lock(connection, scope)
    counts = [
        connection.scalar(
            select(func.count())
            .select_from(table)
            .where(table.c.tenant_id == scope.tenant, table.c.namespace_id == scope.namespace, *extra)
        )
        for table, extra in ((entry, ()), (chunk, (chunk.c.state == "live",)), (kv_format, ()))
    ]
    return usage, counts[0] or 0, counts[1] or 0, counts[2] or 0


def counted_rows(connection: Connection, scope: Scope) -> Usage:
    """What the counters of the namespace should be, summed up from its rows (law 4)."""
    chunks = connection.execute(
        select(func.coalesce(func.sum(chunk.c.sealed_length), 0), func.count()).where(*owned(chunk, scope))
    ).one()
    reserved = connection.execute(
        select(
            func.coalesce(func.sum(reservation.c.bytes), 0),
            func.coalesce(func.sum(reservation.c.objects), 0),
            func.coalesce(func.sum(reservation.c.s3_bytes), 0),
        ).where(*owned(reservation, scope))
    ).one()
    in_s3 = connection.scalar(
        select(func.coalesce(func.sum(placement.c.length), 0)).where(*owned(placement, scope), placement.c.tier == "s3")
    )
    _, usage = quota.lock(connection, scope)
    return Usage(
        usage.limit_bytes,
        usage.limit_objects,
        usage.limit_s3_bytes,
        int(chunks[0]) + int(reserved[0]),
        int(chunks[1]) + int(reserved[1]),
        int(in_s3 or 0) + int(reserved[2]),
    )


def record_hits(connection: Connection, scope: Scope, hits: Sequence[tuple[int, bytes, int, int]]) -> None:
    """Add gathered hits: (format id, entry key, count, time of the last)."""
    if not hits:
        return
    quota.lock(connection, scope)  # several rows: without it two gateways could wait for each other
    connection.execute(
        update(entry)
        .where(
            *owned(entry, scope),
            entry.c.format_id == bindparam("which_format"),
            entry.c.entry_key == bindparam("which_key"),
        )
        .values(hits=entry.c.hits + bindparam("more"), last_hit_ms=bindparam("last")),
        [{"which_format": fmt, "which_key": key, "more": count, "last": last} for fmt, key, count, last in hits],
    )


def extend(
    connection: Connection, scope: Scope, format_id: int, entry_keys: Sequence[bytes], ttl_ms: int | None, now_ms: int
) -> int:
    """Extend the life of visible entries to now plus `ttl_ms` (None: each entry's own TTL), never shortening it."""
    quota.lock(connection, scope)  # several rows: without it two gateways could wait for each other
    until = (entry.c.ttl_ms if ttl_ms is None else literal(ttl_ms, BigInteger)) + now_ms
    result = connection.execute(
        update(entry)
        .where(
            *owned(entry, scope),
            entry.c.format_id == format_id,
            entry.c.entry_key.in_(entry_keys),
            unexpired(now_ms),
        )
        .values(expires_ms=case((entry.c.expires_ms > until, entry.c.expires_ms), else_=until))
    )
    return result.rowcount
