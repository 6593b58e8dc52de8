"""The check of one tier: what does not agree is counted in a first walk, and set right in a second one.

Between them is the question whether it is plausible. The second walk stops at what the first one counted: should a disk
vanish meanwhile, no more is quarantined than was judged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from kvgw.gateway.rooms import Rooms
from kvgw.maintenance.findings import Finding, FsckReport, seconds
from kvgw.maintenance.tierwalk import Dangling, Ownerless, TierWalk
from storage.errors import StorageError
from storage.tier import BlobInfo, blob_name
from tenancy.audit.chain import Act
from tenancy.errors import NamespaceUnknown
from tenancy.model import Scope

IMPLAUSIBLE_COUNT: Final = 100
"""Up to so many are believed whatever their share."""
IMPLAUSIBLE_SHARE: Final = 0.2
"""More than this share of a tier is not."""


@dataclass(slots=True)
class TierCheck:
    """One tier of one check; what it finds goes into `report`."""

    rooms: Rooms
    label: str
    scopes: Sequence[Scope]
    grace_s: float
    """How long a blob must have been there without a row before it may be deleted."""
    report: FsckReport
    _budget: dict[str, int] = field(default_factory=lambda: {"dangling": 0, "orphan": 0})
    """How many of each kind the first walk found that may be touched."""

    async def run(self, act: Act | None) -> None:
        """Look, and with `act` repair. A tier that does not answer is noted as unseen."""
        try:
            walk = await self._look()
            refusal = self._implausible(walk)
            if refusal:
                self.report.refused.append(refusal)
            elif act is not None and any(self._budget.values()):
                await self._repair(act)
        except StorageError as error:
            self.report.unseen.append(f"the {self.label} tier could not be looked through: {error}")

    def _walk(self) -> TierWalk:
        by_id: Mapping[UUID, Scope] = {one.namespace: one for one in self.scopes}
        return TierWalk(self.rooms, self.label, by_id)

    async def _look(self) -> TierWalk:
        walk = self._walk()
        async for one in walk.sightings():
            if isinstance(one, Dangling):
                self._budget["dangling"] += len(one.placements)
                for placed in one.placements:
                    name = blob_name(one.scope.namespace, placed.blob_id)
                    sentence = f"the row says that {self.label} has it, with {placed.length} bytes; it has not"
                    self.report.note(Finding("dangling", one.scope.tenant, one.scope.namespace, name, sentence))
            else:
                self._budget["orphan"] += len(self._ripe(one, walk))
                self._note_orphans(one, walk)
        self.report.looked[f"{self.label} blobs"] += walk.blobs
        self.report.looked[f"{self.label} rows"] += walk.rows
        return walk

    def _note_orphans(self, one: Ownerless, walk: TierWalk) -> None:
        ripe = {info.name for info in self._ripe(one, walk)}
        for info in one.blobs:
            fate = "its grace is over" if info.name in ripe else "it is left to the orphan sweep"
            whose = "no row" if one.scope else "a namespace that the catalog does not know"
            sentence = f"{info.length} bytes in {self.label} with {whose}, {seconds(walk.age_ms(info))} old: {fate}"
            tenant, namespace = (one.scope.tenant, one.scope.namespace) if one.scope else (None, None)
            self.report.note(Finding("orphan", tenant, namespace, info.name, sentence))

    def _ripe(self, one: Ownerless, walk: TierWalk) -> list[BlobInfo]:
        """Those that may be deleted. Whether a whole namespace is foreign is for the orphan sweep to judge."""
        if one.scope is None:
            return []
        return [info for info in one.blobs if walk.age_ms(info) >= 1000 * self.grace_s]

    def _implausible(self, walk: TierWalk) -> str:
        """Why nothing in this tier may be touched; empty when that is not so."""
        gone, ripe = self._budget["dangling"], self._budget["orphan"]
        if gone and not walk.blobs:
            return (
                f"the {self.label} tier lists no blob at all, while {walk.rows} rows say that it has some: is its disk "
                "mounted, its bucket and prefix the right one? Nothing in it was touched"
            )
        if gone > max(IMPLAUSIBLE_COUNT, IMPLAUSIBLE_SHARE * walk.rows):
            return (
                f"{gone} of {walk.rows} blobs are gone from the {self.label} tier at once: that is no damage but "
                "another disk, another bucket or an older copy of it. Nothing in it was touched; bring it back, or "
                "run kvgw wipe"
            )
        if ripe > max(IMPLAUSIBLE_COUNT, IMPLAUSIBLE_SHARE * walk.blobs):
            return (
                f"{ripe} of {walk.blobs} blobs in the {self.label} tier have no row: that may be an older or foreign "
                "catalog. Nothing in it was touched; the orphan sweep deletes what it takes for left by crashes"
            )
        return ""

    async def _repair(self, act: Act) -> None:
        walk = self._walk()
        async for one in walk.sightings():
            if isinstance(one, Ownerless):
                await self._delete(self._ripe(one, walk), act)
            else:
                with contextlib.suppress(NamespaceUnknown):  # it was deleted meanwhile
                    await self._quarantine(one, act)

    async def _quarantine(self, one: Dangling, act: Act) -> None:
        rooms, scope = self.rooms, one.scope
        allowed = one.placements[: self._spend("dangling", len(one.placements))]
        if not allowed:
            return
        told = Act(actor=act.actor, action=act.action, target="dangling", detail={"tier": self.label})
        node = rooms.placement_node(self.label)
        done = await rooms.catalog.end_dangling(scope, self.label, node, allowed, told, rooms.time.now_ms())
        for blob_id in done.dead:
            rooms.staging.drop(blob_name(scope.namespace, blob_id))
        rooms.metrics.refused_blobs.labels(self.label, "fsck").inc(done.count)
        rooms.backlog.note_dead(scope)
        rooms.backlog.note_writes(scope)
        self.report.mend("dangling", done.count)

    async def _delete(self, ripe: Sequence[BlobInfo], act: Act) -> None:
        rooms = self.rooms
        allowed = ripe[: self._spend("orphan", len(ripe))]
        if not allowed:
            return
        await rooms.tiers[self.label].delete([info.name for info in allowed])
        rooms.metrics.swept.labels(self.label).inc(len(allowed))
        told = Act(
            actor=act.actor,
            action=act.action,
            target="orphan",
            detail={"tier": self.label, "count": len(allowed)},
        )
        await rooms.catalog.record_all([told], rooms.time.now_ms())
        self.report.mend("orphan", len(allowed))

    def _spend(self, kind: str, wanted: int) -> int:
        granted = min(wanted, self._budget[kind])
        self._budget[kind] -= granted
        return granted
