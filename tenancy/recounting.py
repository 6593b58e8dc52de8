"""Counting anew: the quota counters against the rows that they stand for (law 4), and setting them right.

Counters and rows change in the same transactions, so a difference is a bug or a hand that edited the database. The
count runs under the namespace's lock: writes wait for it, and see either the old counters or the right ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, func, select, update

from tenancy import quota, usage
from tenancy.model import Scope
from tenancy.quota import Change
from tenancy.schema import TENANT_SCOPE
from tenancy.schema import quota as quota_rows


@dataclass(frozen=True, slots=True)
class Drift:
    """By how much counters are off, counter minus rows; all zero when they are right."""

    tenant: UUID
    namespace: UUID | None
    """None: the tenant's own counters, against the sum of its namespaces'."""
    stored_bytes: int
    objects: int
    s3_bytes: int

    @property
    def right(self) -> bool:
        return (self.stored_bytes, self.objects, self.s3_bytes) == (0, 0, 0)


def recount_namespace(connection: Connection, scope: Scope, *, repair: bool) -> Drift:
    """Compare a namespace's counters with its rows; with `repair`, set them, and its tenant's along with them."""
    _, counters = quota.lock(connection, scope)
    rows = usage.counted_rows(connection, scope)
    drift = Drift(
        scope.tenant,
        scope.namespace,
        counters.stored_bytes - rows.stored_bytes,
        counters.objects - rows.objects,
        counters.s3_bytes - rows.s3_bytes,
    )
    if repair and not drift.right:
        change = Change(rows.stored_bytes, rows.objects, rows.s3_bytes)
        _set(connection, scope.tenant, scope.namespace, change)
        _set(connection, scope.tenant, TENANT_SCOPE, _sum(connection, scope.tenant))
    return drift


def recount_tenant(connection: Connection, tenant: UUID, *, repair: bool) -> Drift:
    """Compare a tenant's counters with the sum of its namespaces'; with `repair`, set them."""
    row = connection.execute(
        select(quota_rows.c.stored_bytes, quota_rows.c.objects, quota_rows.c.s3_bytes)
        .where(quota_rows.c.tenant_id == tenant, quota_rows.c.scope_id == TENANT_SCOPE)
        .with_for_update()
    ).one()
    right = _sum(connection, tenant)
    drift = Drift(
        tenant,
        None,
        row.stored_bytes - right.stored_bytes,
        row.objects - right.objects,
        row.s3_bytes - right.s3_bytes,
    )
    if repair and not drift.right:
        _set(connection, tenant, TENANT_SCOPE, right)
    return drift


def _sum(connection: Connection, tenant: UUID) -> Change:
    found = connection.execute(
        select(
            *(
                func.coalesce(func.sum(column), 0)
                for column in (quota_rows.c.stored_bytes, quota_rows.c.objects, quota_rows.c.s3_bytes)
            )
        ).where(quota_rows.c.tenant_id == tenant, quota_rows.c.scope_id != TENANT_SCOPE)
    ).one()
    return Change(*(int(value) for value in found))


def _set(connection: Connection, tenant: UUID, scope_id: UUID, right: Change) -> None:
    connection.execute(
        update(quota_rows)
        .where(quota_rows.c.tenant_id == tenant, quota_rows.c.scope_id == scope_id)
        .values(stored_bytes=right.stored_bytes, objects=right.objects, s3_bytes=right.s3_bytes)
    )
