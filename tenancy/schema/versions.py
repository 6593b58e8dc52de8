"""What lets gateways answer from memory: each tenant's version, and which version each gateway has seen of it."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, CheckConstraint, Column, String, Table, Uuid

from tenancy.schema.base import metadata

VERSION_MAX: Final = 2**63 - 1
"""After it comes 0."""

tenant_version = Table(
    "tenant_version",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("version", BigInteger, nullable=False),
    CheckConstraint("version >= 0", name="version"),
)
"""No row stands for 0. A table of its own, so that its row is the last that any transaction locks."""

version_seen = Table(
    "version_seen",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("boot_id", String(32), primary_key=True),
    Column("version", BigInteger, nullable=False),
    CheckConstraint("version >= 0", name="version"),
)
"""A gateway that may answer for the tenant from memory, with nothing there that is older than this version."""
