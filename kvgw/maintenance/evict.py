"""Eviction from NVMe: when the disk's share is nearly used, the least valuable chunks go, down to a low-water mark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from kvgw.gateway.rooms import Rooms
from storage.nvme import NvmeTier
from storage.tier import blob_name
from tenancy.eviction import Candidate
from tenancy.model import Scope

HIGH_WATER: Final = 0.90
LOW_WATER: Final = 0.80
CANDIDATES: Final = 512


class Eviction:
    """Keeps room on this node's NVMe."""

    def __init__(self, rooms: Rooms, nvme: NvmeTier) -> None:
        self._rooms = rooms
        self._nvme = nvme

    async def make_room(self, scopes: Iterable[Scope]) -> int:
        """Evict if more than the high-water mark is used; bytes that will be free once the sweep has run."""
        space = self._nvme.statistics
        if space.used_bytes <= HIGH_WATER * space.limit_bytes:
            return 0
        scopes = list(scopes)
        # What was given up before counts as free, even while its disk refuses to delete: giving up more helps nothing.
        used = space.used_bytes - sum([await self._rooms.catalog.leaving_nvme(scope) for scope in scopes])
        if used <= HIGH_WATER * space.limit_bytes:
            return 0
        needed = used - int(LOW_WATER * space.limit_bytes)
        candidates: list[Candidate] = []
        for scope in scopes:
            shielded = self._rooms.leases.shielded(scope.tenant)
            found = await self._rooms.catalog.eviction_candidates(scope, CANDIDATES + len(shielded))
            candidates += [one for one in found if one.blob_id not in shielded]
        candidates.sort(key=lambda one: (one.last_hit_ms, -one.depth))
        chosen: defaultdict[Scope, list[bytes]] = defaultdict(list)
        freed = 0
        for one in candidates:
            if freed >= needed:
                break
            chosen[one.scope].append(one.blob_id)
            freed += one.length
        for scope, blob_ids in chosen.items():
            dead = await self._rooms.catalog.evict_nvme(scope, blob_ids, self._rooms.time.now_ms())
            for blob_id in dead:
                self._rooms.staging.drop(blob_name(scope.namespace, blob_id))
            self._rooms.metrics.ended.labels("evicted").inc(len(dead))
            self._rooms.backlog.note_dead(scope)
        return freed
