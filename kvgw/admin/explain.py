"""Why was there no hit: for whoever looks after a namespace."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from fastapi import APIRouter
from pydantic import BaseModel, Field

from kvgw.admin.bodies import Body, StrictRoute
from kvgw.admin.seat import NamespaceName, Seated, TenantName
from kvgw.gateway.explain import explain_in
from tenancy.access import Permission

router: Final = APIRouter(route_class=StrictRoute, tags=["namespaces"])

HexKey: TypeAlias = Annotated[str, Field(pattern=r"^([0-9a-f]{2}){1,64}$")]


class Question(Body):
    """Keys, and their KV format by its fingerprint or its canonical form; all in hexadecimal."""

    keys: Annotated[list[HexKey], Field(min_length=1, max_length=256)]
    fingerprint: Annotated[str | None, Field(pattern=r"^[0-9a-f]{64}$")] = None
    canonical: Annotated[str | None, Field(pattern=r"^([0-9a-f]{2})*$", max_length=48 * 1024)] = None


class KeyInfo(BaseModel):
    """What became of a key."""

    key: str
    why: str
    at_ms: Annotated[int, Field(description="When; 0: nothing says when.")]


class DifferenceInfo(BaseModel):
    """A field in which the KV format differs from the nearest one of the namespace."""

    field: str
    asked: str
    nearest: str


class Explanation(BaseModel):
    """Why keys cannot be had."""

    answers: list[KeyInfo]
    differences: list[DifferenceInfo]
    sentence: str


@router.post("/tenants/{tenant}/namespaces/{namespace}/explain")
async def explain(tenant: TenantName, namespace: NamespaceName, question: Question, seat: Seated) -> Explanation:
    """For each key, whether it can be had at this gateway, or why not."""
    seat.require(Permission.READ)
    place = await seat.namespace(tenant, namespace)
    reply = await explain_in(
        seat.opened.rooms,
        place,
        [bytes.fromhex(key) for key in question.keys],
        None if question.canonical is None else bytes.fromhex(question.canonical),
        None if question.fingerprint is None else bytes.fromhex(question.fingerprint),
    )
    return Explanation(
        answers=[
            KeyInfo(key=key, why=one.why, at_ms=one.at_ms)
            for key, one in zip(question.keys, reply.answers, strict=True)
        ],
        differences=[
            DifferenceInfo(field=one.field, asked=one.asked, nearest=one.nearest) for one in reply.differences
        ],
        sentence=reply.sentence,
    )
