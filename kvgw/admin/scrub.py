"""The scrub of a gateway: started, looked at and stopped by an operator; done by the gateway's own maintenance."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter
from pydantic import BaseModel, Field

from kvgw.admin.bodies import Body, StrictRoute
from kvgw.admin.seat import Seated
from kvgw.maintenance.scrub import ScrubReport, State
from tenancy.access import Permission
from tenancy.schema import UNLIMITED

router: Final = APIRouter(route_class=StrictRoute, tags=["upkeep"])

RATE: Final = 64 * 1024 * 1024


class Wanted(Body):
    """How fast, and how much of it."""

    rate: Annotated[int, Field(ge=0, le=UNLIMITED, description="Bytes a second; 0: no limit.")] = RATE
    sample: Annotated[float, Field(gt=0, le=1, description="Share of the blobs, drawn by chance.")] = 1.0


class TierShown(BaseModel):
    """How far it is in one tier."""

    blobs: int
    bytes: int
    damaged: int
    skipped: int


class ScrubShown(BaseModel):
    """The last scrub since the gateway started."""

    state: State
    rate: int
    sample: float
    started_ms: int
    ended_ms: int
    tiers: dict[str, TierShown]
    sentence: str


@router.post("/scrub")
async def start(seat: Seated, wanted: Wanted) -> ScrubShown:
    """Open the blobs of this node's NVMe and of S3 again, in the background."""
    seat.require(Permission.OPERATOR)
    rooms, scrub = seat.opened.rooms, seat.opened.crew.scrub
    scrub.start(wanted.rate, wanted.sample, seat.act("scrub.repair"))
    act = seat.act("scrub.start", detail={"rate": wanted.rate, "sample": str(wanted.sample)})
    await rooms.catalog.record_all([act], seat.now_ms)
    return _shown(scrub.report)


@router.get("/scrub")
async def status(seat: Seated) -> ScrubShown:
    """How far the last scrub is."""
    seat.require(Permission.OPERATOR)
    return _shown(seat.opened.crew.scrub.report)


@router.delete("/scrub")
async def stop(seat: Seated) -> ScrubShown:
    """End the scrub that is under way."""
    seat.require(Permission.OPERATOR)
    seat.opened.crew.scrub.stop()
    return _shown(seat.opened.crew.scrub.report)


def _shown(report: ScrubReport) -> ScrubShown:
    return ScrubShown(
        state=report.state,
        rate=report.rate,
        sample=report.sample,
        started_ms=report.started_ms,
        ended_ms=report.ended_ms,
        tiers={
            label: TierShown(blobs=one.blobs, bytes=one.nbytes, damaged=one.damaged, skipped=one.skipped)
            for label, one in report.tiers.items()
        },
        sentence=report.sentence,
    )
