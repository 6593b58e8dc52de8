"""Tenants: made, limited, suspended and resumed by the operator. They end by a deletion, which leaves a receipt."""

from __future__ import annotations

from typing import Annotated, Final, Literal
from uuid import UUID

from fastapi import APIRouter
from pydantic import BaseModel, Field

from kvgw.admin.bodies import Body, Limit, Name, StrictRoute
from kvgw.admin.seat import Seat, Seated, TenantName
from tenancy.access import DEFAULT_NAMESPACE, Permission
from tenancy.errors import NamespaceUnknown
from tenancy.policy import Policy
from tenancy.provision import create_namespace
from tenancy.registry import TenantRow
from tenancy.schema import UNLIMITED

router: Final = APIRouter(route_class=StrictRoute, tags=["tenants"])


class Limits(Body):
    """What all namespaces of a tenant may hold together."""

    limit_bytes: Limit = 0
    limit_objects: Limit = 0
    limit_s3_bytes: Limit = 0

    def policy(self) -> Policy:
        return Policy(
            limit_bytes=self.limit_bytes or UNLIMITED,
            limit_objects=self.limit_objects or UNLIMITED,
            limit_s3_bytes=self.limit_s3_bytes or UNLIMITED,
        )


class NewTenant(Limits):
    """A tenant to be made; it gets the namespace ``default``."""

    name: Name


class TenantChange(Body):
    """What to change; what is not named stays."""

    state: Literal["active", "suspended"] | None = None
    limits: Limits | None = None


class TenantInfo(BaseModel):
    """A tenant, its limits (0: none) and what it uses."""

    id: UUID
    name: str
    state: str
    created_ms: int
    limit_bytes: int
    limit_objects: int
    limit_s3_bytes: int
    stored_bytes: Annotated[int, Field(description="Sealed bytes, each chunk once.")]
    objects: int
    s3_bytes: int


@router.get("/tenants")
async def list_tenants(seat: Seated) -> list[TenantInfo]:
    """All tenants, by name."""
    seat.require(Permission.OPERATOR)
    found = sorted(await seat.opened.rooms.catalog.tenants(), key=lambda one: one[1])
    return [await _info(seat, tenant) for tenant, _ in found]


@router.post("/tenants", status_code=201)
async def create_tenant(seat: Seated, wanted: NewTenant) -> TenantInfo:
    """Make a tenant. Its tokens are made apart."""
    seat.require(Permission.OPERATOR)
    rooms = seat.opened.rooms
    tenant = UUID(bytes=rooms.rng.token(16), version=4)
    await rooms.catalog.create_tenant(tenant, wanted.name, seat.now_ms, seat.caller.name)
    limits = wanted.policy()
    if limits != Policy():
        await _limit(seat, tenant, limits)
    await create_namespace(
        rooms.catalog,
        rooms.keyring,
        rooms.rng.token,
        seat.now_ms,
        tenant,
        DEFAULT_NAMESPACE,
        seat.opened.default_policy,
        seat.caller.name,
    )
    return await _info(seat, tenant)


@router.get("/tenants/{tenant}")
async def show_tenant(seat: Seated, tenant: TenantName) -> TenantInfo:
    """One tenant: the caller's own, or any for an operator."""
    seat.require(Permission.READ)
    return await _info(seat, await seat.tenant(tenant))


@router.patch("/tenants/{tenant}")
async def change_tenant(seat: Seated, tenant: TenantName, change: TenantChange) -> TenantInfo:
    """Suspend, resume or limit a tenant. A suspended tenant's tokens end within seconds; its chunks stay."""
    seat.require(Permission.OPERATOR)
    owner = await seat.tenant(tenant)
    if change.limits is not None:
        await _limit(seat, owner, change.limits.policy())
    if change.state is not None:
        act = seat.act("tenant.state", tenant=owner, detail={"state": change.state})
        await seat.opened.rooms.catalog.set_tenant_state(owner, change.state, act, seat.now_ms)
    return await _info(seat, owner)


async def _limit(seat: Seat, tenant: UUID, limits: Policy) -> None:
    act = seat.act(
        "tenant.limits",
        tenant=tenant,
        detail={
            "limit_bytes": limits.limit_bytes,
            "limit_objects": limits.limit_objects,
            "limit_s3_bytes": limits.limit_s3_bytes,
        },
    )
    await seat.opened.rooms.catalog.limit_tenant(tenant, limits, act, seat.now_ms)


async def _info(seat: Seat, tenant: UUID) -> TenantInfo:
    row: TenantRow | None = await seat.opened.rooms.catalog.describe_tenant(tenant)
    if row is None:
        raise NamespaceUnknown("the tenant was deleted meanwhile")
    return TenantInfo(
        id=row.tenant,
        name=row.name,
        state=row.state,
        created_ms=row.created_ms,
        limit_bytes=shown(row.usage.limit_bytes),
        limit_objects=shown(row.usage.limit_objects),
        limit_s3_bytes=shown(row.usage.limit_s3_bytes),
        stored_bytes=row.usage.stored_bytes,
        objects=row.usage.objects,
        s3_bytes=row.usage.s3_bytes,
    )


def shown(limit: int) -> int:
    """A limit as it is written: 0 for none."""
    return 0 if limit >= UNLIMITED else limit
