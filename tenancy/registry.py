"""Tenants, namespaces and tokens: transaction bodies over their tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, func, insert, select, update

from tenancy.access import NAME
from tenancy.errors import NamespaceUnknown, RegistryRefused
from tenancy.model import Namespace, Scope
from tenancy.processes import serialise
from tenancy.schema import TENANT_SCOPE, UNLIMITED, api_token, namespace, namespace_key, owned, quota, tenant

DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Policy:
    """How a namespace treats its chunks. Sizes in bytes, times in milliseconds."""

    durability: str = "nvme"
    default_ttl_ms: int = DAY_MS
    max_ttl_ms: int = 30 * DAY_MS
    sliding_ttl: bool = True
    limit_bytes: int = UNLIMITED
    limit_objects: int = UNLIMITED
    limit_s3_bytes: int = UNLIMITED

    def __post_init__(self) -> None:
        for name in ("default_ttl_ms", "max_ttl_ms", "limit_bytes", "limit_objects", "limit_s3_bytes"):
            value = getattr(self, name)
            if type(value) is not int or not 0 < value <= UNLIMITED:
                raise RegistryRefused(f"{name} must be an integer from 1 to 2**62, not {value!r}")
        if self.default_ttl_ms > self.max_ttl_ms:
            raise RegistryRefused(f"default_ttl_ms {self.default_ttl_ms} is above max_ttl_ms {self.max_ttl_ms}")
        if self.durability not in ("staged", "nvme", "s3"):
            raise RegistryRefused(f"durability must be staged, nvme or s3, not {self.durability!r}")


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A row of namespace_key: purpose ``data`` (one an epoch) or ``id`` (epoch 0)."""

    purpose: str
    epoch: int
    wrapped: bytes


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


_NAMESPACE_COLUMNS = (
    namespace.c.tenant_id,
    namespace.c.namespace_id,
    namespace.c.name,
    namespace.c.state,
    namespace.c.durability,
    namespace.c.default_ttl_ms,
    namespace.c.max_ttl_ms,
    namespace.c.sliding_ttl,
    namespace.c.epoch,
    namespace.c.min_decrypt_epoch,
)


def create_tenant(connection: Connection, tenant_id: UUID, name: str, now_ms: int) -> None:
    """Add a tenant without limits of its own. Raises `RegistryRefused` when the name is taken or not a name."""
    check_name("tenant", name)
    serialise(connection)
    if connection.scalar(select(tenant.c.tenant_id).where(tenant.c.name == name)) is not None:
        raise RegistryRefused(f"a tenant named {name!r} exists already")
    connection.execute(insert(tenant), {"tenant_id": tenant_id, "name": name, "state": "active", "created_ms": now_ms})
    _insert_quota(connection, tenant_id, TENANT_SCOPE, Policy())


def create_namespace(
    connection: Connection, scope: Scope, name: str, policy: Policy, keys: list[KeyRow], now_ms: int
) -> None:
    """Add a namespace with its wrapped keys. Raises `RegistryRefused` when the name is taken or not a name."""
    check_name("namespace", name)
    serialise(connection)
    if find_namespace(connection, scope.tenant, name) is not None:
        raise RegistryRefused(f"a namespace named {name!r} exists already")
    connection.execute(
        insert(namespace),
        {
            "tenant_id": scope.tenant,
            "namespace_id": scope.namespace,
            "name": name,
            "state": "active",
            "durability": policy.durability,
            "default_ttl_ms": policy.default_ttl_ms,
            "max_ttl_ms": policy.max_ttl_ms,
            "sliding_ttl": policy.sliding_ttl,
            "epoch": 1,
            "min_decrypt_epoch": 1,
            "min_encrypt_epoch": 1,
            "created_ms": now_ms,
        },
    )
    _insert_quota(connection, scope.tenant, scope.namespace, policy)
    connection.execute(
        insert(namespace_key),
        [
            {
                "tenant_id": scope.tenant,
                "namespace_id": scope.namespace,
                "purpose": key.purpose,
                "epoch": key.epoch,
                "wrapped": key.wrapped,
                "created_ms": now_ms,
            }
            for key in keys
        ],
    )


