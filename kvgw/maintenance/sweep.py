"""The sweep: bytes after the pointer. Deletes doomed blobs from the tiers, then the rows; ends what has expired."""

from __future__ import annotations

from typing import Final

from kvgw.gateway.rooms import Rooms
from storage.errors import StorageError
from storage.tier import blob_name
from tenancy.model import Scope
from tenancy.sweep import DoomedPlacement

BATCH: Final = 256
TOMBSTONE_DAYS: Final = 7
DAY_MS: Final = 86_400_000


class Sweep:
    """Deletes what the catalog says nobody needs any more."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._refusals: dict[tuple[Scope, str], str] = {}

    async def expire(self, scope: Scope) -> int:
        """End expired entries and abandoned reservations of one namespace; how many entries ended."""
        rooms = self._rooms
        now_ms = rooms.time.now_ms()
        await rooms.catalog.reclaim_expired(scope, now_ms)
        await rooms.catalog.forget_tombstones(scope, now_ms - TOMBSTONE_DAYS * DAY_MS)
        total = 0
        while True:
            count, dead = await rooms.catalog.expire(scope, now_ms, BATCH)
            self._drop_residents(scope, dead)
            total += count
            if count < BATCH:
                break
        rooms.metrics.ended.labels("expired").inc(total)
        return total

    async def collect(self, scope: Scope) -> int:
        """Delete the doomed bytes of one namespace and drop their rows; how many chunks are gone for good."""
        return sum([await self._collect_from(tier, scope) for tier in self._rooms.tiers])

    async def _collect_from(self, tier: str, scope: Scope) -> int:
        rooms = self._rooms
        purged = 0
        while True:
            doomed = await rooms.catalog.doomed(scope, tier, rooms.time.now_ms(), BATCH)
            gone = doomed if await self._delete(scope, tier, doomed) else []
            count = await rooms.catalog.purge(scope, gone, BATCH)
            purged += count
            if count < BATCH and len(gone) < BATCH:
                return purged

    def refusals(self, scope: Scope) -> dict[str, str]:
        """Why a tier did not delete this namespace's blobs when it was asked last, by its label."""
        return {tier: self._refusals[scope, tier] for tier in self._rooms.tiers if (scope, tier) in self._refusals}

    async def renew(self, scope: Scope) -> int:
        """Have what proved wrong written anew, where this node has good bytes of it or S3 has; how many placements."""
        count = await self._rooms.catalog.renew(scope, self._rooms.time.now_ms(), BATCH)
        if count:
            self._rooms.backlog.note_writes(scope)
        return count

    async def recover(self, scope: Scope) -> int:
        """End the entries whose only copy was in the staging of a process that is not alive any more; how many."""
        rooms = self._rooms
        now_ms = rooms.time.now_ms()
        count, dead = await rooms.catalog.lose_unplaced(scope, now_ms)
        self._drop_residents(scope, dead)
        rooms.metrics.ended.labels("lost").inc(count)
        return count

    async def _delete(self, scope: Scope, label: str, doomed: list[DoomedPlacement]) -> bool:
        """Whether the bytes are gone; if not, they stay doomed and are tried again."""
        if not doomed:
            return True
        try:
            await self._rooms.tiers[label].delete([one.object_name for one in doomed])
        except StorageError as error:
            self._rooms.metrics.tier_failures.labels(label, "delete").inc()
            self._refusals[scope, label] = str(error)
            return False
        self._refusals.pop((scope, label), None)
        self._rooms.metrics.swept.labels(label).inc(len(doomed))
        return True

    def _drop_residents(self, scope: Scope, blob_ids: list[bytes]) -> None:
        for blob_id in blob_ids:
            self._rooms.staging.drop(blob_name(scope.namespace, blob_id))
        if blob_ids:
            self._rooms.backlog.note_dead(scope)
