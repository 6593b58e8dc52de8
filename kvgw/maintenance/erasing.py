"""Erasing: takes deletion jobs from one state to the next, until their receipts are written.

Every gateway works on every job: it clears and looks through what is its own. What all share is one gateway's part,
whoever holds the lease, so that a job goes on when a gateway dies. Each step may be done twice.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Final

from msgspec.structs import replace

from kvgw.fence import LEASE_SECONDS
from kvgw.gateway.rooms import Rooms
from kvgw.maintenance.looking import Lookout
from kvgw.maintenance.sweep import Sweep
from storage.errors import StorageError
from storage.tier import blob_name
from storage.tracing import Trace
from tenancy.audit.chain import Act
from tenancy.deletion.erasure import Outstanding
from tenancy.deletion.jobs import Job, Look, Progress
from tenancy.deletion.selection import Namespace as Whole
from tenancy.errors import DeletionUnsupported, NamespaceUnknown, TenancyError
from tenancy.model import Namespace, Scope
from tenancy.registrar import GATEWAY
from tenancy.timekeeping import FURTHEST_MS

log = logging.getLogger("kvgw.maintenance")

RETRY_FIRST_MS: Final = 1_000
RETRY_LAST_MS: Final = 300_000
STEPS_MAX: Final = 8
"""State changes of one job in one turn."""
BATCH: Final = 1_000


class Erasing:
    """Works on deletion jobs, for one gateway."""

    def __init__(self, rooms: Rooms, sweep: Sweep) -> None:
        self._rooms = rooms
        self._sweep = sweep
        self._deletions = rooms.deletions
        self.lookout = Lookout(rooms, rooms.deletions)

    async def run(self, *, leads: bool) -> None:
        """Take every job of every tenant as far as it goes now. One that cannot go on says why, and holds up no other.

        Raises the first error, when all jobs have had their turn.
        """
        first: StorageError | TenancyError | None = None
        for tenant, _ in await self._rooms.catalog.tenants():
            jobs = await self._deletions.unfinished(tenant)
            # The tenant's own job comes after those of its namespaces.
            for job in sorted(jobs, key=lambda one: one.kind == "tenant"):
                try:
                    await self.advance(job, leads=leads)
                except (StorageError, TenancyError) as error:
                    first = first or error
                    await self._deletions.note_sentence(job, f"tried again: {error}")
        if first is not None:
            raise first

    async def advance(self, job: Job, *, leads: bool) -> None:
        """Take one job as far as it goes now. Raises the rooms' errors."""
        for _ in range(STEPS_MAX):
            if job.kind == "tenant":
                went_on = leads and await self._step_tenant(job)
            else:
                went_on = await self._step(job, leads=leads)
            now = await self._deletions.again(job) if went_on else None
            if now is None:
                return
            job = now

    async def remove(self, job: Job) -> None:
        """End what the job selects: no read of any gateway finds it then, and no older catalog is taken."""
        rooms = self._rooms
        async for unneeded in self._deletions.remove(job, rooms.time.now_ms()):
            for blob_id in unneeded:
                rooms.staging.drop(blob_name(job.scope.namespace, blob_id))
        await self._deletions.settle(job)
        await rooms.keyring.advance(await self._deletions.grow_generation())
        await self._deletions.move(job, "erasing", replace(job.progress, removed=True))

    async def _step(self, job: Job, *, leads: bool) -> bool:
        """One step of a job; whether its state may have changed."""
        match job.state:
            case "removing" if leads:
                return await self._remove(job)
            case "erasing":
                return await self._erase(job, leads=leads)
            case "verifying":
                return await self._verify(job, leads=leads)
            case "failed" if leads and not 0 < job.progress.retry_ms - self._rooms.time.now_ms() <= FURTHEST_MS:
                progress = Progress(
                    attempt=job.progress.attempt + 1,
                    removed=job.progress.removed,
                    sentence=job.progress.sentence,
                )
                return await self._deletions.move(job, "erasing" if progress.removed else "removing", progress)
        return False

    async def _remove(self, job: Job) -> bool:
        try:
            await self.remove(job)
        except DeletionUnsupported as error:
            await self._fail(job, str(error))
        return True

    async def _erase(self, job: Job, *, leads: bool) -> bool:
        rooms, deletions = self._rooms, self._deletions
        now_ms = rooms.time.now_ms()
        if job.kind == "namespace":
            rooms.keyring.destroy(job.scope)
            if leads and not job.progress.key_destroyed_ms:
                await rooms.keyring.destroy_for_good(job.scope)
                await deletions.note_key_destroyed(job, now_ms)
            await rooms.catalog.reclaim_expired(job.scope, now_ms)
        await self._sweep.collect(job.scope)
        rest = await deletions.outstanding(job)
        if not rest.nothing:
            await deletions.note_sentence(job, await self._waits_for(job.scope, rest))
            return False
        await self._clear(job, leads=leads)
        await deletions.note_cleared(job, rooms.catalog.node.boot, rooms.time.now_ms())
        cleared = await deletions.again(job)
        if not leads or cleared is None or not await self._all(set(cleared.progress.cleared)):
            return False
        if not await deletions.scrub():
            await deletions.note_sentence(job, "waits until nobody reads the catalog's file, to overwrite what it held")
            return False
        return await deletions.move(job, "verifying", replace(cleared.progress, looks=[], sentence=""))

    async def _clear(self, job: Job, *, leads: bool) -> None:
        """No row is left, so nothing is filled anew: let go of what is in memory, on disk and in the bucket."""
        rooms = self._rooms
        wanted = await self.lookout.wanted(job)
        rooms.recent.drop(job.scope)
        for name in rooms.staging.names():
            if wanted.means(name):
                rooms.staging.drop(name)
        for label, tracer in rooms.tracers.items():
            if label == "s3" and not leads:
                continue
            found = [trace async for trace in self.lookout.traces(tracer, wanted)]
            await tracer.clear([trace for trace in found if trace.kind in ("upload", "stranger")])
            await self._delete(label, found)
        if job.kind == "namespace" and leads:
            await self._deletions.drop_tombstones(job)

    async def _delete(self, label: str, found: list[Trace]) -> None:
        """Delete blobs that have no row any more: what a crash, or a PUT that was refused, has left."""
        stray = sorted({trace.name for trace in found if trace.kind in ("blob", "version", "marker")})
        for start in range(0, len(stray), BATCH):
            await self._rooms.tiers[label].delete(stray[start : start + BATCH])

    async def _verify(self, job: Job, *, leads: bool) -> bool:
        rooms, deletions = self._rooms, self._deletions
        if rooms.catalog.node.boot not in _looked(job.progress.looks):
            await deletions.note_looks(job, await self.lookout.at_home(job))
        current = await deletions.again(job)
        if not leads or current is None or current.state != "verifying":
            return False
        if not await self._all(_looked(current.progress.looks)):
            return False
        await deletions.note_looks(job, await self.lookout.at_large(job))
        current = await deletions.again(job)
        if current is None or current.state != "verifying":
            return False
        left = [f"{look.tier} of node {look.node}: {what}" for look in current.progress.looks for what in look.left]
        if left:
            await self._fail(current, f"{len(left)} leftovers were found, the first in {left[0]}")
            return True
        await deletions.finish(current, rooms.signer, GATEWAY, await self._unseen(), rooms.time.now_ms())
        return False

    async def _step_tenant(self, job: Job) -> bool:
        """A tenant's job waits for those of its namespaces; one that was made meanwhile is deleted too."""
        rooms, tenant = self._rooms, job.scope.tenant
        left = await rooms.catalog.namespaces(tenant)
        if left:
            going = {one.scope for one in await self._deletions.unfinished(tenant) if one.kind == "namespace"}
            for late in (one for one in left if one.scope not in going):
                await self._begin(late, job)
            await self._deletions.note_sentence(job, f"waits for the deletion of {len(left)} namespaces")
            return False
        await self._deletions.finish(job, rooms.signer, GATEWAY, await self._unseen(), rooms.time.now_ms())
        return False

    async def _begin(self, late: Namespace, job: Job) -> None:
        rooms = self._rooms
        new = Job(
            scope=late.scope,
            job_id=rooms.rng.token(16),
            kind="namespace",
            selector=Whole(late.name),
            state="removing",
            requested_by=job.requested_by,
            requested_ms=rooms.time.now_ms(),
        )
        act = Act(
            actor=GATEWAY,
            action="deletion.begin",
            target=new.job_id.hex(),
            tenant=late.scope.tenant,
            namespace=late.scope.namespace,
            detail={"kind": "namespace"},
        )
        with contextlib.suppress(NamespaceUnknown):  # a job of its own deletes it already
            await self._deletions.begin([new], act, new.requested_ms)

    async def _fail(self, job: Job, sentence: str) -> None:
        log.warning("the deletion %s failed and is tried again: %s", job.job_id.hex(), sentence)
        self._rooms.metrics.maintenance_failures.labels("deletions").inc()
        pause_ms = min(RETRY_LAST_MS, RETRY_FIRST_MS * 2 ** min(job.progress.attempt - 1, 10))
        progress = replace(job.progress, sentence=sentence, retry_ms=self._rooms.time.now_ms() + pause_ms)
        await self._deletions.move(job, "failed", progress)

    async def _all(self, boots: set[str]) -> bool:
        """Whether every gateway that is alive is among `boots`."""
        return set(await self._live()) <= boots

    async def _live(self) -> list[str]:
        rooms = self._rooms
        live = await rooms.catalog.live_boots(rooms.time.now_ms(), int(LEASE_SECONDS * 1000))
        return [*live, rooms.catalog.node.boot]

    async def _unseen(self) -> list[str]:
        """Nodes of which no gateway is alive: their disks were not looked through."""
        live = set(await self._live())
        return [one.node for one in await self._rooms.catalog.processes() if one.boot not in live]

    async def _waits_for(self, scope: Scope, rest: Outstanding) -> str:
        live = set(await self._live())
        away = {one.node for one in await self._rooms.catalog.processes() if one.boot not in live}
        waits = [f"{rest.chunks} chunks are still to be erased"] if rest.chunks else []
        waits += [f"{rest.reservations} PUTs in flight"] if rest.reservations else []
        waits += [
            f"node {node}, whose disk has some, is away: start its gateway, or run kvgw node forget {node}"
            for node in rest.nodes
            if node in away
        ]
        if rest.chunks:
            refusals = self._sweep.refusals(scope)
            waits += [f"the {tier} tier does not delete: {why}" for tier, why in refusals.items()]
        return "waits: " + "; ".join(waits)


def _looked(looks: list[Look]) -> set[str]:
    """Boots of the gateways that have looked through what is theirs."""
    return {look.boot for look in looks if look.tier == "staging"}