def find_tenant(connection: Connection, name: str) -> UUID | None:
    """The tenant of this name."""
    return connection.scalar(select(tenant.c.tenant_id).where(tenant.c.name == name, tenant.c.state == "active"))


def find_namespace(connection: Connection, tenant_id: UUID, name: str) -> Namespace | None:
    """The tenant's namespace of this name, whatever its state."""
    row = connection.execute(
        select(*_NAMESPACE_COLUMNS).where(namespace.c.tenant_id == tenant_id, namespace.c.name == name)
    ).first()
    return None if row is None else _as_namespace(row)


def namespaces(connection: Connection, tenant_id: UUID) -> list[Namespace]:
    """All namespaces of a tenant, by name."""
    rows = connection.execute(
        select(*_NAMESPACE_COLUMNS).where(namespace.c.tenant_id == tenant_id).order_by(namespace.c.name)
    )
    return [_as_namespace(row) for row in rows]


def tenants(connection: Connection) -> list[tuple[UUID, str]]:
    """All tenants: id and name."""
    return [(row.tenant_id, row.name) for row in connection.execute(select(tenant.c.tenant_id, tenant.c.name))]


def wrapped_keys(connection: Connection, scope: Scope) -> list[KeyRow]:
    """The namespace's wrapped keys. Raises `NamespaceUnknown` when it has none."""
    rows = connection.execute(
        select(namespace_key.c.purpose, namespace_key.c.epoch, namespace_key.c.wrapped).where(
            *owned(namespace_key, scope)
        )
    ).all()
    if not rows:
        raise NamespaceUnknown("the namespace does not exist")
    return [KeyRow(*row) for row in rows]


def add_token(connection: Connection, row: TokenRow, now_ms: int) -> None:
    """Make a token known by its digest."""
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
        },
    )


def find_token(connection: Connection, token_id: str) -> TokenRow | None:
    """The token with this id; before it is found, no tenant is known."""
    row = connection.execute(
        select(
            api_token.c.tenant_id,
            api_token.c.token_id,
            api_token.c.digest,
            api_token.c.permissions,
            api_token.c.namespaces,
            api_token.c.default_namespace,
            api_token.c.expires_ms,
            api_token.c.revoked_ms,
        ).where(api_token.c.token_id == token_id)
    ).first()
    return None if row is None else TokenRow(*row)


def revoke_token(connection: Connection, tenant_id: UUID, token_id: str, now_ms: int) -> bool:
    """End a token; False when there is none to end."""
    result = connection.execute(
        update(api_token)
        .where(api_token.c.tenant_id == tenant_id, api_token.c.token_id == token_id, api_token.c.revoked_ms.is_(None))
        .values(revoked_ms=now_ms)
    )
    return result.rowcount == 1


def count_tenants(connection: Connection) -> int:
    return connection.scalar(select(func.count()).select_from(tenant)) or 0


def _as_namespace(row: Row[*tuple[Any, ...]]) -> Namespace:
    return Namespace(
        Scope(row.tenant_id, row.namespace_id),
        row.name,
        row.state,
        row.durability,
        row.default_ttl_ms,
        row.max_ttl_ms,
        row.sliding_ttl,
        row.epoch,
        row.min_decrypt_epoch,
    )


def _insert_quota(connection: Connection, tenant_id: UUID, scope_id: UUID, policy: Policy) -> None:
    connection.execute(
        insert(quota),
        {
            "tenant_id": tenant_id,
            "scope_id": scope_id,
            "limit_bytes": policy.limit_bytes,
            "limit_objects": policy.limit_objects,
            "limit_s3_bytes": policy.limit_s3_bytes,
            "stored_bytes": 0,
            "objects": 0,
            "s3_bytes": 0,
        },
    )


def check_name(what: str, name: str) -> None:
    """Raises `RegistryRefused` unless `name` can be the name of a tenant or namespace."""
    if NAME.fullmatch(name) is None:
        raise RegistryRefused(
            f"{name!r} cannot be a {what} name: use 1 to 64 of a-z, 0-9, '.', '_', '-', "
            "with a letter or digit at both ends"
        )
