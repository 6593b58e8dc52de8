"""Orphans: bytes in a tier that no row points at, left by crashes. Deleted when seen twice, a grace period apart.

A listing that would have most of a tier deleted is not believed: it is a lost or foreign catalog, not a crash.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from kvgw.gateway.rooms import Rooms
from storage.tier import Tier, parse_name
from tenancy.model import Scope

PAGE: Final = 1000
IMPLAUSIBLE_COUNT: Final = 50
"""Up to so many orphans are believed whatever their share."""
IMPLAUSIBLE_SHARE: Final = 0.2
"""More orphans than this share of a tier are not believed."""


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
        unknown: list[str] = []
        page: list[str] = []
        async for info in tier.scan():
            page.append(info.name)
            report.seen += 1
            if len(page) == PAGE:
                unknown += await self._without_row(label, page, scopes)
                page = []
        unknown += await self._without_row(label, page, scopes)
        if len(unknown) > max(IMPLAUSIBLE_COUNT, IMPLAUSIBLE_SHARE * report.seen):
            report.waiting = len(unknown)
            report.refused = (
                f"{len(unknown)} of {report.seen} blobs in {label} have no row in this catalog; that is no crash but "
                "a lost or foreign catalog: nothing is deleted. Bring the catalog back; if the blobs may go, delete "
                "them by hand while no gateway runs"
            )
            return report
        await self._delete(tier, label, unknown, report)
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

    async def _without_row(self, label: str, names: list[str], scopes: dict[UUID, Scope]) -> list[str]:
        by_namespace: defaultdict[UUID, dict[bytes, str]] = defaultdict(dict)
        for name in names:
            namespace, blob_id = parse_name(name)
            by_namespace[namespace][blob_id] = name
        unknown: list[str] = []
        for namespace, blobs in by_namespace.items():
            scope = scopes.get(namespace)
            known: set[bytes] = set()
            if scope is not None:
                node = self._rooms.placement_node(label)
                known = await self._rooms.catalog.known_objects(scope, label, node, list(blobs))
            unknown += [name for blob_id, name in blobs.items() if blob_id not in known]
        return unknown
