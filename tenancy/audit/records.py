"""The catalog's face for what was done: the audit log, usage by the hour, and why a key cannot be had."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from uuid import UUID

from sqlalchemy import Connection

from tenancy import explaining, metering
from tenancy.audit import auditing, chain
from tenancy.audit.auditing import Head, Page, Wanted
from tenancy.audit.chain import Act, Record
from tenancy.audit.checkpoints import Checkpoint
from tenancy.engine import Database, ends_nothing
from tenancy.explaining import Known
from tenancy.metering import Amounts, Bucket, Sum
from tenancy.model import Node, Scope
from tenancy.sight import NO_TENANT, WHOLE_AUDIT, Sight


class Records:
    """What was done, by whom, and how much of it. Raises `CatalogUnavailable`."""

    _database: Database
    node: Node

    # Audit

    async def record_all(self, acts: Sequence[Act], now_ms: int) -> None:
        """Record what has happened already; an act that changes something records itself (`Registrar.act`)."""
        if acts:
            await self._database.write(partial(chain.record_all, acts=acts, now_ms=now_ms), NO_TENANT)

    async def audit_newest(self, wanted: Wanted, before: int | None, limit: int) -> list[Record]:
        """Records, the newest first. Without a tenant in `wanted`: of all of them."""
        sight = WHOLE_AUDIT if wanted.tenant is None else Sight(wanted.tenant)
        return await self._database.read(partial(auditing.newest, wanted=wanted, before=before, limit=limit), sight)

    async def audit_page(self, tenant: UUID | None, after: int, limit: int) -> Page:
        """Records in rising order, of one tenant or (None) of all."""
        sight = WHOLE_AUDIT if tenant is None else Sight(tenant)
        return await self._database.read(partial(auditing.page, tenant=tenant, after=after, limit=limit), sight)

    async def audit_head(self) -> Head:
        return await self._database.read(auditing.head, NO_TENANT)

    async def audit_notes(self, after: int, limit: int) -> list[tuple[int, str]]:
        return await self._database.read(partial(auditing.notes, after=after, limit=limit), NO_TENANT)

    async def last_checkpoint(self) -> tuple[int, int, str] | None:
        return await self._database.read(auditing.last_checkpoint, NO_TENANT)

    async def add_checkpoint(self, one: Checkpoint) -> bool:
        return await self._database.write(partial(auditing.add_checkpoint, one=one), NO_TENANT)

    # Usage

    async def add_usage(self, tenant: UUID, amounts: Amounts) -> None:
        await self._database.write(
            partial(metering.add, tenant_id=tenant, amounts=amounts), Sight(tenant), ends_nothing
        )

    async def sample_usage(self, tenant: UUID, elapsed_ms: int, now_ms: int) -> None:
        await self._database.write(
            partial(metering.sample, tenant_id=tenant, elapsed_ms=elapsed_ms, now_ms=now_ms),
            Sight(tenant),
            ends_nothing,
        )

    async def usage_sums(
        self, tenant: UUID, namespace: UUID | None, since_ms: int, until_ms: int, by: Bucket
    ) -> list[Sum]:
        def body(connection: Connection) -> list[Sum]:
            return metering.sums(connection, tenant, namespace, since_ms, until_ms, by)

        return await self._database.read(body, Sight(tenant))

    async def forget_usage(self, scope: Scope, before_ms: int) -> int:
        return await self._database.write(
            partial(metering.forget, scope=scope, before_ms=before_ms), Sight(scope.tenant), ends_nothing
        )

    # Explaining

    async def explain(self, scope: Scope, format_id: int, entry_keys: Sequence[bytes], now_ms: int) -> list[Known]:
        def body(connection: Connection) -> list[Known]:
            return explaining.explain(connection, scope, format_id, entry_keys, self.node, now_ms)

        return await self._database.read(body, Sight(scope.tenant))

    async def canonical_forms(self, scope: Scope) -> list[bytes]:
        return await self._database.read(partial(explaining.canonical_forms, scope=scope), Sight(scope.tenant))
