"""The crew: runs the maintenance jobs while the gateway serves, each at its pace and all when there is work.

A job that fails is counted, logged once per kind of failure, and tried again at its next turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final
from uuid import UUID

import kvgw
from kvgw.fence import LEASE_SECONDS
from kvgw.gateway.rooms import Rooms
from kvgw.maintenance.books import Books
from kvgw.maintenance.erasing import Erasing
from kvgw.maintenance.evict import Eviction
from kvgw.maintenance.fsck import Fsck
from kvgw.maintenance.keycare import KeyCare
from kvgw.maintenance.orphans import OrphanReport, OrphanSweep
from kvgw.maintenance.scrub import Scrub
from kvgw.maintenance.settling import Settling
from kvgw.maintenance.sweep import Sweep
from kvgw.maintenance.writeback import WriteBack
from storage.errors import StorageError
from storage.nvme import NvmeState, NvmeTier
from storage.tier import blob_name
from storage.together import Together
from tenancy.errors import CatalogUnavailable, NamespaceUnknown, TenancyError
from tenancy.model import Namespace, Scope

log = logging.getLogger("kvgw.maintenance")

BACKLOG_PAUSE_SECONDS: Final = 0.05
"""Work that arrives in a burst is taken up together."""
HEARTBEAT_SECONDS: Final = 5.0
"""A heartbeat that took longer is tried anew, on another connection: the network may have dropped this one silently."""
HITS_BATCH: Final = 500
NO_BLOB: Final = blob_name(UUID(int=0), bytes(16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds between two runs of each job."""

    outbox: float = 2.0
    sweep: float = 10.0
    evict: float = 2.0
    orphans: float = 600.0
    heartbeat: float = 5.0
    reach: float = 15.0
    watch: float = 2.0
    keys: float = 60.0
    usage: float = 10.0
    audit: float = 5.0
    coherence: float = 0.1
    nvme_orphan_grace: float = 300.0
    s3_orphan_grace: float = 86_400.0


