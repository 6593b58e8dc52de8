"""The catalog: tenants, keys, formats, chunks, entries, placements, quota.

Revision: 0001
Revises: none
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "clock_mark",
        sa.Column("mark_id", sa.Integer(), nullable=False),
        sa.Column("high_water_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("mark_id = 1", name=op.f("ck_clock_mark_single")),
        sa.PrimaryKeyConstraint("mark_id", name=op.f("pk_clock_mark")),
    )
    op.create_table(
        "gateway_process",
        sa.Column("boot_id", sa.String(length=32), nullable=False),
        sa.Column("node", sa.String(length=64), nullable=False),
        sa.Column("version", sa.String(length=32), nullable=False),
        sa.Column("started_ms", sa.BigInteger(), nullable=False),
        sa.Column("heartbeat_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("boot_id", name=op.f("pk_gateway_process")),
    )
    op.create_table(
        "tenant",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("state IN ('active', 'suspended', 'deleting')", name=op.f("ck_tenant_state")),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_tenant")),
        sa.UniqueConstraint("name", name=op.f("uq_tenant_name")),
    )
    op.create_table(
        "api_token",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("token_id", sa.String(length=16), nullable=False),
        sa.Column("digest", sa.LargeBinary(length=32), nullable=False),
        sa.Column("permissions", sa.String(length=512), nullable=False),
        sa.Column("namespaces", sa.String(length=1024), nullable=False),
        sa.Column("default_namespace", sa.String(length=64), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_ms", sa.BigInteger(), nullable=False),
        sa.Column("revoked_ms", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.tenant_id"], name=op.f("fk_api_token_tenant")),
        sa.PrimaryKeyConstraint("tenant_id", "token_id", name=op.f("pk_api_token")),
    )
    op.create_index("ix_api_token_lookup", "api_token", ["token_id"], unique=False)
    op.create_table(
        "namespace",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("namespace_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("durability", sa.String(length=8), nullable=False),
        sa.Column("default_ttl_ms", sa.BigInteger(), nullable=False),
        sa.Column("max_ttl_ms", sa.BigInteger(), nullable=False),
        sa.Column("sliding_ttl", sa.Boolean(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("min_decrypt_epoch", sa.Integer(), nullable=False),
        sa.Column("min_encrypt_epoch", sa.Integer(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("durability IN ('staged', 'nvme', 's3')", name=op.f("ck_namespace_durability")),
        sa.CheckConstraint("state IN ('active', 'suspended', 'deleting')", name=op.f("ck_namespace_state")),
        sa.CheckConstraint("default_ttl_ms > 0 AND default_ttl_ms <= max_ttl_ms", name=op.f("ck_namespace_ttl")),
        sa.CheckConstraint(
            "epoch >= min_encrypt_epoch AND min_encrypt_epoch >= min_decrypt_epoch", name=op.f("ck_namespace_epoch")
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.tenant_id"], name=op.f("fk_namespace_tenant")),
        sa.PrimaryKeyConstraint("tenant_id", "namespace_id", name=op.f("pk_namespace")),
        sa.UniqueConstraint("tenant_id", "name", name=op.f("uq_namespace_tenant_id_name")),
    )
    op.create_table(
        "quota",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("scope_id", sa.Uuid(), nullable=False),
        sa.Column("limit_bytes", sa.BigInteger(), nullable=False),
        sa.Column("limit_objects", sa.BigInteger(), nullable=False),
        sa.Column("limit_s3_bytes", sa.BigInteger(), nullable=False),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False),
        sa.Column("objects", sa.BigInteger(), nullable=False),
        sa.Column("s3_bytes", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "limit_bytes >= 0 AND limit_objects >= 0 AND limit_s3_bytes >= 0", name=op.f("ck_quota_limits")
        ),
        sa.CheckConstraint("stored_bytes >= 0 AND objects >= 0 AND s3_bytes >= 0", name=op.f("ck_quota_counters")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.tenant_id"], name=op.f("fk_quota_tenant")),
        sa.PrimaryKeyConstraint("tenant_id", "scope_id", name=op.f("pk_quota")),
    )
    op.create_table(
        "kv_format",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("namespace_id", sa.Uuid(), nullable=False),
        sa.Column("format_id", sa.Integer(), nullable=False),
        sa.Column("fingerprint", sa.LargeBinary(length=32), nullable=False),
        sa.Column("canonical", sa.LargeBinary(), nullable=False),
        sa.Column("model", sa.String(length=1024), nullable=False),
        sa.Column("weights", sa.String(length=1024), nullable=False),
        sa.Column("tokenizer", sa.String(length=1024), nullable=False),
        sa.Column("kv_dtype", sa.String(length=32), nullable=False),
        sa.Column("kv_quantisation", sa.String(length=1024), nullable=True),
        sa.Column("adapter", sa.String(length=1024), nullable=True),
        sa.Column("adapter_digest", sa.String(length=1024), nullable=True),
        sa.Column("engine", sa.String(length=1024), nullable=False),
        sa.Column("engine_abi", sa.String(length=1024), nullable=False),
        sa.Column("layout", sa.String(length=1024), nullable=False),
        sa.Column("tokens_per_chunk", sa.BigInteger(), nullable=False),
        sa.Column("chunk_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("(adapter IS NULL) = (adapter_digest IS NULL)", name=op.f("ck_kv_format_adapter")),
        sa.CheckConstraint("chunk_bytes > 0 AND tokens_per_chunk > 0", name=op.f("ck_kv_format_sizes")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "namespace_id"],
            ["namespace.tenant_id", "namespace.namespace_id"],
            name=op.f("fk_kv_format_namespace"),
        ),
        sa.PrimaryKeyConstraint("tenant_id", "namespace_id", "format_id", name=op.f("pk_kv_format")),
        sa.UniqueConstraint(
            "tenant_id", "namespace_id", "fingerprint", name=op.f("uq_kv_format_tenant_id_namespace_id_fingerprint")
        ),
    )
    op.create_table(
        "namespace_key",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("namespace_id", sa.Uuid(), nullable=False),
        sa.Column("purpose", sa.String(length=8), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("wrapped", sa.LargeBinary(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("purpose IN ('data', 'id')", name=op.f("ck_namespace_key_purpose")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "namespace_id"],
            ["namespace.tenant_id", "namespace.namespace_id"],
            name=op.f("fk_namespace_key_namespace"),
        ),
        sa.PrimaryKeyConstraint("tenant_id", "namespace_id", "purpose", "epoch", name=op.f("pk_namespace_key")),
    )
    op.create_table(
        "reservation",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("namespace_id", sa.Uuid(), nullable=False),
        sa.Column("reservation_id", sa.LargeBinary(length=16), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("objects", sa.Integer(), nullable=False),
        sa.Column("s3_bytes", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.String(length=32), nullable=False),
        sa.Column("expires_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("bytes > 0 AND objects > 0", name=op.f("ck_reservation_sizes")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "namespace_id"],
            ["namespace.tenant_id", "namespace.namespace_id"],
            name=op.f("fk_reservation_namespace"),
        ),
        sa.PrimaryKeyConstraint("tenant_id", "namespace_id", "reservation_id", name=op.f("pk_reservation")),
    )
    op.create_table(
        "tombstone",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("namespace_id", sa.Uuid(), nullable=False),
        sa.Column("format_id", sa.Integer(), nullable=False),
        sa.Column("entry_key", sa.LargeBinary(length=32), nullable=False),
        sa.Column("reason", sa.String(length=12), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("reason IN ('deleted', 'expired', 'evicted', 'lost')", name=op.f("ck_tombstone_reason")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "namespace_id"],
            ["namespace.tenant_id", "namespace.namespace_id"],
            name=op.f("fk_tombstone_namespace"),
        ),
        sa.PrimaryKeyConstraint("tenant_id", "namespace_id", "format_id", "entry_key", name=op.f("pk_tombstone")),
    )
    op.create_index("ix_tombstone_age", "tombstone", ["tenant_id", "namespace_id", "at_ms"], unique=False)
    op.create_table(
        "chunk",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("namespace_id", sa.Uuid(), nullable=False),
        sa.Column("blob_id", sa.LargeBinary(length=16), nullable=False),
        sa.Column("format_id", sa.Integer(), nullable=False),
        sa.Column("chunk_id", sa.LargeBinary(length=32), nullable=False),
        sa.Column("salt", sa.LargeBinary(length=32), nullable=False),
        sa.Column("tag_root", sa.LargeBinary(length=32), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("seg_log2", sa.Integer(), nullable=False),
        sa.Column("length", sa.BigInteger(), nullable=False),
        sa.Column("sealed_length", sa.BigInteger(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("home_node", sa.String(length=64), nullable=False),
        sa.Column("home_boot", sa.String(length=32), nullable=False),
        sa.Column("durability", sa.String(length=8), nullable=False),
        sa.Column("state", sa.String(length=8), nullable=False),
        sa.CheckConstraint("durability IN ('staged', 'nvme', 's3')", name=op.f("ck_chunk_durability")),
        sa.CheckConstraint("state IN ('live', 'deleting')", name=op.f("ck_chunk_state")),
        sa.CheckConstraint("length > 0 AND sealed_length > length", name=op.f("ck_chunk_length")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "namespace_id", "format_id"],
            ["kv_format.tenant_id", "kv_format.namespace_id", "kv_format.format_id"],
            name="fk_chunk_kv_format",
        ),
        sa.PrimaryKeyConstraint("tenant_id", "namespace_id", "blob_id", name=op.f("pk_chunk")),
    )
    op.create_index(
        "ix_chunk_deleting",
        "chunk",
        ["tenant_id", "namespace_id"],
        unique=False,
        sqlite_where=sa.text("state = 'deleting'"),
        postgresql_where=sa.text("state = 'deleting'"),
    )
    op.create_index(
        "uq_chunk_live_content",
        "chunk",
        ["tenant_id", "namespace_id", "format_id", "chunk_id", "epoch"],
        unique=True,
        sqlite_where=sa.text("state = 'live'"),
        postgresql_where=sa.text("state = 'live'"),
    )
    op.create_table(
        "entry",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("namespace_id", sa.Uuid(), nullable=False),
        sa.Column("format_id", sa.Integer(), nullable=False),
        sa.Column("entry_key", sa.LargeBinary(length=32), nullable=False),
        sa.Column("blob_id", sa.LargeBinary(length=16), nullable=False),
        sa.Column("parent", sa.LargeBinary(length=32), nullable=True),
        sa.Column("depth", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("ttl_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_ms", sa.BigInteger(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("last_hit_ms", sa.BigInteger(), nullable=False),
        sa.Column("hits", sa.BigInteger(), nullable=False),
        sa.Column("writer", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "namespace_id", "blob_id"],
            ["chunk.tenant_id", "chunk.namespace_id", "chunk.blob_id"],
            name="fk_entry_chunk",
        ),
        sa.PrimaryKeyConstraint("tenant_id", "namespace_id", "format_id", "entry_key", name=op.f("pk_entry")),
    )
    op.create_index("ix_entry_blob", "entry", ["tenant_id", "namespace_id", "blob_id"], unique=False)
    op.create_index("ix_entry_expiry", "entry", ["tenant_id", "namespace_id", "expires_ms"], unique=False)
    op.create_index("ix_entry_value", "entry", ["tenant_id", "namespace_id", "last_hit_ms"], unique=False)
    op.create_table(
        "placement",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("namespace_id", sa.Uuid(), nullable=False),
        sa.Column("blob_id", sa.LargeBinary(length=16), nullable=False),
        sa.Column("tier", sa.String(length=8), nullable=False),
        sa.Column("node", sa.String(length=64), nullable=False),
        sa.Column("object", sa.String(length=256), nullable=False),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.Column("length", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("owner", sa.String(length=32), nullable=True),
        sa.Column("lease_ms", sa.BigInteger(), nullable=True),
        sa.Column("not_before_ms", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("updated_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "(state = 'writing') = (owner IS NOT NULL AND lease_ms IS NOT NULL)", name=op.f("ck_placement_lease")
        ),
        sa.CheckConstraint(
            "state IN ('due', 'writing', 'ok', 'doomed', 'quarantined')", name=op.f("ck_placement_state")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "namespace_id", "blob_id"],
            ["chunk.tenant_id", "chunk.namespace_id", "chunk.blob_id"],
            name="fk_placement_chunk",
        ),
        sa.PrimaryKeyConstraint("tenant_id", "namespace_id", "blob_id", "tier", "node", name=op.f("pk_placement")),
    )
    op.create_index(
        "ix_placement_work",
        "placement",
        ["tenant_id", "namespace_id", "tier", "state"],
        unique=False,
        sqlite_where=sa.text("state <> 'ok'"),
        postgresql_where=sa.text("state <> 'ok'"),
    )
    op.create_table(
        "entry_label",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("namespace_id", sa.Uuid(), nullable=False),
        sa.Column("label_mac", sa.LargeBinary(length=32), nullable=False),
        sa.Column("format_id", sa.Integer(), nullable=False),
        sa.Column("entry_key", sa.LargeBinary(length=32), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "namespace_id", "format_id", "entry_key"],
            ["entry.tenant_id", "entry.namespace_id", "entry.format_id", "entry.entry_key"],
            name="fk_entry_label_entry",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint(
            "tenant_id", "namespace_id", "label_mac", "format_id", "entry_key", name=op.f("pk_entry_label")
        ),
    )
    op.create_index(
        "ix_entry_label_entry", "entry_label", ["tenant_id", "namespace_id", "format_id", "entry_key"], unique=False
    )


def downgrade() -> None:

    op.drop_index("ix_entry_label_entry", table_name="entry_label")
    op.drop_table("entry_label")
    op.drop_index(
        "ix_placement_work",
        table_name="placement",
        sqlite_where=sa.text("state <> 'ok'"),
        postgresql_where=sa.text("state <> 'ok'"),
    )
    op.drop_table("placement")
    op.drop_index("ix_entry_value", table_name="entry")
    op.drop_index("ix_entry_expiry", table_name="entry")
    op.drop_index("ix_entry_blob", table_name="entry")
    op.drop_table("entry")
    op.drop_index(
        "uq_chunk_live_content",
        table_name="chunk",
        sqlite_where=sa.text("state = 'live'"),
        postgresql_where=sa.text("state = 'live'"),
    )
    op.drop_index(
        "ix_chunk_deleting",
        table_name="chunk",
        sqlite_where=sa.text("state = 'deleting'"),
        postgresql_where=sa.text("state = 'deleting'"),
    )
    op.drop_table("chunk")
    op.drop_index("ix_tombstone_age", table_name="tombstone")
    op.drop_table("tombstone")
    op.drop_table("reservation")
    op.drop_table("namespace_key")
    op.drop_table("kv_format")
    op.drop_table("quota")
    op.drop_table("namespace")
    op.drop_index("ix_api_token_lookup", table_name="api_token")
    op.drop_table("api_token")
    op.drop_table("tenant")
    op.drop_table("gateway_process")
    op.drop_table("clock_mark")
