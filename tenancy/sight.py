"""Sight: which tenant's rows a transaction may see, on a database that enforces it row by row.

PostgreSQL's policies read transaction-local settings: ``kvgw.tenant``; ``kvgw.token`` for the one look-up that comes
before a tenant is known; ``kvgw.audit`` for whoever verifies the audit log. With none of them, no row of any
tenant's table is visible. SQLite has no such policies: there every statement carries its tenant, as it does on
PostgreSQL too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, bindparam, func, literal_column, select, true

from tenancy.prepared import KeyStatement

_SETTINGS: Final = ("tenant", "token", "audit")
_SET: Final = KeyStatement(
    lambda: select(*(func.set_config(literal_column(f"'kvgw.{name}'"), bindparam(name), true()) for name in _SETTINGS))
)


@dataclass(frozen=True, slots=True)
class Sight:
    """What a transaction may see: a tenant's rows, or the row of one token, or every audit record, or none of them."""

    tenant: UUID | None = None
    token_id: str | None = None
    whole_audit: bool = False


NO_TENANT: Final = Sight()
"""For tables that belong to no tenant."""

WHOLE_AUDIT: Final = Sight(whole_audit=True)
"""For verifying the audit log, whose chain runs through all tenants' records."""


def look(connection: Connection, sight: Sight) -> None:
    """Set the sight of this transaction; it ends with the transaction, whatever connection pool is between."""
    _SET.rows(
        connection,
        {
            "tenant": str(sight.tenant or ""),
            "token": sight.token_id or "",
            "audit": "whole" if sight.whole_audit else "",
        },
    )
