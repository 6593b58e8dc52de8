"""The catalog's generation: a copy from before a deletion is recognised when it is put back.

Revision: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("clock_mark", sa.Column("generation", sa.BigInteger(), server_default="0", nullable=False))


def downgrade() -> None:
    op.drop_column("clock_mark", "generation")
