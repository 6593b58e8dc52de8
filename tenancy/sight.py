"""Sight: which tenant's rows a transaction may see, on a database that enforces it row by row.

PostgreSQL's policies read two transaction-local settings: ``kvgw.tenant``, and ``kvgw.token`` for the one look-up that
comes before a tenant is known. With neither, no row of any tenant's table is visible. SQLite has no such policies:
there every statement carries its tenant, as it does on PostgreSQL too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, text

_SET = text("SELECT set_config('kvgw.tenant', :tenant, true), set_config('kvgw.token', :token, true)")


@dataclass(frozen=True, slots=True)
class Sight:
    """What a transaction may see: a tenant's rows, or the row of one token, or neither."""

    tenant: UUID | None = None
    token_id: str | None = None


NO_TENANT: Final = Sight()
"""For tables that belong to no tenant."""


def look(connection: Connection, sight: Sight) -> None:
    """Set the sight of this transaction; it ends with the transaction, whatever connection pool is between."""
    connection.execute(_SET, {"tenant": str(sight.tenant or ""), "token": sight.token_id or ""})
