"""API tokens: transaction bodies over their table. The catalog never has a token, only a digest of its secret."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, delete, insert, or_, select, update

from tenancy.errors import RegistryRefused
from tenancy.schema import api_token, tenant

TOKENS_PER_TENANT_MAX = 1000
ENDED_KEPT_MAX = 1000
"""Tokens of a tenant that do not work any more and are still listed; the audit log knows of the older ones."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """What the catalog knows of a token."""

    tenant: UUID
    token_id: str
    digest: bytes
    permissions: str
    namespaces: str
    default_namespace: str
    expires_ms: int
    revoked_ms: int | None
    name: str = ""
    not_before_ms: int = 0
    created_by: str = ""
    created_ms: int = 0
    last_used_ms: int | None = None


_COLUMNS = (
    api_token.c.tenant_id,
    api_token.c.token_id,
    api_token.c.digest,
    api_token.c.permissions,
    api_token.c.namespaces,
    api_token.c.default_namespace,
    api_token.c.expires_ms,
    api_token.c.revoked_ms,
    api_token.c.name,
    api_token.c.not_before_ms,
    api_token.c.created_by,
    api_token.c.created_ms,
    api_token.c.last_used_ms,
)


def add_token(connection: Connection, row: TokenRow, now_ms: int) -> None:
    """Make a token known by its digest. Raises `RegistryRefused` when the tenant has too many that still work."""
    living = connection.execute(
        select(api_token.c.token_id).where(
            api_token.c.tenant_id == row.tenant, api_token.c.revoked_ms.is_(None), api_token.c.expires_ms > now_ms
        )
    ).all()
    if len(living) >= TOKENS_PER_TENANT_MAX:
        raise RegistryRefused(f"the tenant has {len(living)} tokens that still work; revoke some first")
    _forget_ended(connection, row.tenant, now_ms)
    connection.execute(
        insert(api_token),
        {
            "tenant_id": row.tenant,
            "token_id": row.token_id,
            "digest": row.digest,
            "permissions": row.permissions,
            "namespaces": row.namespaces,
            "default_namespace": row.default_namespace,
            "created_ms": now_ms,
            "expires_ms": row.expires_ms,
            "revoked_ms": None,
            "name": row.name,
            "not_before_ms": row.not_before_ms,
            "created_by": row.created_by,
        },
    )


def _forget_ended(connection: Connection, tenant_id: UUID, now_ms: int) -> None:
    """Keep the newest of those that ended: whoever makes and revokes without end must not fill the table (law 9)."""
    ended = connection.scalars(
        select(api_token.c.token_id)
        .where(
            api_token.c.tenant_id == tenant_id,
            or_(api_token.c.revoked_ms.is_not(None), api_token.c.expires_ms <= now_ms),
        )
        .order_by(api_token.c.created_ms.desc())
    ).all()
    if len(ended) > ENDED_KEPT_MAX:
        connection.execute(
            delete(api_token).where(
                api_token.c.tenant_id == tenant_id, api_token.c.token_id.in_(ended[ENDED_KEPT_MAX:])
            )
        )


def find_token(connection: Connection, token_id: str) -> TokenRow | None:
    """The token with this id, of a tenant that is not suspended; before it is found, no tenant is known."""
    row = connection.execute(
        select(*_COLUMNS).where(
            api_token.c.token_id == token_id,
            tenant.c.tenant_id == api_token.c.tenant_id,
            tenant.c.state == "active",
        )
    ).first()
    return None if row is None else TokenRow(*row)


def tokens(connection: Connection, tenant_id: UUID) -> list[TokenRow]:
    """All tokens of a tenant, newest first."""
    rows = connection.execute(
        select(*_COLUMNS).where(api_token.c.tenant_id == tenant_id).order_by(api_token.c.created_ms.desc())
    )
    return [TokenRow(*row) for row in rows]


def revoke_token(connection: Connection, tenant_id: UUID, token_id: str, now_ms: int) -> bool:
    """End a token; False when there is none to end."""
    result = connection.execute(
        update(api_token)
        .where(api_token.c.tenant_id == tenant_id, api_token.c.token_id == token_id, api_token.c.revoked_ms.is_(None))
        .values(revoked_ms=now_ms)
    )
    return result.rowcount == 1


def expire_token(connection: Connection, tenant_id: UUID, token_id: str, until_ms: int) -> bool:
    """End a token at `until_ms` at the latest; False when there is none that lives longer."""
    result = connection.execute(
        update(api_token)
        .where(
            api_token.c.tenant_id == tenant_id,
            api_token.c.token_id == token_id,
            api_token.c.revoked_ms.is_(None),
            api_token.c.expires_ms > until_ms,
        )
        .values(expires_ms=until_ms)
    )
    return result.rowcount == 1


def note_use(connection: Connection, tenant_id: UUID, token_id: str, now_ms: int, grain_ms: int) -> None:
    """Remember that a token was used, to the grain: most uses change nothing."""
    connection.execute(
        update(api_token)
        .where(
            api_token.c.tenant_id == tenant_id,
            api_token.c.token_id == token_id,
            or_(api_token.c.last_used_ms.is_(None), api_token.c.last_used_ms < now_ms - grain_ms),
        )
        .values(last_used_ms=now_ms)
    )
