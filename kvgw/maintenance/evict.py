"""Eviction: where a disk, a namespace's share of it, or a quota is nearly used, the least valuable chunks make way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from kvgw.gateway.rooms import Rooms
from storage.nvme import NvmeTier
from storage.tier import blob_name
from tenancy.eviction import Candidate
from tenancy.model import Namespace, Scope

HIGH_WATER: Final = 0.90
LOW_WATER: Final = 0.80
CANDIDATES: Final = 512


class Eviction:
    """Keeps room on this node's NVMe, and within the quotas of namespaces that want it."""

    def __init__(self, rooms: Rooms, nvme: NvmeTier | None) -> None:
        self._rooms = rooms
        self._nvme = nvme

    async def make_room(self, namespaces: Sequence[Namespace]) -> None:
        """Evict where too much is used; the bytes go with the next sweep."""
        for namespace in namespaces:
            if namespace.over_quota == "make_room":
                await self.make_room_in(namespace.scope)
            if self._nvme is not None and namespace.nvme_bytes:
                await self._keep_share(namespace)
        if self._nvme is not None:
            await self._make_room_on(self._nvme, [one.scope for one in namespaces])

    async def make_room_in(self, scope: Scope) -> None:
        """Give up a namespace's own least valuable entries if its quota, or its tenant's, is nearly used."""
        rooms = self._rooms
        while dead := await rooms.catalog.make_room(scope, rooms.time.now_ms()):
            self._forget(scope, dead)

    async def _keep_share(self, namespace: Namespace) -> None:
        """Keep a namespace within its share of this node's disk."""
        scope = namespace.scope
        used = await self._rooms.catalog.on_nvme(scope)
        if used > namespace.nvme_bytes:
            needed = used - int(HIGH_WATER * namespace.nvme_bytes)
            await self._give_up(await self._candidates(scope), needed)

    async def _make_room_on(self, nvme: NvmeTier, scopes: Sequence[Scope]) -> None:
        space = nvme.statistics
        if space.used_bytes <= HIGH_WATER * space.limit_bytes:
            return
        # What was given up before counts as free, even while its disk refuses to delete: giving up more helps nothing.
        used = space.used_bytes - sum([await self._rooms.catalog.leaving_nvme(scope) for scope in scopes])
        if used <= HIGH_WATER * space.limit_bytes:
            return
        candidates = [one for scope in scopes for one in await self._candidates(scope)]
        await self._give_up(candidates, used - int(LOW_WATER * space.limit_bytes))

    async def _candidates(self, scope: Scope) -> list[Candidate]:
        shielded = self._rooms.leases.shielded(scope.tenant)
        now_ms = self._rooms.time.now_ms()
        found = await self._rooms.catalog.eviction_candidates(scope, now_ms, CANDIDATES + len(shielded))
        return [one for one in found if one.blob_id not in shielded]

    async def _give_up(self, candidates: list[Candidate], needed: int) -> None:
        """Give up the least valuable of `candidates`, together at least `needed` bytes."""
        chosen: defaultdict[Scope, list[bytes]] = defaultdict(list)
        for one in sorted(candidates, key=lambda one: (one.last_hit_ms, -one.depth)):
            if needed <= 0:
                break
            chosen[one.scope].append(one.blob_id)
            needed -= one.length
        for scope, blob_ids in chosen.items():
            self._forget(scope, await self._rooms.catalog.evict_nvme(scope, blob_ids, self._rooms.time.now_ms()))

    def _forget(self, scope: Scope, dead: Sequence[bytes]) -> None:
        for blob_id in dead:
            self._rooms.staging.drop(blob_name(scope.namespace, blob_id))
        self._rooms.metrics.ended.labels("evicted").inc(len(dead))
        self._rooms.backlog.note_dead(scope)
