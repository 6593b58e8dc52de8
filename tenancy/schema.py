"""Tables of the catalog (SQLAlchemy Core), the same on SQLite and PostgreSQL.

Every table of a tenant leads its keys with tenant and namespace, so that no constraint can reveal another tenant's
row. Times are Unix milliseconds. Migrations in ``migrations/`` create these tables; a test compares the two.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    ForeignKeyConstraint,
    FromClause,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    UniqueConstraint,
    Uuid,
    text,
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


def _owner() -> tuple[Column[object], Column[object]]:
    return (
        Column("tenant_id", Uuid, nullable=False),
        Column("namespace_id", Uuid, nullable=False),
    )


def _in_namespace() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(["tenant_id", "namespace_id"], ["namespace.tenant_id", "namespace.namespace_id"])


tenant = Table(
    "tenant",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("name", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    UniqueConstraint("name"),
    CheckConstraint("state IN ('active', 'suspended', 'deleting')", name="state"),
)

namespace = Table(
    "namespace",
    metadata,
    *_owner(),
    Column("name", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("durability", String(8), nullable=False),
    Column("default_ttl_ms", BigInteger, nullable=False),
    Column("max_ttl_ms", BigInteger, nullable=False),
    Column("sliding_ttl", Boolean, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("min_decrypt_epoch", Integer, nullable=False),
    Column("min_encrypt_epoch", Integer, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant_id", "namespace_id"),
    ForeignKeyConstraint(["tenant_id"], ["tenant.tenant_id"]),
    UniqueConstraint("tenant_id", "name"),
    CheckConstraint("state IN ('active', 'suspended', 'deleting')", name="state"),
    CheckConstraint("durability IN ('staged', 'nvme', 's3')", name="durability"),
    CheckConstraint("default_ttl_ms > 0 AND default_ttl_ms <= max_ttl_ms", name="ttl"),
    CheckConstraint("epoch >= min_encrypt_epoch AND min_encrypt_epoch >= min_decrypt_epoch", name="epoch"),
)

api_token = Table(
    "api_token",
    metadata,
    Column("tenant_id", Uuid, nullable=False),
    Column("token_id", String(16), nullable=False),
    Column("digest", LargeBinary(32), nullable=False),
    Column("permissions", String(512), nullable=False),
    Column("namespaces", String(1024), nullable=False),
    Column("default_namespace", String(64), nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("expires_ms", BigInteger, nullable=False),
    Column("revoked_ms", BigInteger),
    PrimaryKeyConstraint("tenant_id", "token_id"),
    ForeignKeyConstraint(["tenant_id"], ["tenant.tenant_id"]),
    Index("ix_api_token_lookup", "token_id"),
)

namespace_key = Table(
    "namespace_key",
    metadata,
    *_owner(),
    Column("purpose", String(8), nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("wrapped", LargeBinary, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant_id", "namespace_id", "purpose", "epoch"),
    _in_namespace(),
    CheckConstraint("purpose IN ('data', 'id')", name="purpose"),
)

kv_format = Table(
    "kv_format",
    metadata,
    *_owner(),
    Column("format_id", Integer, nullable=False),
    Column("fingerprint", LargeBinary(32), nullable=False),
    Column("canonical", LargeBinary, nullable=False),
    Column("model", String(1024), nullable=False),
    Column("weights", String(1024), nullable=False),
    Column("tokenizer", String(1024), nullable=False),
    Column("kv_dtype", String(32), nullable=False),
    Column("kv_quantisation", String(1024)),
    Column("adapter", String(1024)),
    Column("adapter_digest", String(1024)),
    Column("engine", String(1024), nullable=False),
    Column("engine_abi", String(1024), nullable=False),
    Column("layout", String(1024), nullable=False),
    Column("tokens_per_chunk", BigInteger, nullable=False),
    Column("chunk_bytes", BigInteger, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant_id", "namespace_id", "format_id"),
    _in_namespace(),
    UniqueConstraint("tenant_id", "namespace_id", "fingerprint"),
    CheckConstraint("chunk_bytes > 0 AND tokens_per_chunk > 0", name="sizes"),
    CheckConstraint("(adapter IS NULL) = (adapter_digest IS NULL)", name="adapter"),
)

chunk = Table(
    "chunk",
    metadata,
    *_owner(),
    Column("blob_id", LargeBinary(16), nullable=False),
    Column("format_id", Integer, nullable=False),
    Column("chunk_id", LargeBinary(32), nullable=False),
    Column("salt", LargeBinary(32), nullable=False),
    Column("tag_root", LargeBinary(32), nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("seg_log2", Integer, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("sealed_length", BigInteger, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("home_node", String(64), nullable=False),
    Column("home_boot", String(32), nullable=False),
    Column("durability", String(8), nullable=False),
    Column("state", String(8), nullable=False),
    PrimaryKeyConstraint("tenant_id", "namespace_id", "blob_id"),
    ForeignKeyConstraint(
        ["tenant_id", "namespace_id", "format_id"],
        ["kv_format.tenant_id", "kv_format.namespace_id", "kv_format.format_id"],
        name="fk_chunk_kv_format",
    ),
    CheckConstraint("state IN ('live', 'deleting')", name="state"),
    CheckConstraint("durability IN ('staged', 'nvme', 's3')", name="durability"),
    CheckConstraint("length > 0 AND sealed_length > length", name="length"),
    Index(
        "uq_chunk_live_content",
        "tenant_id",
        "namespace_id",
        "format_id",
        "chunk_id",
        "epoch",
        unique=True,
        sqlite_where=text("state = 'live'"),
        postgresql_where=text("state = 'live'"),
    ),
    Index(
        "ix_chunk_deleting",
        "tenant_id",
        "namespace_id",
        sqlite_where=text("state = 'deleting'"),
        postgresql_where=text("state = 'deleting'"),
    ),
)

_CHUNK_KEY = ["chunk.tenant_id", "chunk.namespace_id", "chunk.blob_id"]

entry = Table(
    "entry",
    metadata,
    *_owner(),
    Column("format_id", Integer, nullable=False),
    Column("entry_key", LargeBinary(32), nullable=False),
    Column("blob_id", LargeBinary(16), nullable=False),
    Column("parent", LargeBinary(32)),
    Column("depth", Integer, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("ttl_ms", BigInteger, nullable=False),
    Column("expires_ms", BigInteger, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("last_hit_ms", BigInteger, nullable=False),
    Column("hits", BigInteger, nullable=False),
    Column("writer", String(64), nullable=False),
    PrimaryKeyConstraint("tenant_id", "namespace_id", "format_id", "entry_key"),
    ForeignKeyConstraint(["tenant_id", "namespace_id", "blob_id"], _CHUNK_KEY, name="fk_entry_chunk"),
    Index("ix_entry_blob", "tenant_id", "namespace_id", "blob_id"),
    Index("ix_entry_expiry", "tenant_id", "namespace_id", "expires_ms"),
    Index("ix_entry_value", "tenant_id", "namespace_id", "last_hit_ms"),
)

entry_label = Table(
    "entry_label",
    metadata,
    *_owner(),
    Column("label_mac", LargeBinary(32), nullable=False),
    Column("format_id", Integer, nullable=False),
    Column("entry_key", LargeBinary(32), nullable=False),
    PrimaryKeyConstraint("tenant_id", "namespace_id", "label_mac", "format_id", "entry_key"),
    ForeignKeyConstraint(
        ["tenant_id", "namespace_id", "format_id", "entry_key"],
        ["entry.tenant_id", "entry.namespace_id", "entry.format_id", "entry.entry_key"],
        name="fk_entry_label_entry",
        ondelete="CASCADE",
    ),
    Index("ix_entry_label_entry", "tenant_id", "namespace_id", "format_id", "entry_key"),
)

placement = Table(
    "placement",
    metadata,
    *_owner(),
    Column("blob_id", LargeBinary(16), nullable=False),
    Column("tier", String(8), nullable=False),
    Column("node", String(64), nullable=False),
    Column("object", String(256), nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("state", String(12), nullable=False),
    Column("owner", String(32)),
    Column("lease_ms", BigInteger),
    Column("not_before_ms", BigInteger, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("updated_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant_id", "namespace_id", "blob_id", "tier", "node"),
    ForeignKeyConstraint(["tenant_id", "namespace_id", "blob_id"], _CHUNK_KEY, name="fk_placement_chunk"),
    CheckConstraint("state IN ('due', 'writing', 'ok', 'doomed', 'quarantined')", name="state"),
    CheckConstraint("(state = 'writing') = (owner IS NOT NULL AND lease_ms IS NOT NULL)", name="lease"),
    Index(
        "ix_placement_work",
        "tenant_id",
        "namespace_id",
        "tier",
        "state",
        sqlite_where=text("state <> 'ok'"),
        postgresql_where=text("state <> 'ok'"),
    ),
)

reservation = Table(
    "reservation",
    metadata,
    *_owner(),
    Column("reservation_id", LargeBinary(16), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("objects", Integer, nullable=False),
    Column("s3_bytes", BigInteger, nullable=False),
    Column("owner", String(32), nullable=False),
    Column("expires_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant_id", "namespace_id", "reservation_id"),
    _in_namespace(),
    CheckConstraint("bytes > 0 AND objects > 0", name="sizes"),
)

quota = Table(
    "quota",
    metadata,
    Column("tenant_id", Uuid, nullable=False),
    Column("scope_id", Uuid, nullable=False),
    Column("limit_bytes", BigInteger, nullable=False),
    Column("limit_objects", BigInteger, nullable=False),
    Column("limit_s3_bytes", BigInteger, nullable=False),
    Column("stored_bytes", BigInteger, nullable=False),
    Column("objects", BigInteger, nullable=False),
    Column("s3_bytes", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant_id", "scope_id"),
    ForeignKeyConstraint(["tenant_id"], ["tenant.tenant_id"]),
    CheckConstraint("stored_bytes >= 0 AND objects >= 0 AND s3_bytes >= 0", name="counters"),
    CheckConstraint("limit_bytes >= 0 AND limit_objects >= 0 AND limit_s3_bytes >= 0", name="limits"),
)

tombstone = Table(
    "tombstone",
    metadata,
    *_owner(),
    Column("format_id", Integer, nullable=False),
    Column("entry_key", LargeBinary(32), nullable=False),
    Column("reason", String(12), nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant_id", "namespace_id", "format_id", "entry_key"),
    _in_namespace(),
    CheckConstraint("reason IN ('deleted', 'expired', 'evicted', 'lost')", name="reason"),
    Index("ix_tombstone_age", "tenant_id", "namespace_id", "at_ms"),
)

gateway_process = Table(
    "gateway_process",
    metadata,
    Column("boot_id", String(32), primary_key=True),
    Column("node", String(64), nullable=False),
    Column("version", String(32), nullable=False),
    Column("started_ms", BigInteger, nullable=False),
    Column("heartbeat_ms", BigInteger, nullable=False),
)

clock_mark = Table(
    "clock_mark",
    metadata,
    Column("mark_id", Integer, primary_key=True),
    Column("high_water_ms", BigInteger, nullable=False),
    CheckConstraint("mark_id = 1", name="single"),
)


def owned(table: FromClause, scope: Scope) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """The predicate that every statement on a tenant's table carries: these rows are the namespace's own."""
    return table.c.tenant_id == scope.tenant, table.c.namespace_id == scope.namespace
