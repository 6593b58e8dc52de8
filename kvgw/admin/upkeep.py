"""Upkeep: the operator's checks of what must always hold, on a gateway that serves."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from fastapi import APIRouter
from pydantic import BaseModel

from kvgw.admin.bodies import Body, StrictRoute
from kvgw.admin.seat import Seated
from tenancy.access import Permission
from tenancy.recounting import Drift

router: Final = APIRouter(route_class=StrictRoute, tags=["upkeep"])


class Recount(Body):
    """Whether to set counters right, or only to say which are not."""

    repair: bool = False


class CounterDrift(BaseModel):
    """Counters that are not what their rows sum up to: counter minus rows."""

    tenant: UUID
    namespace: UUID | None
    stored_bytes: int
    objects: int
    s3_bytes: int


class Recounted(BaseModel):
    """What was counted, and what was off."""

    counted: int
    """Quota rows that were compared: one a namespace, one a tenant."""
    drifts: list[CounterDrift]
    repaired: bool


@router.post("/recount")
async def recount(seat: Seated, wanted: Recount) -> Recounted:
    """Count every namespace's rows and compare them with its quota counters (law 4), while the gateway serves."""
    seat.require(Permission.OPERATOR)
    catalog = seat.opened.rooms.catalog
    act = seat.act("quota.repair")
    counted = [
        drift
        for tenant, _ in await catalog.tenants()
        for drift in await catalog.recount(tenant, repair=wanted.repair, act=act, now_ms=seat.now_ms)
    ]
    off = [one for one in counted if not one.right]
    return Recounted(counted=len(counted), drifts=[_shown(one) for one in off], repaired=bool(off) and wanted.repair)


def _shown(drift: Drift) -> CounterDrift:
    return CounterDrift(
        tenant=drift.tenant,
        namespace=drift.namespace,
        stored_bytes=drift.stored_bytes,
        objects=drift.objects,
        s3_bytes=drift.s3_bytes,
    )
