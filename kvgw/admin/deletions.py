"""Deletions that leave a receipt: by key, prefix, label, format, age, of a namespace, of a tenant."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, TypeAlias
from uuid import UUID

import msgspec
from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, Field

from kvgw.admin.bodies import Body, StrictRoute
from kvgw.admin.seat import Confirm, NamespaceName, Seat, Seated, TenantName, confirmed
from kvgw.admin.selectors import DeletionBody, selector_of
from kvgw.errors import RequestRefused
from tenancy.access import Permission
from tenancy.deletion import selection
from tenancy.deletion.jobs import NO_NAMESPACE, Job
from tenancy.deletion.selection import Selector
from tenancy.errors import NamespaceUnknown, PermissionMissing
from tenancy.model import Scope

router: Final = APIRouter(route_class=StrictRoute, tags=["deletions"])

ANSWER_SECONDS: Final = 60.0
"""A removal that takes longer goes on by itself; until it is done it is not acknowledged."""
TRACES_MAX: Final = 1_000

JobId: TypeAlias = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]


class TracesBody(Body):
    """What to look for: blobs of a namespace, or all of it."""

    tenant: UUID = Field(strict=False)
    namespace: UUID = Field(strict=False)
    blobs: Annotated[list[Annotated[str, Field(pattern="^[0-9a-f]{32}$")]], Field(max_length=TRACES_MAX)] = Field(
        default_factory=list
    )
    whole: bool = False


class DeletionInfo(BaseModel):
    """A deletion job."""

    id: str
    tenant: UUID
    namespace: UUID | None
    kind: str
    state: str
    acknowledged: Annotated[bool, Field(description="Nothing that it selects is found any more.")]
    requested_by: str
    requested_ms: int
    finished_ms: int | None
    attempt: int
    sentence: Annotated[str, Field(description="What it waits for, or why it failed; empty: nothing.")]
    entries: int
    chunks: int
    bytes: int
    retained: int
    receipt: dict[str, Any] | None


class LookInfo(BaseModel):
    """What a gateway sees in one tier."""

    tier: str
    node: str
    method: str
    left: list[str]
    unseen: Annotated[str, Field(description="Why nobody could look; empty: somebody did.")]


class SigningKey(BaseModel):
    """The key that signs receipts."""

    public_key: str


@router.post("/tenants/{tenant}/namespaces/{namespace}/deletions", status_code=202)
async def delete_from(
    seat: Seated,
    response: Response,
    tenant: TenantName,
    namespace: NamespaceName,
    body: DeletionBody,
    confirm: Confirm = None,
) -> DeletionInfo:
    """Delete from a namespace, or all of it. 200: acknowledged, what is selected is gone from every read.

    202: it takes longer, and goes on by itself; ask for the job.
    """
    seat.require(Permission.SHRED if body.everything else Permission.DELETE)
    if body.everything:
        seat.require(Permission.ADMIN)
    found = await seat.namespace(tenant, namespace)
    if body.everything:
        confirmed(confirm, namespace)
    selector = await selector_of(seat, found, body)
    job = _job(seat, found.scope, selector)
    told = await _begin(seat, [job], job)
    response.status_code = 200 if told.acknowledged else 202
    return told


@router.post("/tenants/{tenant}/deletions")
async def delete_tenant(seat: Seated, tenant: TenantName, confirm: Confirm = None) -> DeletionInfo:
    """Delete a tenant with all of its namespaces. Its tokens end within seconds."""
    seat.require(Permission.SHRED)
    seat.require(Permission.TENANT)
    owner = await seat.tenant(tenant)
    if owner == seat.caller.tenant and not seat.caller.may_name_all("*"):
        raise PermissionMissing("this credential cannot delete the tenant: it may not name all of its namespaces")
    rooms = seat.opened.rooms
    row = await rooms.catalog.describe_tenant(owner)
    if row is None:
        raise NamespaceUnknown("the tenant was deleted meanwhile")
    confirmed(confirm, row.name)
    if owner == seat.opened.authenticator.owner().tenant:
        raise RequestRefused("the first tenant belongs to the gateway's owner and stays; delete its namespaces instead")
    going = {one.scope for one in await rooms.deletions.unfinished(owner) if one.kind == "namespace"}
    jobs = [
        _job(seat, one.scope, selection.Namespace(one.name))
        for one in await rooms.catalog.namespaces(owner)
        if one.scope not in going
    ]
    whole = _job(seat, Scope(owner, NO_NAMESPACE), selection.Tenant(row.name))
    return await _begin(seat, [*jobs, whole], whole)


@router.get("/tenants/{tenant}/deletions")
async def list_deletions(seat: Seated, tenant: TenantName) -> list[DeletionInfo]:
    """The newest jobs of a tenant; of one that is gone, by its id."""
    seat.require(Permission.READ)
    owner = await _owner(seat, tenant)
    visible = await _visible(seat, owner)
    return [_info(one) for one in await seat.opened.rooms.deletions.newest(owner) if visible.sees(one)]


@router.get("/tenants/{tenant}/deletions/{job}")
async def show_deletion(seat: Seated, tenant: TenantName, job: JobId) -> DeletionInfo:
    """One job, with its receipt once it is done."""
    seat.require(Permission.READ)
    owner = await _owner(seat, tenant)
    found = await seat.opened.rooms.deletions.job(owner, bytes.fromhex(job))
    if found is None or not (await _visible(seat, owner)).sees(found):
        raise NamespaceUnknown("it does not exist, or this credential may not use it")
    return _info(found)


@router.get("/signing-key")
async def signing_key(seat: Seated) -> SigningKey:
    """The public key that receipts are signed with."""
    seat.require(Permission.READ)
    return SigningKey(public_key=seat.opened.rooms.signer.public_key.hex())


@router.post("/traces")
async def look_again(seat: Seated, body: TracesBody) -> list[LookInfo]:
    """Look for blobs, or for anything of a namespace, in every tier that this gateway reaches."""
    seat.require(Permission.OPERATOR)
    blob_ids = [bytes.fromhex(one) for one in body.blobs]
    scope = Scope(body.tenant, body.namespace)
    looks = await seat.opened.crew.erasing.lookout.again(scope, blob_ids, whole=body.whole)
    return [LookInfo(**asdict(one)) for one in looks]


async def _begin(seat: Seat, jobs: list[Job], asked: Job) -> DeletionInfo:
    """Begin jobs, and see `asked` through to where it is acknowledged."""
    rooms, erasing = seat.opened.rooms, seat.opened.crew.erasing
    scope = asked.scope
    act = seat.act(
        "deletion.begin",
        target=asked.job_id.hex(),
        tenant=scope.tenant,
        namespace=None if asked.kind == "tenant" else scope.namespace,
        detail={"kind": asked.kind},
    )
    await rooms.deletions.begin(jobs, act, asked.requested_ms)
    if asked.kind in ("namespace", "tenant"):  # invisible already, as a whole
        seat.opened.directory.forget(scope.tenant)
        await rooms.keyring.advance(await rooms.deletions.grow_generation())
    else:
        with contextlib.suppress(TimeoutError):  # then it is not acknowledged, and maintenance goes on with it
            async with asyncio.timeout(ANSWER_SECONDS):
                await erasing.remove(asked)
    rooms.backlog.note_deletion()
    now = await rooms.deletions.again(asked)
    return _info(now or asked)


def _job(seat: Seat, scope: Scope, selector: Selector) -> Job:
    kind = selection.kind_of(selector)
    return Job(
        scope=scope,
        job_id=seat.opened.rooms.rng.token(16),
        kind=kind,
        selector=selector,
        state="erasing" if kind == "tenant" else "removing",
        requested_by=seat.caller.name,
        requested_ms=seat.now_ms,
    )


@dataclass(frozen=True, slots=True)
class _Visible:
    """Which of a tenant's jobs the caller may see: those of namespaces that it may name."""

    seat: Seat
    whole: bool
    names: dict[UUID, str]

    def sees(self, job: Job) -> bool:
        if self.whole:
            return True
        name = job.selector.name if isinstance(job.selector, selection.Namespace) else None
        name = name or self.names.get(job.scope.namespace)
        return name is not None and self.seat.caller.may_name(name)


