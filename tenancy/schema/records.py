"""Tables of what was done: the audit log and its checkpoints, usage by the hour, deletion jobs."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    Uuid,
)

from tenancy.schema.base import in_namespace, metadata, owner_columns

audit_record = Table(
    "audit_record",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("actor", String(64), nullable=False),
    Column("action", String(48), nullable=False),
    Column("tenant_id", Uuid),
    Column("namespace_id", Uuid),
    Column("target", String(128), nullable=False),
    Column("result", String(16), nullable=False),
    Column("detail", Text, nullable=False),
    Column("previous", LargeBinary(32), nullable=False),
    Column("hash", LargeBinary(32), nullable=False),
    Index("ix_audit_record_tenant", "tenant_id", "seq"),
)
"""Each row's hash covers the row and the hash before it. Rows are only ever added: triggers and grants see to it."""

audit_head = Table(
    "audit_head",
    metadata,
    Column("head_id", BigInteger, primary_key=True, autoincrement=False),
    Column("seq", BigInteger, nullable=False),
    Column("hash", LargeBinary(32), nullable=False),
    CheckConstraint("head_id = 1", name="single"),
)
"""The end of the chain; locked by whoever appends to it."""

audit_checkpoint = Table(
    "audit_checkpoint",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("note", Text, nullable=False),
)
"""Signed statements of what the chain was, copied outside the database."""

usage_hour = Table(
    "usage_hour",
    metadata,
    *owner_columns(),
    Column("hour_ms", BigInteger, nullable=False),
    Column("meter", String(32), nullable=False),
    Column("amount", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant_id", "namespace_id", "hour_ms", "meter"),
    in_namespace(),
    CheckConstraint("amount >= 0", name="amount"),
)
"""One number per meter and hour, added up by every gateway."""

deletion_job = Table(
    "deletion_job",
    metadata,
    *owner_columns(),
    Column("job_id", LargeBinary(16), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("selector", Text, nullable=False),
    Column("state", String(12), nullable=False),
    Column("requested_by", String(64), nullable=False),
    Column("requested_ms", BigInteger, nullable=False),
    Column("finished_ms", BigInteger),
    Column("entries", BigInteger, nullable=False),
    Column("chunks", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("retained", BigInteger, nullable=False),
    Column("note", Text, nullable=False),
    Column("receipt", Text),
    PrimaryKeyConstraint("tenant_id", "namespace_id", "job_id"),
    CheckConstraint("kind IN ('keys', 'prefix', 'label', 'format', 'age', 'namespace', 'tenant')", name="kind"),
    CheckConstraint("state IN ('removing', 'erasing', 'verifying', 'done', 'failed')", name="state"),
    Index("ix_deletion_job_requested", "tenant_id", "requested_ms"),
)
"""A deletion that leaves a receipt. Its namespace may be gone when it is done, or be all of the tenant's (id zero)."""

deletion_blob = Table(
    "deletion_blob",
    metadata,
    *owner_columns(),
    Column("job_id", LargeBinary(16), nullable=False),
    Column("blob_id", LargeBinary(16), nullable=False),
    PrimaryKeyConstraint("tenant_id", "namespace_id", "job_id", "blob_id"),
    ForeignKeyConstraint(
        ["tenant_id", "namespace_id", "job_id"],
        ["deletion_job.tenant_id", "deletion_job.namespace_id", "deletion_job.job_id"],
        name="fk_deletion_blob_job",
        ondelete="CASCADE",
    ),
)
"""The blobs that a job must see gone from every tier; dropped when its receipt is written."""
