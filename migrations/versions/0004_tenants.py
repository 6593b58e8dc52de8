"""Tenants: policies, audit log, usage by the hour, deletion jobs, holds.

Revision: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_TENANT = "tenant_id = nullif(current_setting('kvgw.tenant', true), '')::uuid"
_WHOLE = "current_setting('kvgw.audit', true) = 'whole'"

_LIMIT = "BIGINT DEFAULT '0' NOT NULL"
_RATE = "INTEGER DEFAULT '0' NOT NULL"
_NAMESPACE = (
    ("visibility", "VARCHAR(8) DEFAULT 'private' NOT NULL", "visibility IN ('private', 'public')"),
    ("readers", "VARCHAR(4096) DEFAULT '' NOT NULL", ""),
    ("over_quota", "VARCHAR(12) DEFAULT 'reject' NOT NULL", "over_quota IN ('reject', 'make_room')"),
    ("hold_bytes", _LIMIT, "hold_bytes >= 0"),
    ("nvme_bytes", _LIMIT, "nvme_bytes >= 0"),
    ("requests_per_second", _RATE, "requests_per_second >= 0"),
    ("bytes_per_second", _LIMIT, "bytes_per_second >= 0"),
    ("concurrent_requests", _RATE, "concurrent_requests >= 0"),
    ("deletion_allowed", "BOOLEAN DEFAULT true NOT NULL", ""),
)
"""In words that both databases read: SQLite adds and drops a column together with its own check, but no table's."""

_TOKEN = ("name", "not_before_ms", "created_by", "last_used_ms")


def upgrade() -> None:
    for name, kind, rule in _NAMESPACE:
        check = f" CONSTRAINT ck_namespace_{name} CHECK ({rule})" if rule else ""
        op.execute(f"ALTER TABLE namespace ADD COLUMN {name} {kind}{check}")
    op.add_column("api_token", sa.Column("name", sa.String(length=64), server_default="", nullable=False))
    op.add_column("api_token", sa.Column("not_before_ms", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("api_token", sa.Column("created_by", sa.String(length=64), server_default="", nullable=False))
    op.add_column("api_token", sa.Column("last_used_ms", sa.BigInteger(), nullable=True))
    op.add_column("entry", sa.Column("hold_until_ms", sa.BigInteger(), server_default="0", nullable=False))
    _create_audit()
    _create_usage()
    _create_deletion()
    if op.get_context().dialect.name == "postgresql":
        for table in ("usage_hour", "deletion_job", "deletion_blob"):
            _protect(table, _TENANT, _TENANT)
        _protect("audit_record", f"{_TENANT} OR {_WHOLE}", "true")
    _forbid_changes()


def downgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute("DROP FUNCTION audit_is_append_only() CASCADE")
    for table in ("deletion_blob", "deletion_job", "usage_hour", "audit_checkpoint", "audit_head", "audit_record"):
        op.drop_table(table)
    op.drop_column("entry", "hold_until_ms")
    for name in reversed(_TOKEN):
        op.drop_column("api_token", name)
    for name, _, _ in reversed(_NAMESPACE):
        op.drop_column("namespace", name)


def _create_audit() -> None:
    op.create_table(
        "audit_record",
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(length=64), nullable=False),
        sa.Column("action", sa.String(length=48), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=True),
        sa.Column("namespace_id", sa.Uuid(), nullable=True),
        sa.Column("target", sa.String(length=128), nullable=False),
        sa.Column("result", sa.String(length=16), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("previous", sa.LargeBinary(length=32), nullable=False),
        sa.Column("hash", sa.LargeBinary(length=32), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_audit_record")),
    )
    op.create_index("ix_audit_record_tenant", "audit_record", ["tenant_id", "seq"], unique=False)
    op.create_table(
        "audit_head",
        sa.Column("head_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.LargeBinary(length=32), nullable=False),
        sa.CheckConstraint("head_id = 1", name=op.f("ck_audit_head_single")),
        sa.PrimaryKeyConstraint("head_id", name=op.f("pk_audit_head")),
    )
    # Not a parameter: in a script made offline it would be a text with NUL characters.
    postgres = op.get_context().dialect.name == "postgresql"
    zeros = sa.literal_column("decode(repeat('00', 32), 'hex')" if postgres else "zeroblob(32)")
    head = sa.table("audit_head", sa.column("head_id"), sa.column("seq"), sa.column("hash"))
    op.execute(sa.insert(head).values(head_id=sa.literal_column("1"), seq=sa.literal_column("0"), hash=zeros))
    op.create_table(
        "audit_checkpoint",
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_audit_checkpoint")),
    )


def _create_usage() -> None:
    op.create_table(
        "usage_hour",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("namespace_id", sa.Uuid(), nullable=False),
        sa.Column("hour_ms", sa.BigInteger(), nullable=False),
        sa.Column("meter", sa.String(length=32), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("amount >= 0", name=op.f("ck_usage_hour_amount")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "namespace_id"],
            ["namespace.tenant_id", "namespace.namespace_id"],
            name=op.f("fk_usage_hour_namespace"),
        ),
        sa.PrimaryKeyConstraint("tenant_id", "namespace_id", "hour_ms", "meter", name=op.f("pk_usage_hour")),
    )


def _create_deletion() -> None:
    op.create_table(
        "deletion_job",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("namespace_id", sa.Uuid(), nullable=False),
        sa.Column("job_id", sa.LargeBinary(length=16), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("selector", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("requested_by", sa.String(length=64), nullable=False),
        sa.Column("requested_ms", sa.BigInteger(), nullable=False),
        sa.Column("finished_ms", sa.BigInteger(), nullable=True),
        sa.Column("entries", sa.BigInteger(), nullable=False),
        sa.Column("chunks", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("retained", sa.BigInteger(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("receipt", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "kind IN ('keys', 'prefix', 'label', 'format', 'age', 'namespace', 'tenant')",
            name=op.f("ck_deletion_job_kind"),
        ),
        sa.CheckConstraint(
            "state IN ('removing', 'erasing', 'verifying', 'done', 'failed')", name=op.f("ck_deletion_job_state")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "namespace_id", "job_id", name=op.f("pk_deletion_job")),
    )
    op.create_index("ix_deletion_job_requested", "deletion_job", ["tenant_id", "requested_ms"], unique=False)
    op.create_table(
        "deletion_blob",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("namespace_id", sa.Uuid(), nullable=False),
        sa.Column("job_id", sa.LargeBinary(length=16), nullable=False),
        sa.Column("blob_id", sa.LargeBinary(length=16), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "namespace_id", "job_id"],
            ["deletion_job.tenant_id", "deletion_job.namespace_id", "deletion_job.job_id"],
            name="fk_deletion_blob_job",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("tenant_id", "namespace_id", "job_id", "blob_id", name=op.f("pk_deletion_blob")),
    )


def _protect(table: str, visible: str, writable: str) -> None:
    op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY tenant_rows ON {table} USING ({visible}) WITH CHECK ({writable})")


def _forbid_changes() -> None:
    """Audit records are never changed nor deleted, by whomever."""
    if op.get_context().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'audit records are only ever added'; END $$"
        )
        op.execute(
            "CREATE TRIGGER audit_record_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_record "
            "FOR EACH STATEMENT EXECUTE FUNCTION audit_is_append_only()"
        )
        return
    for act in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER audit_record_no_{act.lower()} BEFORE {act} ON audit_record "
            "BEGIN SELECT RAISE(ABORT, 'audit records are only ever added'); END"
        )
