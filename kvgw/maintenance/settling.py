"""Settling: staging gives back what waits in it for a write that is owed no more (law 7).

Whoever makes a blob's last write settles it. A write may also end without its gateway: the chunk is deleted or expires
through another one, another one writes it, or the catalog was away when a promotion should have been made due.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final
from uuid import UUID

from kvgw.gateway.rooms import Rooms
from storage.tier import blob_name, parse_name
from tenancy.model import Scope

BATCH: Final = 500
EVERY_SECONDS: Final = 10.0


class Settling:
    """Compares what waits in staging with what the catalog says is owed."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._next_at = rooms.clock.monotonic()
        self._waited: frozenset[str] = frozenset()
        """What waited at the last look."""
        self._unknown: dict[str, frozenset[bytes]] = {}
        """Blobs without a row, and the reservations that they may belong to: those of when they were first seen so."""

    async def look(self, scopes: Iterable[Scope]) -> None:
        """Give back what is owed no more, if the last look is long enough ago. Raises `CatalogUnavailable`.

        Only what waited then too: what has just come may be about to be made due. `scopes`: all namespaces that are.
        """
        now = self._rooms.clock.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + EVERY_SECONDS
        names = self._rooms.staging.dirty_names()
        before, self._waited = self._waited, frozenset(names)
        self._unknown = {name: held for name, held in self._unknown.items() if name in self._waited}
        waiting: defaultdict[UUID, list[bytes]] = defaultdict(list)
        for name in names:
            if name in before:
                namespace, blob_id = parse_name(name)
                waiting[namespace].append(blob_id)
        for scope in scopes:
            blob_ids = waiting.pop(scope.namespace, [])
            for start in range(0, len(blob_ids), BATCH):
                await self._settle(scope, blob_ids[start : start + BATCH])
        for namespace, blob_ids in waiting.items():  # deleted as a whole since they came
            for blob_id in blob_ids:
                self._rooms.staging.drop(blob_name(namespace, blob_id))

    async def _settle(self, scope: Scope, blob_ids: Sequence[bytes]) -> None:
        staging = self._rooms.staging
        found = await self._rooms.catalog.debts(scope, blob_ids)
        for blob_id in blob_ids:
            name = blob_name(scope.namespace, blob_id)
            if blob_id in found.kept:
                staging.settle(name)
            elif blob_id not in found.owed:
                # A PUT seals before it commits: its blobs have no row yet, but its reservation is there.
                of = self._unknown.get(name, found.under_way) & found.under_way
                if of and blob_id not in found.ended:
                    self._unknown[name] = of
                else:
                    staging.drop(name)
