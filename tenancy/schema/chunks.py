"""Tables of what is kept: formats, chunks, entries, labels, placements, tombstones."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    BindParameter,
    CheckConstraint,
    Column,
    ColumnElement,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    String,
    Table,
    UniqueConstraint,
    text,
)

from tenancy.schema import states
from tenancy.schema.base import in_namespace, metadata, owner_columns

kv_format = Table(
    "kv_format",
    metadata,
    *owner_columns(),
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
    in_namespace(),
    UniqueConstraint("tenant_id", "namespace_id", "fingerprint"),
    CheckConstraint("chunk_bytes > 0 AND tokens_per_chunk > 0", name="sizes"),
    CheckConstraint("(adapter IS NULL) = (adapter_digest IS NULL)", name="adapter"),
)

chunk = Table(
    "chunk",
    metadata,
    *owner_columns(),
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
    *owner_columns(),
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
    Column("hold_until_ms", BigInteger, nullable=False, server_default="0"),
    PrimaryKeyConstraint("tenant_id", "namespace_id", "format_id", "entry_key"),
    ForeignKeyConstraint(["tenant_id", "namespace_id", "blob_id"], _CHUNK_KEY, name="fk_entry_chunk"),
    Index("ix_entry_blob", "tenant_id", "namespace_id", "blob_id"),
    Index("ix_entry_expiry", "tenant_id", "namespace_id", "expires_ms"),
    Index("ix_entry_value", "tenant_id", "namespace_id", "last_hit_ms"),
)

entry_label = Table(
    "entry_label",
    metadata,
    *owner_columns(),
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
    *owner_columns(),
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

tombstone = Table(
    "tombstone",
    metadata,
    *owner_columns(),
    Column("format_id", Integer, nullable=False),
    Column("entry_key", LargeBinary(32), nullable=False),
    Column("reason", String(12), nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant_id", "namespace_id", "format_id", "entry_key"),
    in_namespace(),
    CheckConstraint("reason IN ('deleted', 'expired', 'evicted', 'lost')", name="reason"),
    Index("ix_tombstone_age", "tenant_id", "namespace_id", "at_ms"),
)


UNSETTLED: Final = placement.c.state != states.OK
"""In the words of the partial index ``ix_placement_work``: SQLite uses it only for statements that repeat them."""


def unexpired(now_ms: int | BindParameter[int]) -> ColumnElement[bool]:
    """The entry has not expired. An expression, so that SQLite finds entries by their keys, not by their expiry."""
    return entry.c.expires_ms - now_ms > 0
