"""The check of the house: rows, tiers, counters, leases, deletion jobs and the audit head against each other.

Looking changes nothing. Repairing sets right what can be set right without guessing, and touches nothing in a tier
that looks implausible: many blobs that are gone at once mean a disk that is not mounted or another bucket, not damage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Final
from uuid import UUID

from kvgw.fence import LEASE_SECONDS
from kvgw.gateway.rooms import Rooms
from kvgw.maintenance.findings import Finding, FsckReport, seconds
from kvgw.maintenance.pacing import Pauses
from kvgw.maintenance.sweep import Sweep
from kvgw.maintenance.tiercheck import TierCheck
from tenancy.audit.chain import Act
from tenancy.errors import NamespaceUnknown
from tenancy.inspecting import Fault
from tenancy.model import Scope

PAGE: Final = 100
LATE_MS: Final = 600_000
"""A lease that ended so long ago should have been taken up by somebody."""
STUCK_MS: Final = 3_600_000
"""A deletion that has not ended by then needs somebody."""
AUDIT_TAIL: Final = 256
"""Records before the head whose links are computed anew; `kvgw audit verify` does it for all."""

_FAULTS: Final[Mapping[Fault, str]] = {
    "unreferenced": "a live chunk that no entry points at",
    "headless": "an entry whose chunk is on its way out",
    "undoomed": "a chunk on its way out whose placement no sweep would delete",
    "stranded": "a chunk that only the staging of a process had that is not alive any more",
}


class Fsck:
    """Checks one gateway's disk, and what all gateways share. `grace_s`: per tier, when an orphan may be deleted."""

    def __init__(self, rooms: Rooms, sweep: Sweep, grace_s: Mapping[str, float]) -> None:
        self._rooms = rooms
        self._sweep = sweep
        self._grace_s = grace_s

    async def run(self, act: Act | None = None) -> FsckReport:
        """Look; with `act`, the audit log's words for it, set right what is found. Raises `CatalogUnavailable`."""
        report = FsckReport()
        catalog = self._rooms.catalog
        tenants = [tenant for tenant, _ in await catalog.tenants()]
        for tenant in tenants:
            await self._counters(tenant, report, act)
        scopes = [one.scope for tenant in tenants for one in await catalog.namespaces(tenant)]
        for label in self._rooms.tiers:
            check = TierCheck(self._rooms, label, scopes, self._grace_s[label], report)
            await check.run(act)
        for scope in scopes:
            with contextlib.suppress(NamespaceUnknown):  # it was deleted meanwhile
                await self._chunks(scope, report, act)
                await self._leases(scope, report, act)
        for tenant in tenants:
            await self._deletions(tenant, report)
        await self._audit(report)
        await self._unconfigured(scopes, report)
        return report

    async def _counters(self, tenant: UUID, report: FsckReport, act: Act | None) -> None:
        rooms = self._rooms
        told = act or Act(actor="gateway", action="fsck.look")
        try:
            drifts = await rooms.catalog.recount(tenant, repair=act is not None, act=told, now_ms=rooms.time.now_ms())
        except NamespaceUnknown:  # one was deleted meanwhile; the others are there still
            drifts = await rooms.catalog.recount(tenant, repair=act is not None, act=told, now_ms=rooms.time.now_ms())
        report.looked["counters"] += len(drifts)
        for one in drifts:
            if not one.right:
                sentence = (
                    f"counters are off by {one.stored_bytes} bytes, {one.objects} objects, {one.s3_bytes} bytes in S3"
                )
                report.note(Finding("counter", tenant, one.namespace, str(one.namespace or "the tenant"), sentence))
        if act is not None:
            report.mend("counter", report.found["counter"])

    async def _chunks(self, scope: Scope, report: FsckReport, act: Act | None) -> None:
        """Chunks, entries and placements of a namespace, against the rules that every transaction keeps."""
        rooms, after, pauses = self._rooms, b"", Pauses(self._rooms.clock, self._rooms.turns)
        live = await self._live()  # whoever comes later is seen when a suspect is looked at again
        while (page := await rooms.catalog.faults(scope, live, after, PAGE)).looked:
            after = page.last
            report.looked["chunks"] += page.looked
            await pauses.between()
            if not page.found:
                continue
            suspects = list(page.found)
            again = (await rooms.catalog.faults(scope, await self._live(), b"", len(suspects), suspects)).found
            confirmed = {one: fault for one, fault in again.items() if page.found[one] == fault}
            for blob_id, fault in confirmed.items():
                report.note(Finding(fault, scope.tenant, scope.namespace, blob_id.hex(), _FAULTS[fault]))
            if act is not None and confirmed:
                await self._mend_chunks(scope, confirmed, report, act)

    async def _mend_chunks(self, scope: Scope, confirmed: Mapping[bytes, Fault], report: FsckReport, act: Act) -> None:
        rooms = self._rooms
        wrong = [one for one, fault in confirmed.items() if fault != "stranded"]
        if wrong:
            await rooms.catalog.mend_chunks(scope, wrong, _about(act, "chunk"), rooms.time.now_ms())
            rooms.backlog.note_dead(scope)
        if len(wrong) < len(confirmed):
            await self._sweep.recover(scope)
        now = (await rooms.catalog.faults(scope, await self._live(), b"", len(confirmed), list(confirmed))).found
        for one, fault in confirmed.items():
            report.mend(fault, int(now.get(one) != fault))

    async def _live(self) -> list[str]:
        """Boots of the processes that are alive, this one among them."""
        catalog = self._rooms.catalog
        alive = await catalog.live_boots(self._rooms.time.now_ms(), int(LEASE_SECONDS * 1000))
        return [*alive, catalog.node.boot]

    async def _leases(self, scope: Scope, report: FsckReport, act: Act | None) -> None:
        """Reservations and writes that nobody came back to."""
        rooms = self._rooms
        now_ms = rooms.time.now_ms()
        late = await rooms.catalog.overdue(scope, now_ms - LATE_MS, PAGE)
        for reservation_id, ended_ms in late.reservations:
            sentence = f"a reservation whose lease ended {seconds(now_ms - ended_ms)} ago still takes quota"
            report.note(Finding("reservation", scope.tenant, scope.namespace, reservation_id.hex(), sentence))
        for blob_id, tier, ended_ms in late.writes:
            sentence = f"a write into {tier} whose lease ended {seconds(now_ms - ended_ms)} ago was never taken up"
            report.note(Finding("write", scope.tenant, scope.namespace, blob_id.hex(), sentence))
        if act is None:
            return
        if late.reservations:
            ended = await rooms.catalog.end_reservations(scope, _about(act, "reservation"), now_ms)
            report.mend("reservation", ended.count)
        if late.writes:
            ended = await rooms.catalog.end_writes(scope, now_ms - LATE_MS, _about(act, "write"), now_ms)
            report.mend("write", ended.count)
            rooms.backlog.note_writes(scope)

    async def _deletions(self, tenant: UUID, report: FsckReport) -> None:
        now_ms = self._rooms.time.now_ms()
        for job in await self._rooms.deletions.unfinished(tenant):
            age_ms = now_ms - job.requested_ms
            if job.state == "failed" or age_ms > STUCK_MS:
                why = job.progress.sentence or "it does not say what it waits for"
                sentence = f"a deletion is {job.state} {seconds(age_ms)} after it was asked for: {why}"
                report.note(Finding("deletion", tenant, job.scope.namespace, job.job_id.hex(), sentence))

    async def _audit(self, report: FsckReport) -> None:
        """The end of the audit log: that its last records are there, linked, and that the head is the last of them."""
        catalog = self._rooms.catalog
        head = await catalog.audit_head()
        page = await catalog.audit_page(None, max(0, head.seq - AUDIT_TAIL), 2 * AUDIT_TAIL)
        report.looked["audit"] += len(page.records)
        previous, wrong = None, ""
        for record in page.records:
            if record.expected_hash() != record.hash or previous not in (None, record.previous):
                wrong = (
                    wrong or f"record {record.seq} of the audit log is not what its hash, or the one before it, says"
                )
            previous = record.hash
        last = next((one for one in page.records if one.seq == head.seq), None)
        if head.seq and (last is None or last.hash != head.hash):
            wrong = wrong or f"the audit log's head is record {head.seq}, which is not there or another one"
        beyond = max((one.seq for one in page.records), default=0)
        if beyond > (await catalog.audit_head()).seq:
            wrong = wrong or f"the audit log has record {beyond}, beyond its head"
        if wrong:
            report.note(Finding("audit", None, None, "audit", f"{wrong}; run: kvgw audit verify"))

    async def _unconfigured(self, scopes: Sequence[Scope], report: FsckReport) -> None:
        """Rows of a tier that this gateway does not have."""
        for label in {"nvme", "s3"} - set(self._rooms.tiers):
            node = self._rooms.placement_node(label)
            rows = sum([await self._rooms.catalog.count_placed(scope, label, node) for scope in scopes])
            if rows:
                report.unseen.append(
                    f"{rows} placements are in the {label} tier, which this gateway does not have: set it up, or ask "
                    "a gateway that has it"
                )


def _about(act: Act, kind: str) -> Act:
    return Act(actor=act.actor, action=act.action, target=kind)
