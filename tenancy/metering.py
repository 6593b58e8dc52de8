"""Usage by the hour: what each namespace asked for and kept, added up by every gateway.

One number per namespace, hour and meter. Gateways gather in memory and add here every few seconds; two that add at
once both count. Hours begin at whole hours of UTC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, delete, func, select, true
from sqlalchemy.dialects import postgresql, sqlite

from tenancy.errors import RegistryRefused
from tenancy.model import Scope
from tenancy.schema import namespace, owned, quota, usage_hour

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 86_400_000
KEPT_DAYS: Final = 400
ROWS_MAX: Final = 100_000
"""Sums in one answer."""

METERS: Final = (
    "lookups",
    "matched_keys",
    "missed_keys",
    "matched_tokens",
    "missed_tokens",
    "gets",
    "get_chunks",
    "get_missed",
    "get_bytes_staging",
    "get_bytes_nvme",
    "get_bytes_s3",
    "puts",
    "put_chunks",
    "put_bytes",
    "deleted_chunks",
    "limit_hits",
    "kv_byte_hours",
    "s3_byte_hours",
)
"""All there are. Keys and tokens count in matches, chunks in GETs and PUTs; bytes are plaintext. `limit_hits` are
chunks that a quota refused. Byte-hours are of sealed bytes, as quotas count them."""

Bucket = Literal["hour", "day", "month"]
Amounts = Mapping[tuple[UUID, int, str], int]
"""By namespace, hour (its first millisecond) and meter."""


@dataclass(frozen=True, slots=True)
class Sum:
    """The sums of one namespace in one bucket of time."""

    namespace: str
    bucket_ms: int
    """Its first millisecond, in UTC."""
    amounts: dict[str, int]


def add(connection: Connection, tenant_id: UUID, amounts: Amounts) -> None:
    """Add to the sums of one tenant. What belongs to a namespace that is gone is dropped."""
    there = set(connection.scalars(select(namespace.c.namespace_id).where(namespace.c.tenant_id == tenant_id)))
    # In one order, so that two gateways that add at once never wait for each other.
    rows = [
        {"tenant_id": tenant_id, "namespace_id": key[0], "hour_ms": key[1], "meter": key[2], "amount": amount}
        for key, amount in sorted(amounts.items())
        if key[0] in there and amount > 0
    ]
    if not rows:
        return
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = dialect.insert(usage_hour)
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["tenant_id", "namespace_id", "hour_ms", "meter"],
            set_={"amount": usage_hour.c.amount + statement.excluded.amount},
        ),
        rows,
    )


def sample(connection: Connection, tenant_id: UUID, elapsed_ms: int, now_ms: int) -> None:
    """Count what every namespace of a tenant keeps now as kept for `elapsed_ms`."""
    hour_ms = now_ms - now_ms % HOUR_MS
    kept: dict[tuple[UUID, int, str], int] = {}
    for row in connection.execute(
        select(quota.c.scope_id, quota.c.stored_bytes, quota.c.s3_bytes).where(quota.c.tenant_id == tenant_id)
    ):
        kept[row.scope_id, hour_ms, "kv_byte_hours"] = row.stored_bytes * elapsed_ms // HOUR_MS
        kept[row.scope_id, hour_ms, "s3_byte_hours"] = row.s3_bytes * elapsed_ms // HOUR_MS
    add(connection, tenant_id, kept)


def sums(
    connection: Connection,
    tenant_id: UUID,
    namespace_id: UUID | None,
    since_ms: int,
    until_ms: int,
    by: Bucket,
) -> list[Sum]:
    """Sums by namespace and time, in that order. Raises `RegistryRefused` when there are more than `ROWS_MAX`."""
    step = HOUR_MS if by == "hour" else DAY_MS
    bucket: ColumnElement[int] = (usage_hour.c.hour_ms - usage_hour.c.hour_ms % step).label("bucket")
    chosen = true() if namespace_id is None else usage_hour.c.namespace_id == namespace_id
    rows = connection.execute(
        select(namespace.c.name, bucket, usage_hour.c.meter, func.sum(usage_hour.c.amount).label("amount"))
        .where(
            usage_hour.c.tenant_id == tenant_id,
            namespace.c.tenant_id == tenant_id,
            namespace.c.namespace_id == usage_hour.c.namespace_id,
            chosen,
            usage_hour.c.hour_ms >= since_ms - since_ms % step,
            usage_hour.c.hour_ms < until_ms,
        )
        .group_by(namespace.c.name, bucket, usage_hour.c.meter)
        .order_by(namespace.c.name, bucket)
        .limit(ROWS_MAX + 1)
    ).all()
    if len(rows) > ROWS_MAX:
        raise RegistryRefused(f"that are more than {ROWS_MAX} sums: name a namespace, a shorter time, or larger steps")
    return _folded([(row.name, row.bucket, row.meter, int(row.amount)) for row in rows], by)


def forget(connection: Connection, scope: Scope, before_ms: int) -> int:
    """Drop the sums of hours before `before_ms`; how many there were."""
    return connection.execute(
        delete(usage_hour).where(*owned(usage_hour, scope), usage_hour.c.hour_ms < before_ms)
    ).rowcount


def _folded(rows: Sequence[tuple[str, int, str, int]], by: Bucket) -> list[Sum]:
    found: dict[tuple[str, int], dict[str, int]] = {}
    for name, start_ms, meter, amount in rows:
        bucket_ms = _month_of(start_ms) if by == "month" else start_ms
        amounts = found.setdefault((name, bucket_ms), {})
        amounts[meter] = amounts.get(meter, 0) + amount
    return [Sum(name, bucket_ms, amounts) for (name, bucket_ms), amounts in found.items()]


def _month_of(time_ms: int) -> int:
    day = datetime.fromtimestamp(time_ms / 1000, UTC)
    return int(day.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()) * 1000
