"""Namespaces and their policy: the unit of isolation, keys and quota inside a tenant."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Final, Literal, TypeAlias
from uuid import UUID

from fastapi import APIRouter
from pydantic import BaseModel, Field

from kvgw.admin.bodies import Body, Duration, Limit, Name, Rate, StrictRoute
from kvgw.admin.seat import NamespaceName, Seat, Seated, TenantName
from kvgw.admin.tenants import shown
from kvgw.durations import duration_ms, written
from tenancy.access import Permission
from tenancy.errors import NamespaceUnknown, RegistryRefused
from tenancy.model import Namespace, Usage
from tenancy.policy import EVERYBODY, READERS_MAX, Policy
from tenancy.provision import create_namespace
from tenancy.registry import check_name
from tenancy.schema import UNLIMITED

router: Final = APIRouter(route_class=StrictRoute, tags=["namespaces"])

READERS_SHOWN_MAX: Final = 1024
"""Characters of readers' names in an audit record."""

Reader: TypeAlias = Annotated[str, Field(max_length=64)]
Durability: TypeAlias = Literal["staged", "nvme", "s3"]


class PolicyBody(Body):
    """How the namespace treats its chunks; what is not named stays, or is the gateway's default in a new one."""

    durability: Durability | None = None
    default_ttl: Duration | None = None
    max_ttl: Duration | None = None
    sliding_ttl: bool | None = None
    limit_bytes: Limit | None = None
    limit_objects: Limit | None = None
    limit_s3_bytes: Limit | None = None
    visibility: Literal["private", "public"] | None = None
    readers: Annotated[list[Reader], Field(max_length=READERS_MAX)] | None = None
    over_quota: Literal["reject", "make_room"] | None = None
    hold_bytes: Limit | None = None
    nvme_bytes: Limit | None = None
    requests_per_second: Rate | None = None
    bytes_per_second: Limit | None = None
    concurrent_requests: Rate | None = None

    def over(self, base: Policy, readers: tuple[str, ...] | None) -> Policy:
        """`base` with what this names. Raises `RegistryRefused` for a policy that contradicts itself."""
        named = {name: value for name, value in self.model_dump(exclude={"name", "state"}).items() if value is not None}
        for duration in ("default_ttl", "max_ttl"):
            if duration in named:
                named[f"{duration}_ms"] = duration_ms(named.pop(duration))
        for limit in ("limit_bytes", "limit_objects", "limit_s3_bytes"):
            if limit in named:
                named[limit] = named[limit] or UNLIMITED
        if readers is not None:
            named["readers"] = readers
        if "default_ttl_ms" in named and "max_ttl_ms" not in named:
            named["max_ttl_ms"] = max(base.max_ttl_ms, named["default_ttl_ms"])
        return replace(base, **named)


class NewNamespace(PolicyBody):
    """A namespace to be made."""

    name: Name


class NamespaceChange(PolicyBody):
    """What to change."""

    state: Literal["active", "suspended"] | None = None


class NamespaceInfo(BaseModel):
    """A namespace with its policy (limits: 0 is none) and usage."""

    id: UUID
    name: str
    state: str
    epoch: int
    durability: str
    default_ttl: str
    max_ttl: str
    sliding_ttl: bool
    visibility: str
    readers: list[str]
    over_quota: str
    hold_bytes: int
    nvme_bytes: int
    requests_per_second: int
    bytes_per_second: int
    concurrent_requests: int
    limit_bytes: int
    limit_objects: int
    limit_s3_bytes: int
    stored_bytes: int
    objects: int
    s3_bytes: int
    entries: int
    chunks: int
    formats: int


@router.get("/tenants/{tenant}/namespaces")
async def list_namespaces(seat: Seated, tenant: TenantName) -> list[NamespaceInfo]:
    """The namespaces that the caller may name."""
    seat.require(Permission.READ)
    owner = await seat.tenant(tenant)
    found = await seat.opened.rooms.catalog.namespaces(owner)
    return [await describe(seat, one) for one in found if owner != seat.caller.tenant or seat.caller.may_name(one.name)]


@router.post("/tenants/{tenant}/namespaces", status_code=201)
async def make_namespace(seat: Seated, tenant: TenantName, wanted: NewNamespace) -> NamespaceInfo:
    """Make a namespace: its own keys, its own quota."""
    seat.require(Permission.ADMIN)
    rooms = seat.opened.rooms
    owner = await seat.tenant(tenant)
    check_name("namespace", wanted.name)
    if owner == seat.caller.tenant:
        seat.caller.namespace(wanted.name)
    policy = wanted.over(seat.opened.default_policy, await _readers(seat, wanted.readers))
    if await rooms.catalog.namespace(owner, wanted.name) is not None:  # before keys are made for it
        raise RegistryRefused(f"a namespace named {wanted.name!r} exists already")
    await create_namespace(
        rooms.catalog, rooms.keyring, rooms.rng.token, seat.now_ms, owner, wanted.name, policy, seat.caller.name
    )
    return await _shown(seat, owner, wanted.name)


