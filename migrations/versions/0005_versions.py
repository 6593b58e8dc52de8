"""Versions of tenants, and who has seen which: several gateways may answer matches from memory.

Revision: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_TENANT = "tenant_id = nullif(current_setting('kvgw.tenant', true), '')::uuid"
_EVERY = "current_setting('kvgw.versions', true) = 'every'"
"""A gateway looks at the versions of all tenants that it remembers at once."""


def upgrade() -> None:
    # Gateways of the release before raise no versions: while one of them lives, nothing is answered from memory.
    op.add_column("gateway_process", sa.Column("coherent", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.create_table(
        "tenant_version",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("version >= 0", name=op.f("ck_tenant_version_version")),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_tenant_version")),
    )
    op.create_table(
        "version_seen",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("boot_id", sa.String(length=32), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("version >= 0", name=op.f("ck_version_seen_version")),
        sa.PrimaryKeyConstraint("tenant_id", "boot_id", name=op.f("pk_version_seen")),
    )
    if op.get_context().dialect.name == "postgresql":
        _protect("tenant_version", f"{_TENANT} OR {_EVERY}", _TENANT)
        _protect("version_seen", f"{_TENANT} OR {_EVERY}", f"{_TENANT} OR {_EVERY}")


def downgrade() -> None:
    op.drop_table("version_seen")
    op.drop_table("tenant_version")
    op.drop_column("gateway_process", "coherent")


def _protect(table: str, visible: str, writable: str) -> None:
    op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY tenant_rows ON {table} USING ({visible}) WITH CHECK ({writable})")
