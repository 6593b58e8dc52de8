"""Orphans: bytes in a tier that no row points at, left by crashes. Deleted when seen twice, a grace period apart.

Some blobs without a row are no orphans but strangers: of a namespace that the catalog never heard of, or written when
it was not there to see it. A few may be anything; many mean a lost, older or foreign catalog: then none is deleted.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from kvgw.gateway.rooms import Rooms
from kvgw.maintenance.pacing import Pauses
from storage.tier import BlobInfo, Tier, parse_name
from tenancy.model import Scope

PAGE: Final = 250
IMPLAUSIBLE_COUNT: Final = 50
"""Up to so many strangers are taken for orphans whatever their share."""
IMPLAUSIBLE_SHARE: Final = 0.2
"""More strangers than this share of a tier are not."""
UNSEEN_MARGIN_MS: Final = 600_000
"""Clocks and heartbeats may differ by this before a blob counts as written in the catalog's absence."""


@dataclass(slots=True)
class OrphanReport:
    """What one look at a tier found."""

    seen: int = 0
    deleted: int = 0
    waiting: int = 0
    refused: str = ""
    """Why nothing was deleted, when that is so."""


@dataclass(slots=True)
class _Suspects:
    """Blobs without a row, and when they were first seen so (monotonic seconds)."""

    since: dict[str, float] = field(default_factory=dict)


class OrphanSweep:
    """Looks for orphans in one tier after another."""

    def __init__(self, rooms: Rooms, grace_s: dict[str, float]) -> None:
        """`grace_s`: per tier, how long a blob must be seen without a row before it is an orphan."""
        self._rooms = rooms
        self._grace_s = grace_s
        self._suspects: defaultdict[str, _Suspects] = defaultdict(_Suspects)

    async def look(self, label: str, scopes: dict[UUID, Scope]) -> OrphanReport:
        """Look through a tier once. `scopes`: every namespace of the catalog by its id. Raises `TierUnavailable`."""
        tier = self._rooms.tiers[label]
        report = OrphanReport()
        orphans: list[str] = []
        strangers: list[str] = []
        page: list[BlobInfo] = []
        pauses = Pauses(self._rooms.clock, self._rooms.turns)
        async for info in tier.scan():
            await pauses.between()
            page.append(info)
            report.seen += 1
            if len(page) == PAGE:
                await self._sort_out(label, page, scopes, orphans, strangers)
                page = []
        await self._sort_out(label, page, scopes, orphans, strangers)
        if len(strangers) > max(IMPLAUSIBLE_COUNT, IMPLAUSIBLE_SHARE * report.seen):
            report.refused = (
                f"{len(strangers)} of {report.seen} blobs in {label} are strangers to this catalog; that is no crash "
                "but a lost, older or foreign catalog: they are not deleted. Bring the right catalog back, or run "
                "kvgw wipe"
            )
        else:
            orphans += strangers
        await self._delete(tier, label, orphans, report)
        report.waiting += len(strangers) if report.refused else 0
        return report

    async def _delete(self, tier: Tier, label: str, unknown: list[str], report: OrphanReport) -> None:
        now = self._rooms.clock.monotonic()
        before = self._suspects[label].since
        since = {name: before.get(name, now) for name in unknown}
        ripe = [name for name, first in since.items() if name in before and now - first >= self._grace_s[label]]
        if ripe:
            await tier.delete(ripe)
            self._rooms.metrics.swept.labels(label).inc(len(ripe))
        report.deleted = len(ripe)
        self._suspects[label].since = {name: first for name, first in since.items() if name not in set(ripe)}
        report.waiting = len(self._suspects[label].since)

    async def _sort_out(
        self, label: str, page: list[BlobInfo], scopes: dict[UUID, Scope], orphans: list[str], strangers: list[str]
    ) -> None:
        """Put the blobs of `page` that have no row where they belong."""
        by_namespace: defaultdict[UUID, dict[bytes, BlobInfo]] = defaultdict(dict)
        for info in page:
            namespace, blob_id = parse_name(info.name)
            by_namespace[namespace][blob_id] = info
        for namespace, blobs in by_namespace.items():
            scope = scopes.get(namespace)
            if scope is None:
                strangers += [info.name for info in blobs.values()]
                continue
            node = self._rooms.placement_node(label)
            known = await self._rooms.catalog.known_objects(scope, label, node, list(blobs))
            for blob_id, info in blobs.items():
                if blob_id not in known:
                    (strangers if self._unseen(info) else orphans).append(info.name)

    def _unseen(self, info: BlobInfo) -> bool:
        """Whether the blob was written after this catalog's last sign of life and before this process began."""
        time = self._rooms.time
        return time.found_ms + UNSEEN_MARGIN_MS < info.modified_ms < time.began_ms