@router.get("/tenants/{tenant}/namespaces/{namespace}")
async def show_namespace(seat: Seated, tenant: TenantName, namespace: NamespaceName) -> NamespaceInfo:
    """One namespace."""
    seat.require(Permission.READ)
    return await describe(seat, await seat.namespace(tenant, namespace))


@router.patch("/tenants/{tenant}/namespaces/{namespace}")
async def change_namespace(
    seat: Seated, tenant: TenantName, namespace: NamespaceName, change: NamespaceChange
) -> NamespaceInfo:
    """Change the policy, suspend or resume. Every gateway follows within seconds."""
    seat.require(Permission.ADMIN)
    catalog = seat.opened.rooms.catalog
    found = await seat.namespace(tenant, namespace)
    usage, *_ = await catalog.usage(found.scope)
    before = _policy(found, usage)
    after = change.over(before, await _readers(seat, change.readers))
    if after != before:
        act = seat.about(found, "namespace.policy", _told(before, after))
        await catalog.change_policy(found, usage, after, act, seat.now_ms)
    if change.state is not None:
        act = seat.about(found, "namespace.state", {"state": change.state})
        await catalog.set_namespace_state(found.scope, change.state, act, seat.now_ms)
    seat.opened.directory.forget(found.scope.tenant)
    return await _shown(seat, found.scope.tenant, found.name)


async def describe(seat: Seat, found: Namespace) -> NamespaceInfo:
    """A namespace as it is shown."""
    usage, entries, chunks, formats = await seat.opened.rooms.catalog.usage(found.scope)
    return NamespaceInfo(
        id=found.scope.namespace,
        name=found.name,
        state=found.state,
        epoch=found.epoch,
        durability=found.durability,
        default_ttl=written(found.default_ttl_ms),
        max_ttl=written(found.max_ttl_ms),
        sliding_ttl=found.sliding_ttl,
        visibility=found.visibility,
        readers=[one.partition(":")[0] for one in found.readers.split()],
        over_quota=found.over_quota,
        hold_bytes=found.hold_bytes,
        nvme_bytes=found.nvme_bytes,
        requests_per_second=found.requests_per_second,
        bytes_per_second=found.bytes_per_second,
        concurrent_requests=found.concurrent_requests,
        limit_bytes=shown(usage.limit_bytes),
        limit_objects=shown(usage.limit_objects),
        limit_s3_bytes=shown(usage.limit_s3_bytes),
        stored_bytes=usage.stored_bytes,
        objects=usage.objects,
        s3_bytes=usage.s3_bytes,
        entries=entries,
        chunks=chunks,
        formats=formats,
    )


def _told(before: Policy, after: Policy) -> dict[str, str]:
    """What changes, for the audit log, which the tenant reads: of readers their names, and how many those are."""
    old, new = asdict(before), asdict(after)
    told = {name: str(new[name]) for name in new if new[name] != old[name]}
    if "readers" in told:
        # Never their ids: those would tell which tenants there are. All names together are more than a record holds.
        told["readers"] = " ".join(one.partition(":")[0] for one in after.readers)[:READERS_SHOWN_MAX]
        told["readers_count"] = str(len(after.readers))
    return told


async def _shown(seat: Seat, tenant: UUID, name: str) -> NamespaceInfo:
    found = await seat.opened.rooms.catalog.namespace(tenant, name)
    if found is None:
        raise NamespaceUnknown("the namespace was deleted meanwhile")
    return await describe(seat, found)


async def _readers(seat: Seat, names: list[str] | None) -> tuple[str, ...] | None:
    """Readers as they are kept. A name that no tenant has is kept too: whether it has one is nobody else's to know."""
    if names is None:
        return None
    for name in names:
        if name != EVERYBODY:
            check_name("tenant", name)
    catalog = seat.opened.rooms.catalog
    kept = [name if name == EVERYBODY else f"{name}:{await catalog.tenant(name) or '-'}" for name in names]
    return tuple(kept)


def _policy(found: Namespace, usage: Usage) -> Policy:
    return Policy(
        durability=found.durability,
        default_ttl_ms=found.default_ttl_ms,
        max_ttl_ms=found.max_ttl_ms,
        sliding_ttl=found.sliding_ttl,
        limit_bytes=usage.limit_bytes,
        limit_objects=usage.limit_objects,
        limit_s3_bytes=usage.limit_s3_bytes,
        visibility=found.visibility,
        readers=tuple(found.readers.split()),
        over_quota=found.over_quota,
        hold_bytes=found.hold_bytes,
        nvme_bytes=found.nvme_bytes,
        requests_per_second=found.requests_per_second,
        bytes_per_second=found.bytes_per_second,
        concurrent_requests=found.concurrent_requests,
    )
