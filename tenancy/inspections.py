"""The catalog's face for checks of the house: questions in pages, and repairs that are audited as they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from sqlalchemy import Connection

from tenancy import inspecting, putting
from tenancy.audit import chain
from tenancy.audit.chain import Act
from tenancy.engine import Database
from tenancy.inspecting import Faults, Mended, Overdue, Placed, Sealing
from tenancy.model import Node, Scope
from tenancy.sight import Sight


class Inspections:
    """What is there, and what is wrong with it. Raises `CatalogUnavailable`; a repair also `NamespaceUnknown`."""

    _database: Database
    node: Node

    async def count_placed(self, scope: Scope, tier: str, node: str) -> int:
        return await self._database.read(
            partial(inspecting.count_placed, scope=scope, tier=tier, node=node), Sight(scope.tenant)
        )

    async def placed(
        self, scope: Scope, tier: str, node: str, after: bytes, until: bytes | None, limit: int
    ) -> list[Placed]:
        return await self._database.read(
            lambda connection: inspecting.placed(connection, scope, tier, node, after, until, limit),
            Sight(scope.tenant),
        )

    async def still_placed(self, scope: Scope, tier: str, node: str, seen: Sequence[Placed]) -> list[Placed]:
        return await self._database.read(
            partial(inspecting.still_placed, scope=scope, tier=tier, node=node, seen=seen), Sight(scope.tenant)
        )

    async def sealings(self, scope: Scope, tier: str, node: str, after: bytes, limit: int) -> list[Sealing]:
        return await self._database.read(
            lambda connection: inspecting.sealings(connection, scope, tier, node, after, limit), Sight(scope.tenant)
        )

    async def faults(
        self, scope: Scope, live_boots: Sequence[str], after: bytes, limit: int, among: Sequence[bytes] | None = None
    ) -> Faults:
        return await self._database.read(
            lambda connection: inspecting.faults(connection, scope, live_boots, after, limit, among),
            Sight(scope.tenant),
        )

    async def overdue(self, scope: Scope, before_ms: int, limit: int) -> Overdue:
        return await self._database.read(
            partial(inspecting.overdue, scope=scope, node=self.node, before_ms=before_ms, limit=limit),
            Sight(scope.tenant),
        )

    async def end_dangling(
        self, scope: Scope, tier: str, node: str, seen: Sequence[Placed], act: Act, now_ms: int
    ) -> Mended:
        body = partial(inspecting.end_dangling, scope=scope, tier=tier, node=node, seen=seen, now_ms=now_ms)
        return await self._mend(scope, body, act, now_ms)

    async def mend_chunks(self, scope: Scope, blob_ids: Sequence[bytes], act: Act, now_ms: int) -> Mended:
        body = partial(inspecting.mend_chunks, scope=scope, blob_ids=blob_ids, now_ms=now_ms)
        return await self._mend(scope, body, act, now_ms)

    async def end_writes(self, scope: Scope, before_ms: int, act: Act, now_ms: int) -> Mended:
        body = partial(inspecting.end_writes, scope=scope, node=self.node, before_ms=before_ms, now_ms=now_ms)
        return await self._mend(scope, body, act, now_ms)

    async def end_reservations(self, scope: Scope, act: Act, now_ms: int) -> Mended:
        """`reclaim_expired`, audited."""
        return await self._mend(scope, lambda one: Mended(putting.reclaim_expired(one, scope, now_ms)), act, now_ms)

    async def _mend(self, scope: Scope, body: Callable[[Connection], Mended], act: Act, now_ms: int) -> Mended:
        def transaction(connection: Connection) -> Mended:
            done = body(connection)
            if done.count:
                detail = {**act.detail, "count": done.count}
                told = replace(act, tenant=scope.tenant, namespace=scope.namespace, detail=detail)
                chain.record(connection, told, now_ms)
            return done

        return await self._database.write(transaction, Sight(scope.tenant))
