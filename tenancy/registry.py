"""Tenants and namespaces: transaction bodies over their tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, func, insert, select, update

from tenancy import quota as quotas
from tenancy.access import NAME
from tenancy.errors import NamespaceUnknown, RegistryRefused
from tenancy.model import Namespace, Scope, Usage
from tenancy.policy import Policy
from tenancy.processes import serialise
from tenancy.schema import TENANT_SCOPE, namespace, namespace_key, owned, quota, tenant

NAMESPACES_PER_TENANT_MAX = 10_000
"""Each has keys, a quota and its turns of maintenance, whoever made it."""


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A row of namespace_key: purpose ``data`` (one an epoch) or ``id`` (epoch 0)."""

    purpose: str
    epoch: int
    wrapped: bytes


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
    namespace.c.min_encrypt_epoch,
    namespace.c.deletion_allowed,
    namespace.c.visibility,
    namespace.c.readers,
    namespace.c.over_quota,
    namespace.c.hold_bytes,
    namespace.c.nvme_bytes,
    namespace.c.requests_per_second,
    namespace.c.bytes_per_second,
    namespace.c.concurrent_requests,
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
    serialise(connection)
    check_new_namespace(connection, scope.tenant, name)
    connection.execute(
        insert(namespace),
        {
            "tenant_id": scope.tenant,
            "namespace_id": scope.namespace,
            "name": name,
            "state": "active",
            **_policy_columns(policy),
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


def check_new_namespace(connection: Connection, tenant_id: UUID, name: str) -> None:
    """Raises `RegistryRefused` unless the tenant may have another namespace, of this name."""
    check_name("namespace", name)
    if connection.scalar(select(tenant.c.state).where(tenant.c.tenant_id == tenant_id)) != "active":
        raise RegistryRefused("the tenant is suspended or on its way out: it gets no namespace")
    if find_namespace(connection, tenant_id, name) is not None:
        raise RegistryRefused(f"a namespace named {name!r} exists already")
    count = connection.scalar(select(func.count()).select_from(namespace).where(namespace.c.tenant_id == tenant_id))
    if (count or 0) >= NAMESPACES_PER_TENANT_MAX:
        raise RegistryRefused(f"the tenant has {count} namespaces, and no more may be made; delete some first")


def find_tenant(connection: Connection, name: str) -> UUID | None:
    """The tenant of this name, unless it is on its way out."""
    return connection.scalar(select(tenant.c.tenant_id).where(tenant.c.name == name, tenant.c.state != "deleting"))


def find_active_tenant(connection: Connection, name: str) -> UUID | None:
    """The tenant of this name, unless it is suspended or on its way out."""
    return connection.scalar(select(tenant.c.tenant_id).where(tenant.c.name == name, tenant.c.state == "active"))


@dataclass(frozen=True, slots=True)
class TenantRow:
    """A tenant with its own limits and what all of its namespaces use together."""

    tenant: UUID
    name: str
    state: str
    created_ms: int
    usage: Usage


def describe_tenant(connection: Connection, tenant_id: UUID) -> TenantRow | None:
    """The tenant with this id."""
    row = connection.execute(
        select(
            tenant.c.name,
            tenant.c.state,
            tenant.c.created_ms,
            quota.c.limit_bytes,
            quota.c.limit_objects,
            quota.c.limit_s3_bytes,
            quota.c.stored_bytes,
            quota.c.objects,
            quota.c.s3_bytes,
        ).where(
            tenant.c.tenant_id == tenant_id,
            quota.c.tenant_id == tenant.c.tenant_id,
            quota.c.scope_id == TENANT_SCOPE,
        )
    ).first()
    return None if row is None else TenantRow(tenant_id, row[0], row[1], row[2], Usage(*row[3:]))


def set_tenant_state(connection: Connection, tenant_id: UUID, state: str) -> None:
    """Suspend, resume or bury a tenant. Raises `NamespaceUnknown` when there is none, or it is on its way out.

    Burying raises `RegistryRefused` while a namespace of it is protected.
    """
    if state == "deleting":
        for one in namespaces(connection, tenant_id):
            check_unprotected(one)
    changed = connection.execute(
        update(tenant).where(tenant.c.tenant_id == tenant_id, tenant.c.state != "deleting").values(state=state)
    )
    if changed.rowcount != 1:
        raise NamespaceUnknown("the tenant does not exist, or is being deleted")


def set_namespace_state(connection: Connection, scope: Scope, state: str) -> None:
    """Suspend, resume or bury a namespace. Raises `NamespaceUnknown` when there is none, or it is on its way out.

    Burying raises `RegistryRefused` while it is protected.
    """
    if state == "deleting":
        check_deletable(connection, scope)
    changed = connection.execute(
        update(namespace).where(*owned(namespace, scope), namespace.c.state != "deleting").values(state=state)
    )
    if changed.rowcount != 1:
        raise NamespaceUnknown("the namespace does not exist, or is being deleted")


def check_deletable(connection: Connection, scope: Scope) -> None:
    """Raises `RegistryRefused` for a protected namespace, `NamespaceUnknown` when there is none."""
    row = connection.execute(select(*_NAMESPACE_COLUMNS).where(*owned(namespace, scope))).first()
    if row is None:
        raise NamespaceUnknown("the namespace does not exist")
    check_unprotected(_as_namespace(row))


def check_unprotected(found: Namespace) -> None:
    """Raises `RegistryRefused` for a namespace that must not be deleted or shredded; one on its way out may be."""
    if not found.deletion_allowed and found.state != "deleting":
        raise RegistryRefused(
            f"the namespace {found.name!r} is protected: its deletion_allowed is false; set it to true first, if it "
            "is meant"
        )


def change_policy(connection: Connection, found: Namespace, limits: Usage, policy: Policy) -> None:
    """Give a namespace another policy. Limits below what is used already refuse what is new; nothing is dropped.

    `found` and the limits are what `policy` was made from. Raises `RegistryRefused` when they are not any more what
    there is: else the one of two changes that was read first would take back the other.
    """
    scope = found.scope
    _, now = quotas.lock(connection, scope)
    row = connection.execute(select(*_NAMESPACE_COLUMNS).where(*owned(namespace, scope))).first()
    if row is None or _as_namespace(row) != found or now.limits != limits.limits:
        raise RegistryRefused("the namespace was changed by somebody else meanwhile; look at it, and say it again")
    changed = connection.execute(
        update(namespace)
        .where(*owned(namespace, scope), namespace.c.state != "deleting")
        .values(**_policy_columns(policy))
    )
    if changed.rowcount != 1:
        raise NamespaceUnknown("the namespace does not exist, or is being deleted")
    change_limits(connection, scope.tenant, scope.namespace, policy)


def change_limits(connection: Connection, tenant_id: UUID, scope_id: UUID, limits: Policy) -> None:
    """Set the limits of a namespace, or with `TENANT_SCOPE` of the whole tenant."""
    connection.execute(
        update(quota)
        .where(quota.c.tenant_id == tenant_id, quota.c.scope_id == scope_id)
        .values(
            limit_bytes=limits.limit_bytes,
            limit_objects=limits.limit_objects,
            limit_s3_bytes=limits.limit_s3_bytes,
        )
    )


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


def count_tenants(connection: Connection) -> int:
    return connection.scalar(select(func.count()).select_from(tenant)) or 0


def _as_namespace(row: Row[*tuple[Any, ...]]) -> Namespace:
    return Namespace(Scope(row.tenant_id, row.namespace_id), *row[2:])


def _policy_columns(policy: Policy) -> dict[str, object]:
    return {
        "durability": policy.durability,
        "default_ttl_ms": policy.default_ttl_ms,
        "max_ttl_ms": policy.max_ttl_ms,
        "sliding_ttl": policy.sliding_ttl,
        "visibility": policy.visibility,
        "readers": " ".join(policy.readers),
        "over_quota": policy.over_quota,
        "hold_bytes": policy.hold_bytes,
        "nvme_bytes": policy.nvme_bytes,
        "requests_per_second": policy.requests_per_second,
        "bytes_per_second": policy.bytes_per_second,
        "concurrent_requests": policy.concurrent_requests,
    }


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
