"""Several gateways: who is alive, who does which shared job; on PostgreSQL, row-level security.

Revision: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TENANT_TABLES = (
    "namespace",
    "namespace_key",
    "kv_format",
    "chunk",
    "entry",
    "entry_label",
    "placement",
    "reservation",
    "quota",
    "tombstone",
)

_TENANT = "tenant_id = nullif(current_setting('kvgw.tenant', true), '')::uuid"
_LOOKED_UP = "token_id = nullif(current_setting('kvgw.token', true), '')"


def upgrade() -> None:
    op.add_column("gateway_process", sa.Column("left_ms", sa.BigInteger(), nullable=True))
    op.add_column("gateway_process", sa.Column("alone", sa.String(length=64), nullable=True))
    op.create_table(
        "maintenance_lease",
        sa.Column("job", sa.String(length=32), nullable=False),
        sa.Column("owner", sa.String(length=32), nullable=False),
        sa.Column("until_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job", name=op.f("pk_maintenance_lease")),
    )
    if op.get_context().dialect.name == "postgresql":
        for table in TENANT_TABLES:
            _protect(table, _TENANT)
        # A token is looked up before its tenant is known: then its own row is all that can be seen.
        _protect("api_token", f"{_TENANT} OR {_LOOKED_UP}")


def downgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        for table in (*TENANT_TABLES, "api_token"):
            op.execute(f"DROP POLICY tenant_rows ON {table}")
            op.execute(f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY")
            op.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
    op.drop_table("maintenance_lease")
    op.drop_column("gateway_process", "alone")
    op.drop_column("gateway_process", "left_ms")


def _protect(table: str, visible: str) -> None:
    op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY tenant_rows ON {table} USING ({visible}) WITH CHECK ({_TENANT})")