async def _visible(seat: Seat, owner: UUID) -> _Visible:
    whole = owner != seat.caller.tenant or "*" in seat.caller.namespaces
    found = await seat.opened.rooms.catalog.namespaces(owner)
    return _Visible(seat, whole, {one.scope.namespace: one.name for one in found})


async def _owner(seat: Seat, tenant: str) -> UUID:
    """The tenant of a name; for an operator also a tenant that is gone, or on its way, by its id."""
    if tenant == str(seat.caller.tenant):
        return seat.caller.tenant
    try:
        return await seat.tenant(tenant)
    except NamespaceUnknown:
        if Permission.OPERATOR not in seat.caller.permissions:
            raise
        try:
            return UUID(tenant)
        except ValueError:
            raise NamespaceUnknown("there is no tenant of this name; one that is gone is named by its id") from None


def _info(job: Job) -> DeletionInfo:
    return DeletionInfo(
        id=job.job_id.hex(),
        tenant=job.scope.tenant,
        namespace=None if job.kind == "tenant" else job.scope.namespace,
        kind=job.kind,
        state=job.state,
        acknowledged=job.progress.removed or job.kind in ("namespace", "tenant"),
        requested_by=job.requested_by,
        requested_ms=job.requested_ms,
        finished_ms=job.finished_ms,
        attempt=job.progress.attempt,
        sentence=job.progress.sentence,
        entries=job.entries,
        chunks=job.chunks,
        bytes=job.bytes,
        retained=job.retained,
        receipt=None if job.receipt is None else msgspec.json.decode(job.receipt),
    )
