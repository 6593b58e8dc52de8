"""The audit log: a tenant reads its own records, the operator all of them."""

from __future__ import annotations

from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from kvgw.admin.bodies import StrictRoute
from kvgw.admin.seat import OWN, Seat, Seated
from tenancy.access import NAME, Permission
from tenancy.audit.auditing import PAGE_MAX, Wanted
from tenancy.audit.chain import Record
from tenancy.errors import NamespaceUnknown

router: Final = APIRouter(route_class=StrictRoute, tags=["audit"])

NUMBER_MAX: Final = 2**62
PRINTED: Final = "^[ -~]*$"
"""What an actor and an action are made of."""
ALL: Final = "*"
"""In place of a tenant's name: every tenant, and what belongs to none."""


class RecordInfo(BaseModel):
    """A record with all that its hash covers."""

    seq: int
    at_ms: int
    actor: str
    action: str
    tenant: str
    namespace: str
    target: str
    result: str
    detail: Annotated[str, Field(description="JSON, as it was hashed.")]
    previous: Annotated[str, Field(description="Hash of the record before, in hexadecimal.")]
    hash: str


class CheckpointInfo(BaseModel):
    """A signed statement of what the log was."""

    seq: int
    note: str


class HeadInfo(BaseModel):
    """The end of the log."""

    seq: int
    hash: str


class AuditPage(BaseModel):
    """Records in rising order with the checkpoints among them: what an export is made of."""

    whole: Annotated[bool, Field(description="false: the records of one tenant, between which links are missing.")]
    public_key: Annotated[str, Field(description="Of the checkpoints' signatures (Ed25519), in hexadecimal.")]
    head: HeadInfo
    records: list[RecordInfo]
    checkpoints: list[CheckpointInfo]


Limit = Annotated[int, Query(ge=1, le=PAGE_MAX)]
Whose = Annotated[str, Query(max_length=64, description="A tenant; - for the caller's own; * for all (operators).")]
Milliseconds = Annotated[int | None, Query(ge=0, le=NUMBER_MAX, description="Unix milliseconds.")]


@router.get("/audit")
async def newest(
    seat: Seated,
    tenant: Whose = OWN,
    namespace: Annotated[str | None, Query(max_length=64)] = None,
    actor: Annotated[str, Query(max_length=64, pattern=PRINTED)] = "",
    action: Annotated[
        str, Query(max_length=48, pattern=PRINTED, description="As in token.create, or token for all of them.")
    ] = "",
    since_ms: Milliseconds = None,
    until_ms: Milliseconds = None,
    before: Annotated[int | None, Query(ge=1, le=NUMBER_MAX, description="Go on below this number.")] = None,
    limit: Limit = 100,
) -> list[RecordInfo]:
    """Records, the newest first."""
    whose = await _whose(seat, tenant)
    wanted = Wanted(
        tenant=whose,
        namespace=await _namespace(seat, whose, namespace),
        actor=actor,
        action=action,
        since_ms=since_ms,
        until_ms=until_ms,
    )
    return [_info(one) for one in await seat.opened.rooms.catalog.audit_newest(wanted, before, limit)]


@router.get("/audit/records")
async def records(
    seat: Seated, tenant: Whose = OWN, after: Annotated[int, Query(ge=0, le=NUMBER_MAX)] = 0, limit: Limit = PAGE_MAX
) -> AuditPage:
    """Records above number `after`, in rising order, with what is needed to verify them elsewhere."""
    whose = await _whose(seat, tenant)
    rooms = seat.opened.rooms
    page = await rooms.catalog.audit_page(whose, after, limit)
    last = page.records[-1].seq if page.records else after
    notes = [] if whose is not None else await rooms.catalog.audit_notes(after, limit)
    return AuditPage(
        whole=whose is None,
        public_key=rooms.signer.public_key.hex(),
        head=HeadInfo(seq=page.head.seq, hash=page.head.hash.hex()),
        records=[_info(one) for one in page.records],
        # One beyond the log's end belongs to it too: it is what shows that the log was truncated.
        checkpoints=[
            CheckpointInfo(seq=seq, note=note) for seq, note in notes if seq <= last or len(page.records) < limit
        ],
    )


async def _whose(seat: Seat, tenant: str) -> UUID | None:
    """The tenant whose records are wanted, None for all. Raises `AccessDenied`, `NamespaceUnknown`."""
    seat.require(Permission.AUDIT)
    if tenant == ALL:
        seat.require(Permission.OPERATOR)
        return None
    return await seat.tenant(tenant)


async def _namespace(seat: Seat, tenant: UUID | None, name: str | None) -> UUID | None:
    if name is None:
        return None
    found = (
        None
        if tenant is None or NAME.fullmatch(name) is None
        else await seat.opened.rooms.catalog.namespace(tenant, name)
    )
    if found is None:
        raise NamespaceUnknown("it does not exist, or this credential may not use it; name its tenant with it")
    return found.scope.namespace


def _info(one: Record) -> RecordInfo:
    return RecordInfo(
        seq=one.seq,
        at_ms=one.at_ms,
        actor=one.actor,
        action=one.action,
        tenant=str(one.tenant or ""),
        namespace=str(one.namespace or ""),
        target=one.target,
        result=one.result,
        detail=one.detail,
        previous=one.previous.hex(),
        hash=one.hash.hex(),
    )
