"""Eviction: where a disk, a namespace's share of it, or a quota is nearly used, the least valuable chunks make way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from kvgw.gateway.rooms import Rooms
from storage.errors import StorageError
from storage.nvme import NvmeTier
from storage.tier import blob_name
from tenancy.errors import TenancyError
from tenancy.eviction import Candidate
from tenancy.model import Namespace, Scope

HIGH_WATER: Final = 0.90
LOW_WATER: Final = 0.80
CANDIDATES: Final = 512
"""Of a namespace, at a time."""
BATCHES: Final = 64
"""At one look."""


class Eviction:
    """Keeps room on this node's NVMe, and within the quotas of namespaces that want it."""

    def __init__(
        self,
        rooms: Rooms,
        nvme: NvmeTier | None,
        namespaces: Callable[[], Awaitable[Sequence[Namespace]]],
        collect: Callable[[], Awaitable[None]],
    ) -> None:
        """`namespaces` are all that there are; `collect` deletes the bytes of what was given up."""
        self._rooms = rooms
        self._nvme = nvme
        self._namespaces = namespaces
        self._collect = collect

    async def run(self) -> None:
        """Evict where too much is used, until that is no more so or nothing is left to give up; `BATCHES` at most."""
        for _ in range(BATCHES):
            if not await self._some(HIGH_WATER):
                return

    async def serve(self) -> None:
        """Evict for those who find no room on the disk, until cancelled."""
        await self._rooms.disk_room.serve(self._for_put)

    async def _for_put(self) -> bool:
        """Whether there is room, or was more used before: others delete meanwhile."""
        assert self._nvme is not None
        before = self._nvme.statistics.used_bytes
        try:
            given_up = await self._some(LOW_WATER)
        except (StorageError, TenancyError):  # the PUT says that the disk is full, and the next look why nothing leaves
            self._rooms.metrics.maintenance_failures.labels("evict").inc()
            return False
        now = self._nvme.statistics
        return given_up or now.used_bytes < before or now.used_bytes <= LOW_WATER * now.limit_bytes

    async def _some(self, mark: float) -> bool:
        """Evict a batch, bytes and all, where more than `mark` of the disk is used; whether there was anything."""
        given_up = 0
        namespaces = await self._namespaces()
        for namespace in namespaces:
            if namespace.over_quota == "make_room":
                await self.make_room_in(namespace.scope)
            if self._nvme is not None and namespace.nvme_bytes:
                given_up += await self._keep_share(namespace)
        if self._nvme is not None:
            given_up += await self._make_room_on(self._nvme, [one.scope for one in namespaces], mark)
        await self._collect()
        return given_up > 0

    async def make_room_in(self, scope: Scope) -> None:
        """Give up a namespace's own least valuable entries if its quota, or its tenant's, is nearly used."""
        rooms = self._rooms
        while dead := await rooms.catalog.make_room(scope, rooms.time.now_ms()):
            self._forget(scope, dead)

    async def _keep_share(self, namespace: Namespace) -> int:
        """Keep a namespace within its share of this node's disk: the bytes given up."""
        scope = namespace.scope
        used = await self._rooms.catalog.on_nvme(scope)
        if used <= namespace.nvme_bytes:
            return 0
        return await self._give_up(await self._candidates(scope), used - int(HIGH_WATER * namespace.nvme_bytes))

    async def _make_room_on(self, nvme: NvmeTier, scopes: Sequence[Scope], mark: float) -> int:
        space = nvme.statistics
        if space.used_bytes <= mark * space.limit_bytes:
            return 0
        # What was given up before counts as free, even while its disk refuses to delete: giving up more helps nothing.
        used = space.used_bytes
        for scope in scopes:
            leaving = await self._rooms.catalog.leaving_nvme(scope)
            used -= leaving
            if leaving:
                self._rooms.backlog.note_dead(scope)
        if used <= mark * space.limit_bytes:
            return 0
        candidates = [one for scope in scopes for one in await self._candidates(scope)]
        return await self._give_up(candidates, used - int(LOW_WATER * space.limit_bytes))

    async def _candidates(self, scope: Scope) -> list[Candidate]:
        shielded = self._rooms.leases.shielded(scope.tenant)
        now_ms = self._rooms.time.now_ms()
        found = await self._rooms.catalog.eviction_candidates(scope, now_ms, CANDIDATES + len(shielded))
        return [one for one in found if one.blob_id not in shielded]

    async def _give_up(self, candidates: list[Candidate], needed: int) -> int:
        """Give up the least valuable of `candidates`, together `needed` bytes if there are as many: the bytes."""
        given_up = 0
        chosen: defaultdict[Scope, list[bytes]] = defaultdict(list)
        for one in sorted(candidates, key=lambda one: (one.last_hit_ms, -one.depth)):
            if given_up >= needed:
                break
            chosen[one.scope].append(one.blob_id)
            given_up += one.length
        for scope, blob_ids in chosen.items():
            self._forget(scope, await self._rooms.catalog.evict_nvme(scope, blob_ids, self._rooms.time.now_ms()))
        return given_up

    def _forget(self, scope: Scope, dead: Sequence[bytes]) -> None:
        for blob_id in dead:
            self._rooms.staging.drop(blob_name(scope.namespace, blob_id))
        self._rooms.metrics.ended.labels("evicted").inc(len(dead))
        self._rooms.backlog.note_dead(scope)
