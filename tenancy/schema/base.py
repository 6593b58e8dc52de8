"""What the tables share.

Every table of a tenant leads its keys with tenant and namespace, so that no constraint can reveal another tenant's
row. Times are Unix milliseconds. Migrations in ``migrations/`` create these tables; a test compares the two.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from sqlalchemy import (
    Column,
    ColumnElement,
    ForeignKeyConstraint,
    FromClause,
    MetaData,
    Uuid,
)

from tenancy.model import Scope

TENANT_SCOPE: Final = UUID(int=0)
"""The quota row of a whole tenant has this in place of a namespace."""

UNLIMITED: Final = 2**62
"""A quota limit that is never met; kept below 2**63 so that sums fit a BIGINT."""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def owner_columns() -> tuple[Column[object], Column[object]]:
    return (
        Column("tenant_id", Uuid, nullable=False),
        Column("namespace_id", Uuid, nullable=False),
    )


def in_namespace() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(["tenant_id", "namespace_id"], ["namespace.tenant_id", "namespace.namespace_id"])


def owned(table: FromClause, scope: Scope) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """The predicate that every statement on a tenant's table carries: these rows are the namespace's own."""
    return table.c.tenant_id == scope.tenant, table.c.namespace_id == scope.namespace
