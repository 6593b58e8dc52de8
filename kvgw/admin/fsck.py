"""The check of the house, asked of a gateway that serves."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from fastapi import APIRouter
from pydantic import BaseModel

from kvgw.admin.bodies import Body, StrictRoute
from kvgw.admin.seat import Seated
from kvgw.maintenance.findings import Finding, FsckReport, Verdict
from tenancy.access import Permission

router: Final = APIRouter(route_class=StrictRoute, tags=["upkeep"])


class Fsck(Body):
    """Whether to set right what is found, or only to say it."""

    repair: bool = False


class FindingShown(BaseModel):
    """One thing that is not as it should be."""

    kind: str
    tenant: UUID | None
    namespace: UUID | None
    what: str
    sentence: str


class Checked(BaseModel):
    """What was looked at, what was found, and what came of it."""

    verdict: Verdict
    """``clean``; ``findings``: some are left; ``refused``: implausible; ``unseen``: nobody could look somewhere."""
    looked: dict[str, int]
    found: dict[str, int]
    mended: dict[str, int]
    left: int
    findings: list[FindingShown]
    """The first of each kind; `found` counts all."""
    refused: list[str]
    unseen: list[str]


@router.post("/fsck")
async def fsck(seat: Seated, wanted: Fsck) -> Checked:
    """Compare rows, tiers, counters, leases, deletion jobs and the audit head, while the gateway serves."""
    seat.require(Permission.OPERATOR)
    report = await seat.opened.crew.fsck.run(seat.act("fsck.repair") if wanted.repair else None)
    return _shown(report)


def _shown(report: FsckReport) -> Checked:
    return Checked(
        verdict=report.verdict,
        looked=dict(report.looked),
        found={str(kind): count for kind, count in report.found.items()},
        mended={str(kind): count for kind, count in report.mended.items() if count},
        left=report.left,
        findings=[_finding(one) for one in report.findings],
        refused=report.refused,
        unseen=report.unseen,
    )


def _finding(one: Finding) -> FindingShown:
    return FindingShown(kind=one.kind, tenant=one.tenant, namespace=one.namespace, what=one.what, sentence=one.sentence)
