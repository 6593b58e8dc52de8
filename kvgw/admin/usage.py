"""Usage of a tenant by hour, day or month: what it asked for and what it kept."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from kvgw.admin.bodies import StrictRoute
from kvgw.admin.seat import Seated, TenantName
from tenancy.access import Permission
from tenancy.metering import DAY_MS, HOUR_MS, METERS

router: Final = APIRouter(route_class=StrictRoute, tags=["usage"])

Milliseconds = Annotated[int | None, Query(ge=0, le=2**62, description="Unix milliseconds.")]


class UsageInfo(BaseModel):
    """Sums of one namespace in one hour, day or month of UTC."""

    namespace: str
    start_ms: Annotated[int, Field(description="The first millisecond of the hour, day or month.")]
    meters: Annotated[dict[str, int], Field(description=f"Those of {', '.join(METERS)} that are not 0.")]


@router.get("/tenants/{tenant}/usage")
async def usage(
    tenant: TenantName,
    seat: Seated,
    namespace: Annotated[str | None, Query(max_length=64)] = None,
    since_ms: Milliseconds = None,
    until_ms: Milliseconds = None,
    by: Literal["hour", "day", "month"] = "day",
) -> list[UsageInfo]:
    """Sums by namespace and time, the oldest first; without `since_ms`, of the last 30 days."""
    seat.require(Permission.READ)
    owner = await seat.tenant(tenant)
    one = None if namespace is None else (await seat.namespace(tenant, namespace)).scope.namespace
    until = seat.now_ms + HOUR_MS if until_ms is None else until_ms
    since = until - 30 * DAY_MS if since_ms is None else since_ms
    found = await seat.opened.rooms.catalog.usage_sums(owner, one, since, until, by)
    return [
        UsageInfo(namespace=sums.namespace, start_ms=sums.bucket_ms, meters=sums.amounts)
        for sums in found
        if owner != seat.caller.tenant or seat.caller.may_name(sums.namespace)
    ]