class Crew:
    """All maintenance of one gateway. `rates`: bytes per second that write-back may write, by tier; none: no limit."""

    def __init__(self, rooms: Rooms, nvme: NvmeTier | None, pace: Pace, rates: Mapping[str, int] | None = None) -> None:
        self._rooms = rooms
        self._nvme = nvme
        self._pace = pace
        self._told: dict[str, str] = {}
        self.write_back = WriteBack(rooms, rates or {})
        self.settling = Settling(rooms)
        self.sweep = Sweep(rooms)
        self.keys = KeyCare(rooms)
        self.books = Books(rooms)
        self.eviction = Eviction(rooms, nvme, self.namespaces, self._collect_dead)
        grace = {"nvme": pace.nvme_orphan_grace, "s3": pace.s3_orphan_grace}
        self.orphans = OrphanSweep(rooms, grace)
        self.fsck = Fsck(rooms, self.sweep, grace)
        self.scrub = Scrub(rooms)
        self.orphan_reports: dict[str, OrphanReport] = {}
        self.erasing = Erasing(rooms, self.sweep)

    async def prepare(self) -> None:
        """Before the gateway serves: what an earlier run's staging held alone is lost, and said to be so."""
        for scope in await self.scopes():
            await self.sweep.recover(scope)

    async def run(self) -> None:
        """Run all jobs until cancelled."""
        pace = self._pace
        async with asyncio.TaskGroup() as group:
            group.create_task(self._work_through_backlog())
            group.create_task(self._attempt("reach", self.reach))
            group.create_task(self.scrub.serve())
            group.create_task(self._attempt("room", self.eviction.serve))
            for tier in self._rooms.tiers:
                group.create_task(self._write_into(tier))
            if (coherence := self._rooms.coherence) is not None:
                group.create_task(self._repeat("coherence", pace.coherence, coherence.poll))
            for name, period, job in (
                ("outbox", pace.outbox, self.look_at_outbox),
                ("sweep", pace.sweep, self.sweep_everywhere),
                ("evict", pace.evict, self.evict),
                ("deletions", pace.sweep, self.go_on_deleting),
                ("orphans", pace.orphans, self.look_for_orphans),
                ("heartbeat", pace.heartbeat, self.heartbeat),
                ("hits", pace.heartbeat, self.write_down_hits),
                ("reach", pace.reach, self.reach),
                ("watch", pace.watch, self.keys.watch),
                ("keys", pace.keys, self.tend_keys),
                ("usage", pace.usage, self.books.write_down_usage),
                ("audit", pace.audit, self.keep_audit_log),
            ):
                group.create_task(self._repeat(name, period, job))

    async def namespaces(self) -> list[Namespace]:
        """Every namespace of every tenant."""
        catalog = self._rooms.catalog
        return [one for tenant, _ in await catalog.tenants() for one in await catalog.namespaces(tenant)]

    async def scopes(self) -> list[Scope]:
        """Every namespace of every tenant, by its ids."""
        return [one.scope for one in await self.namespaces()]

    async def drain_everywhere(self) -> None:
        """Write everything that is due, and return when it is done or has failed."""
        self.write_back.want(await self.scopes())
        await self._drain()
        await self.look_at_outbox()

    async def look_at_outbox(self) -> None:
        """See what waits to be written, by this node; write-back takes it up."""
        rooms = self._rooms
        scopes = await self.scopes()
        self.write_back.want(scopes)
        rooms.outbox.keep(scopes)
        await self.write_back.measure(scopes)
        await self.write_back.relieve(scopes)
        await self.settling.look(scopes)
        now_ms, waiting = rooms.time.now_ms(), rooms.outbox.waiting()
        for tier in rooms.tiers:
            one = waiting.get(tier)
            rooms.metrics.outbox.labels(tier).set(one.blobs if one else 0)
            rooms.metrics.outbox_seconds.labels(tier).set(max(0, now_ms - one.since_ms) / 1000 if one else 0)
        behind = rooms.outbox.behind()
        if behind is None:
            self._told.pop("behind", None)
        elif self._told.get("behind") != behind.tier:
            self._told["behind"] = behind.tier
            log.warning("%s: chunks that are only staged are refused until it has moved", behind.sentence)

    async def sweep_everywhere(self) -> None:
        """Expire and bury, which one gateway does for all; then delete what nothing points at, each its own."""
        leads = await self._leads("sweep", self._pace.sweep)
        scopes = await self.scopes()
        await self.books.sample(scopes, leads=leads)
        for scope in scopes:
            with contextlib.suppress(NamespaceUnknown):  # a deletion came to its end meanwhile
                if leads:
                    await self.sweep.expire(scope)
                    await self.sweep.recover(scope)
                await self.sweep.renew(scope)
                await self.sweep.collect(scope)

    async def tend_keys(self) -> None:
        """End what may not be opened any more, and drop keys that nothing needs."""
        if await self._leads("keycare", self._pace.keys):
            await self.keys.tend()

    async def keep_audit_log(self) -> None:
        """Record what was done in the last minute; sign checkpoints, which one gateway does for all."""
        await self.books.write_down_totals()
        await self.books.checkpoint(leads=await self._leads("audit", self._pace.audit))

    async def go_on_deleting(self) -> None:
        """Take deletion jobs towards their receipts: each gateway what is its own, one of them what all share."""
        await self.erasing.run(leads=await self._leads("deletions", self._pace.sweep))

    async def evict(self) -> None:
        """Make room on NVMe, in shares and in quotas, where it is short."""
        await self.eviction.run()

    async def look_for_orphans(self) -> None:
        """Look through every tier for blobs without a row."""
        scopes = {scope.namespace: scope for scope in await self.scopes()}
        for label in self._rooms.tiers:
            if label == "s3" and not await self._leads("orphans", self._pace.orphans):
                continue
            report = await self.orphans.look(label, scopes)
            self.orphan_reports[label] = report
            if report.refused:
                self._tell(f"orphans {label}", report.refused)

    async def heartbeat(self) -> None:
        """Say that this process lives, and refresh the gauges."""
        rooms = self._rooms
        try:
            async with asyncio.timeout(HEARTBEAT_SECONDS):
                await self._beat()
        except TimeoutError as error:
            raise CatalogUnavailable(
                f"the catalog database did not take a heartbeat within {HEARTBEAT_SECONDS:g} s"
            ) from error
        rooms.metrics.clock_behind.set(rooms.time.behind_ms / 1000)
        if self._nvme is not None:
            space = self._nvme.statistics
            rooms.metrics.tier_bytes.labels("nvme").set(space.used_bytes)
            rooms.metrics.tier_up.labels("nvme").set(space.state is NvmeState.OK)
            if space.state is not NvmeState.OK:
                self._tell("nvme", f"the NVMe tier takes no writes: {space.reason}")

    async def _beat(self) -> None:
        rooms = self._rooms
        asked_at = rooms.clock.monotonic()
        database_ms = await rooms.catalog.database_now_ms()
        if database_ms is not None:
            rooms.time.adopt(database_ms, asked_at, rooms.clock.monotonic())
        if not await rooms.catalog.heartbeat(rooms.time.now_ms()):
            # Given up by the others while it was away: what only its staging held is lost, and it begins anew.
            await rooms.catalog.announce(kvgw.__version__, rooms.time.now_ms(), int(LEASE_SECONDS * 1000))
        rooms.fence.heard(asked_at)
        alive = await rooms.catalog.live_boots(rooms.time.now_ms(), int(LEASE_SECONDS * 1000))
        rooms.limiter.gateways = max(1, len(alive))  # each grants its part of a rate

    async def write_down_hits(self) -> None:
        """Add the gathered hits to their entries: few at a time, since PUTs of the namespace wait meanwhile."""
        for scope, hits in self._rooms.backlog.take_hits().items():
            with contextlib.suppress(NamespaceUnknown):  # it was deleted meanwhile; the hits of others count
                for start in range(0, len(hits), HITS_BATCH):
                    await self._rooms.catalog.record_hits(scope, hits[start : start + HITS_BATCH])

    async def reach(self) -> None:
        """Ask S3 for a blob that cannot be, so that an outage is known, and said, before anybody needs it."""
        tier = self._rooms.tiers.get("s3")
        if tier is None:
            return
        try:
            await tier.stat([NO_BLOB])
        except StorageError as error:
            self._rooms.metrics.tier_up.labels("s3").set(0)
            self._tell("s3", f"the S3 tier cannot be used now: {error}")
        else:
            self._rooms.metrics.tier_up.labels("s3").set(1)
            self._told.pop("s3", None)

    async def _leads(self, job: str, period: float) -> bool:
        """Whether this gateway does a job for all; another takes over when it has not for three periods."""
        now_ms = self._rooms.time.now_ms()
        return await self._rooms.catalog.lead(job, now_ms + int(3000 * period), now_ms)

    async def _work_through_backlog(self) -> None:
        backlog = self._rooms.backlog
        while True:
            await backlog.work.wait()
            await self._rooms.clock.sleep(BACKLOG_PAUSE_SECONDS)
            backlog.work.clear()
            await self._attempt("backlog", self._hand_out)

    async def _hand_out(self) -> None:
        backlog = self._rooms.backlog
        for scope, blob_ids in backlog.take_promotions().items():
            await self.write_back.promote(scope, sorted(blob_ids))
        scopes = backlog.take_writes()
        self.write_back.want(scopes)
        await self.write_back.measure(scopes)
        await self.write_back.relieve(scopes)
        await self._collect_dead()

    async def _drain(self) -> None:
        async with Together() as group:
            for tier in self._rooms.tiers:
                group.create_task(self.write_back.drain(tier))

    async def _write_into(self, tier: str) -> None:
        while True:
            await self.write_back.wait_for_work(tier)
            await self._attempt("write-back", partial(self._write_round, tier))

    async def _write_round(self, tier: str) -> None:
        await self.write_back.round(tier)

    async def _collect_dead(self) -> None:
        for scope in self._rooms.backlog.take_dead():
            with contextlib.suppress(NamespaceUnknown):
                await self.sweep.collect(scope)
        if self._rooms.backlog.take_deletions():
            await self.go_on_deleting()

    async def _repeat(self, name: str, period: float, job: Callable[[], Awaitable[None]]) -> None:
        while True:
            # Gateways that started together should not all turn to the database at once.
            await self._rooms.clock.sleep(period * (0.9 + 0.2 * self._rooms.rng.jitter()))
            await self._attempt(name, job)

    async def _attempt(self, name: str, job: Callable[[], Awaitable[None]]) -> None:
        try:
            await job()
        except (StorageError, TenancyError) as error:
            self._rooms.metrics.maintenance_failures.labels(name).inc()
            self._tell(name, f"the job {name} failed and is tried again: {error}")
        except Exception:  # a bug of ours in one job must not end the others
            self._rooms.metrics.maintenance_failures.labels(name).inc()
            log.exception("the job %s failed in an unforeseen way and is tried again", name)
        else:
            self._told.pop(name, None)

    def _tell(self, subject: str, sentence: str) -> None:
        """Log a state once, not at every turn."""
        if self._told.get(subject) != sentence:
            self._told[subject] = sentence
            log.warning("%s", sentence)
