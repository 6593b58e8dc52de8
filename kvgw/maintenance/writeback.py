"""Write-back: blobs go from staging to the tiers they are due in, and up to NVMe when they were read from below.

The outbox is in the catalog, so that nothing is forgotten by a crash; a lease on each write keeps two from doing it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from kvgw.gateway.put import first_cause
from kvgw.gateway.rooms import Rooms
from storage.errors import BlobDamaged, BlobMissing, StorageError
from storage.tier import blob_name
from tenancy.model import Scope
from tenancy.placements import DueWrite

BATCH: Final = 64
LEASE_MS: Final = 120_000
"""Longer than any single write to a tier may take."""
WRITE_SECONDS: Final = 60.0
RETRY_FIRST_MS: Final = 500
RETRY_LAST_MS: Final = 60_000
CONCURRENT: Final = 4


class WriteBack:
    """Empties the outbox of namespaces."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    async def promote(self, scope: Scope, blob_ids: Sequence[bytes]) -> None:
        """Make NVMe writes due for chunks that were read from below."""
        rooms = self._rooms
        added = await rooms.catalog.promote(scope, blob_ids, rooms.time.now_ms())
        for blob_id in set(blob_ids) - added:
            rooms.staging.settle(blob_name(scope.namespace, blob_id))
        rooms.backlog.note_writes(scope)

    async def drain(self, scope: Scope) -> int:
        """Write what is due in one namespace now; the number of blobs written.

        Each tier for itself, so that one that is away does not hold up another.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._drain_into(tier, scope)) for tier in self._rooms.tiers]
        except BaseExceptionGroup as group_error:
            raise first_cause(group_error) from group_error
        return sum(task.result() for task in tasks)

    async def _drain_into(self, tier: str, scope: Scope) -> int:
        written = 0
        while True:
            rooms = self._rooms
            now_ms = rooms.time.now_ms()
            due = await rooms.catalog.claim_due(scope, tier, now_ms + LEASE_MS, now_ms, BATCH)
            if not due:
                return written
            room = asyncio.Semaphore(CONCURRENT)
            results = await asyncio.gather(*(self._write(one, room) for one in due))
            await self._record(scope, due, results)
            written += sum(result is True for result in results)

    async def _record(self, scope: Scope, due: Sequence[DueWrite], results: Sequence[bool | None]) -> None:
        rooms = self._rooms
        now_ms = rooms.time.now_ms()
        done = [one for one, result in zip(due, results, strict=True) if result is True]
        failed = [one for one, result in zip(due, results, strict=True) if result is False]
        lost = [one for one, result in zip(due, results, strict=True) if result is None]
        if await rooms.catalog.finish_writes(scope, done, now_ms):
            rooms.backlog.note_dead(scope)
        await rooms.catalog.postpone_writes(scope, [(one, now_ms + self._pause_ms(one)) for one in failed], now_ms)
        if await rooms.catalog.drop_writes(scope, lost, now_ms):
            rooms.backlog.note_dead(scope)
        still_due = await rooms.catalog.outstanding(scope, [one.blob_id for one in due])
        for one in due:
            if one.blob_id not in still_due:
                rooms.staging.settle(one.object_name)

    def _pause_ms(self, failed: DueWrite) -> int:
        wait_ms = min(RETRY_LAST_MS, RETRY_FIRST_MS * 2 ** min(failed.attempts, 10))
        return int(wait_ms * (0.75 + 0.5 * self._rooms.rng.jitter()))

    async def _write(self, due: DueWrite, room: asyncio.Semaphore) -> bool | None:
        """Write one blob: True when done, False to try again later, None when there is nothing left to write.

        Its time, waiting for room included, ends before its lease does: no write outlives its claim.
        """
        rooms = self._rooms
        tier = rooms.tiers.get(due.tier)
        if tier is None:
            return None
        try:
            async with (
                asyncio.timeout(WRITE_SECONDS),
                room,
                rooms.staging.read(
                    due.scope.tenant, due.object_name, due.length, WRITE_SECONDS, self._filler(due)
                ) as reading,
            ):
                await tier.put(due.object_name, reading.view)
        except (BlobMissing, BlobDamaged):
            return None
        except (StorageError, TimeoutError):
            rooms.metrics.tier_failures.labels(due.tier, "put").inc()
            return False
        rooms.metrics.written_back.labels(due.tier).inc(due.length)
        return True

    def _filler(self, due: DueWrite):  # type: ignore[no-untyped-def]  # an async function of one view
        async def fill(view: memoryview) -> None:
            for label, tier in self._rooms.tiers.items():
                if label in due.sources:
                    await tier.get_into(due.object_name, view)
                    return
            raise BlobMissing("neither staging nor any tier has the blob")

        return fill
