"""The catalog's face for gateway processes: this one, others, who does which shared job, and their common time."""

from __future__ import annotations

from functools import partial

from tenancy import generation, nodes, processes
from tenancy.engine import Database, ends_untold
from tenancy.model import Node, Scope
from tenancy.nodes import Forgotten
from tenancy.processes import Process
from tenancy.sight import NO_TENANT, Sight


class Presence:
    """Who is there. Raises `CatalogUnavailable`."""

    _database: Database
    node: Node

    async def announce(self, version: str, now_ms: int, lease_ms: int) -> None:
        await self._database.write(
            partial(processes.announce, node=self.node, version=version, now_ms=now_ms, lease_ms=lease_ms), NO_TENANT
        )

    async def heartbeat(self, now_ms: int) -> bool:
        return await self._database.write(partial(processes.heartbeat, node=self.node, now_ms=now_ms), NO_TENANT)

    async def leave(self, now_ms: int) -> None:
        await self._database.write(partial(processes.leave, node=self.node, now_ms=now_ms), NO_TENANT)

    async def processes(self) -> list[Process]:
        return await self._database.read(processes.processes, NO_TENANT)

    async def live_boots(self, now_ms: int, lease_ms: int) -> list[str]:
        return await self._database.read(partial(processes.live_boots, now_ms=now_ms, lease_ms=lease_ms), NO_TENANT)

    async def lead(self, job: str, until_ms: int, now_ms: int) -> bool:
        return await self._database.write(
            partial(processes.lead, job=job, node=self.node, until_ms=until_ms, now_ms=now_ms), NO_TENANT
        )

    async def forget_placements(self, scope: Scope, gone: str, now_ms: int, limit: int) -> Forgotten:
        return await self._database.write(
            partial(nodes.forget_placements, scope=scope, gone=gone, by=self.node, now_ms=now_ms, limit=limit),
            Sight(scope.tenant),
            ends_untold,
        )

    async def forget_process(self, gone: str, now_ms: int) -> bool:
        return await self._database.write(
            partial(nodes.forget_process, gone=gone, by=self.node, now_ms=now_ms), NO_TENANT
        )

    async def high_water_ms(self) -> int:
        return await self._database.read(processes.high_water_ms, NO_TENANT)

    async def admit_generation(self, known: int) -> None:
        await self._database.write(partial(generation.admit, known=known), NO_TENANT)

    async def database_now_ms(self) -> int | None:
        return await self._database.read(processes.database_now_ms, NO_TENANT)
