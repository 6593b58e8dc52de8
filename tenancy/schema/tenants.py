"""Tables of tenants: namespaces, tokens, wrapped keys, quota."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    String,
    Table,
    UniqueConstraint,
    Uuid,
    true,
)

from tenancy.schema.base import in_namespace, metadata, owner_columns

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
    *owner_columns(),
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
    Column("visibility", String(8), nullable=False, server_default="private"),
    Column("readers", String(4096), nullable=False, server_default=""),
    Column("over_quota", String(12), nullable=False, server_default="reject"),
    Column("hold_bytes", BigInteger, nullable=False, server_default="0"),
    Column("nvme_bytes", BigInteger, nullable=False, server_default="0"),
    Column("requests_per_second", Integer, nullable=False, server_default="0"),
    Column("bytes_per_second", BigInteger, nullable=False, server_default="0"),
    Column("concurrent_requests", Integer, nullable=False, server_default="0"),
    Column("deletion_allowed", Boolean, nullable=False, server_default=true()),
    PrimaryKeyConstraint("tenant_id", "namespace_id"),
    ForeignKeyConstraint(["tenant_id"], ["tenant.tenant_id"]),
    UniqueConstraint("tenant_id", "name"),
    CheckConstraint("state IN ('active', 'suspended', 'deleting')", name="state"),
    CheckConstraint("durability IN ('staged', 'nvme', 's3')", name="durability"),
    CheckConstraint("default_ttl_ms > 0 AND default_ttl_ms <= max_ttl_ms", name="ttl"),
    CheckConstraint("epoch >= min_encrypt_epoch AND min_encrypt_epoch >= min_decrypt_epoch", name="epoch"),
    CheckConstraint("visibility IN ('private', 'public')", name="visibility"),
    CheckConstraint("over_quota IN ('reject', 'make_room')", name="over_quota"),
    *(
        CheckConstraint(f"{limit} >= 0", name=limit)
        for limit in (
            "hold_bytes",
            "nvme_bytes",
            "requests_per_second",
            "bytes_per_second",
            "concurrent_requests",
        )
    ),
)
"""A limit of zero means none of its own: the tenant's, or the gateway's, is all that holds.

``readers`` are the names of the tenants that may read a public namespace, separated by spaces, or ``*``.
"""

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
    Column("name", String(64), nullable=False, server_default=""),
    Column("not_before_ms", BigInteger, nullable=False, server_default="0"),
    Column("created_by", String(64), nullable=False, server_default=""),
    Column("last_used_ms", BigInteger),
    PrimaryKeyConstraint("tenant_id", "token_id"),
    ForeignKeyConstraint(["tenant_id"], ["tenant.tenant_id"]),
    Index("ix_api_token_lookup", "token_id"),
)

namespace_key = Table(
    "namespace_key",
    metadata,
    *owner_columns(),
    Column("purpose", String(8), nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("wrapped", LargeBinary, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant_id", "namespace_id", "purpose", "epoch"),
    in_namespace(),
    CheckConstraint("purpose IN ('data', 'id')", name="purpose"),
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

reservation = Table(
    "reservation",
    metadata,
    *owner_columns(),
    Column("reservation_id", LargeBinary(16), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("objects", Integer, nullable=False),
    Column("s3_bytes", BigInteger, nullable=False),
    Column("owner", String(32), nullable=False),
    Column("expires_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant_id", "namespace_id", "reservation_id"),
    in_namespace(),
    CheckConstraint("bytes > 0 AND objects > 0", name="sizes"),
)
