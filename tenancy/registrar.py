"""The catalog's face for tenants, namespaces and tokens: every change is audited in its own transaction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar
from uuid import UUID

from sqlalchemy import Connection

from tenancy import recounting, registry, tokens
from tenancy.audit import chain
from tenancy.audit.chain import Act
from tenancy.engine import Database, Ends, anything, ends_nothing, ends_what_it_names
from tenancy.keys import epochs
from tenancy.keys.epochs import Epoch
from tenancy.model import Namespace, Scope, Usage
from tenancy.policy import Policy
from tenancy.recounting import Drift
from tenancy.registry import KeyRow, TenantRow
from tenancy.schema import TENANT_SCOPE
from tenancy.sight import NO_TENANT, Sight
from tenancy.tokens import TokenRow

Result = TypeVar("Result")

GATEWAY = "gateway"
"""The actor of what a gateway does by itself."""


class Registrar:
    """Who there is, and what they may do. Raises `CatalogUnavailable` and `RegistryRefused`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def act(
        self,
        act: Act,
        body: Callable[[Connection], Result],
        tenant: UUID,
        now_ms: int,
        ends: Ends[Result] = anything,
    ) -> Result:
        """Run `body` over a tenant's rows and record `act` in the same transaction: both, or neither."""

        def transaction(connection: Connection) -> Result:
            result = body(connection)
            chain.record(connection, act, now_ms)
            return result

        return await self._database.write(transaction, Sight(tenant), ends)

    # Tenants

    async def tenants(self) -> list[tuple[UUID, str]]:
        return await self._database.read(registry.tenants, NO_TENANT)

    async def tenant(self, name: str) -> UUID | None:
        return await self._database.read(partial(registry.find_tenant, name=name), NO_TENANT)

    async def active_tenant(self, name: str) -> UUID | None:
        return await self._database.read(partial(registry.find_active_tenant, name=name), NO_TENANT)

    async def describe_tenant(self, tenant: UUID) -> TenantRow | None:
        return await self._database.read(partial(registry.describe_tenant, tenant_id=tenant), Sight(tenant))

    async def create_tenant(self, tenant: UUID, name: str, now_ms: int, actor: str = GATEWAY) -> None:
        await self.act(
            Act(actor=actor, action="tenant.create", target=name, tenant=tenant),
            partial(registry.create_tenant, tenant_id=tenant, name=name, now_ms=now_ms),
            tenant,
            now_ms,
            ends_nothing,
        )

    async def set_tenant_state(self, tenant: UUID, state: str, act: Act, now_ms: int) -> None:
        await self.act(act, partial(registry.set_tenant_state, tenant_id=tenant, state=state), tenant, now_ms)

    async def limit_tenant(self, tenant: UUID, limits: Policy, act: Act, now_ms: int) -> None:
        await self.act(
            act,
            partial(registry.change_limits, tenant_id=tenant, scope_id=TENANT_SCOPE, limits=limits),
            tenant,
            now_ms,
            ends_nothing,
        )

    async def recount(self, tenant: UUID, *, repair: bool, act: Act, now_ms: int) -> list[Drift]:
        """Compare all quota counters of a tenant with the rows, each in a transaction; what is set is audited."""

        def noted(connection: Connection, drift: Drift) -> Drift:
            if repair and not drift.right:
                detail = {
                    "stored_bytes": drift.stored_bytes,
                    "objects": drift.objects,
                    "s3_bytes": drift.s3_bytes,
                }
                told = replace(act, tenant=drift.tenant, namespace=drift.namespace, detail=detail)
                chain.record(connection, told, now_ms)
            return drift

        counts: list[Callable[[Connection], Drift]] = [
            partial(recounting.recount_namespace, scope=one.scope, repair=repair)
            for one in await self.namespaces(tenant)
        ]
        counts.append(partial(recounting.recount_tenant, tenant=tenant, repair=repair))
        return [
            await self._database.write(partial(_after, count=count, note=noted), Sight(tenant), ends_nothing)
            for count in counts
        ]

    # Namespaces

    async def namespace(self, tenant: UUID, name: str) -> Namespace | None:
        return await self._database.read(partial(registry.find_namespace, tenant_id=tenant, name=name), Sight(tenant))

    async def namespaces(self, tenant: UUID) -> list[Namespace]:
        return await self._database.read(partial(registry.namespaces, tenant_id=tenant), Sight(tenant))

    async def check_new_namespace(self, tenant: UUID, name: str) -> None:
        await self._database.read(partial(registry.check_new_namespace, tenant_id=tenant, name=name), Sight(tenant))

    async def create_namespace(
        self, scope: Scope, name: str, policy: Policy, keys: list[KeyRow], now_ms: int, actor: str = GATEWAY
    ) -> None:
        await self.act(
            Act(actor=actor, action="namespace.create", target=name, tenant=scope.tenant, namespace=scope.namespace),
            partial(registry.create_namespace, scope=scope, name=name, policy=policy, keys=keys, now_ms=now_ms),
            scope.tenant,
            now_ms,
            ends_nothing,
        )

    async def set_namespace_state(self, scope: Scope, state: str, act: Act, now_ms: int) -> None:
        await self.act(act, partial(registry.set_namespace_state, scope=scope, state=state), scope.tenant, now_ms)

    async def change_policy(self, found: Namespace, limits: Usage, policy: Policy, act: Act, now_ms: int) -> None:
        body = partial(registry.change_policy, found=found, limits=limits, policy=policy)
        await self.act(act, body, found.scope.tenant, now_ms)

    async def wrapped_keys(self, scope: Scope) -> list[KeyRow]:
        return await self._database.read(partial(registry.wrapped_keys, scope=scope), Sight(scope.tenant))

    async def check_deletable(self, scope: Scope) -> None:
        await self._database.read(partial(registry.check_deletable, scope=scope), Sight(scope.tenant))

    async def epochs(self, scope: Scope) -> list[Epoch]:
        return await self._database.read(partial(epochs.epochs, scope=scope), Sight(scope.tenant))

    async def unused_epochs(self, scope: Scope, superseded_before_ms: int) -> list[int]:
        return await self._database.read(
            partial(epochs.unused, scope=scope, superseded_before_ms=superseded_before_ms), Sight(scope.tenant)
        )

    async def end_unreadable(self, scope: Scope, now_ms: int, limit: int) -> tuple[int, list[bytes]]:
        return await self._database.write(
            partial(epochs.end_unreadable, scope=scope, now_ms=now_ms, limit=limit),
            Sight(scope.tenant),
            ends_what_it_names,
        )

    # Tokens

    async def add_token(self, row: TokenRow, now_ms: int) -> None:
        await self.act(
            Act(
                actor=row.created_by or GATEWAY,
                action="token.create",
                target=row.token_id,
                tenant=row.tenant,
                detail={"permissions": row.permissions, "namespaces": row.namespaces, "name": row.name},
            ),
            partial(tokens.add_token, row=row, now_ms=now_ms),
            row.tenant,
            now_ms,
            ends_nothing,
        )

    async def token(self, token_id: str) -> TokenRow | None:
        return await self._database.read(partial(tokens.find_token, token_id=token_id), Sight(token_id=token_id))

    async def tokens(self, tenant: UUID) -> list[TokenRow]:
        return await self._database.read(partial(tokens.tokens, tenant_id=tenant), Sight(tenant))

    async def revoke_token(self, tenant: UUID, token_id: str, now_ms: int, actor: str = GATEWAY) -> bool:
        return await self.act(
            Act(actor=actor, action="token.revoke", target=token_id, tenant=tenant),
            partial(tokens.revoke_token, tenant_id=tenant, token_id=token_id, now_ms=now_ms),
            tenant,
            now_ms,
        )

    async def replace_token(self, old: str, row: TokenRow, until_ms: int, now_ms: int) -> None:
        """Add `row` and let the token `old` end at `until_ms`: until then both work."""

        def body(connection: Connection) -> None:
            tokens.add_token(connection, row, now_ms)
            tokens.expire_token(connection, row.tenant, old, until_ms)

        act = Act(
            actor=row.created_by,
            action="token.rotate",
            target=old,
            tenant=row.tenant,
            detail={"successor": row.token_id},
        )
        await self.act(act, body, row.tenant, now_ms)

    async def note_token_use(self, tenant: UUID, token_id: str, now_ms: int, grain_ms: int) -> None:
        await self._database.write(
            partial(tokens.note_use, tenant_id=tenant, token_id=token_id, now_ms=now_ms, grain_ms=grain_ms),
            Sight(tenant),
            ends_nothing,
        )


def _after(
    connection: Connection, count: Callable[[Connection], Drift], note: Callable[[Connection, Drift], Drift]
) -> Drift:
    return note(connection, count(connection))
