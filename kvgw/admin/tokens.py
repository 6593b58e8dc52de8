"""API tokens: made, listed, rotated and revoked. A token's text is in the answer that makes it, and never again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeAlias
from uuid import UUID

from fastapi import APIRouter, Path
from pydantic import BaseModel, Field

from kvgw.admin.bodies import Body, Duration, Name, StrictRoute
from kvgw.admin.seat import Seat, Seated, TenantName
from kvgw.durations import duration_ms
from tenancy.access import CHUNK_PERMISSIONS, DANGEROUS, PATTERN, Permission, Token, new_token
from tenancy.errors import NamespaceUnknown, PermissionMissing, RegistryRefused
from tenancy.policy import DAY_MS
from tenancy.registry import check_name
from tenancy.tokens import TokenRow

router: Final = APIRouter(route_class=StrictRoute, tags=["tokens"])

LIFE_MS_MAX: Final = 365 * DAY_MS
PATTERNS_MAX: Final = 15

TokenId: TypeAlias = Annotated[
    str, Path(pattern="^[a-z2-7]{16}$", description="A token's id: the part after the first `_`.")
]
Pattern: TypeAlias = Annotated[str, Field(min_length=1, max_length=64)]


class NewToken(Body):
    """A token to be made."""

    name: Name
    permissions: Annotated[list[str], Field(min_length=1, max_length=16)]
    namespaces: Annotated[list[Pattern], Field(min_length=1, max_length=PATTERNS_MAX)] = Field(default=["*"])
    default_namespace: Name = "default"
    expires_in: Duration = "90d"
    not_before_ms: Annotated[int, Field(ge=0, le=2**53)] = 0


class Rotation(Body):
    """How long the old token works beside its successor."""

    overlap: Duration = "24h"
    expires_in: Duration = "90d"


class TokenInfo(BaseModel):
    """A token as it is listed: never its secret. Times in Unix milliseconds."""

    id: str
    name: str
    permissions: list[str]
    namespaces: list[str]
    default_namespace: str
    created_ms: int
    created_by: str
    not_before_ms: int
    expires_ms: int
    revoked_ms: int | None
    last_used_ms: int | None


class MadeToken(TokenInfo):
    """A token with its text, which is not kept."""

    token: str


class Revoked(BaseModel):
    """What a revocation came to."""

    revoked: bool


@router.get("/tenants/{tenant}/tokens")
async def list_tokens(seat: Seated, tenant: TenantName) -> list[TokenInfo]:
    """All tokens of a tenant, newest first."""
    seat.require(Permission.TENANT)
    owner = await seat.tenant(tenant)
    return [TokenInfo(**_told(row)) for row in await seat.opened.rooms.catalog.tokens(owner)]


@router.post("/tenants/{tenant}/tokens", status_code=201)
async def make_token(seat: Seated, tenant: TenantName, wanted: NewToken) -> MadeToken:
    """Make a token, with no more permissions and no more namespaces than the caller has."""
    seat.require(Permission.TENANT)
    owner = await seat.tenant(tenant)
    check_name("token", wanted.name)
    permissions = _permissions(seat, wanted.permissions)
    _check_patterns(wanted)
    _check_reach(seat, owner, wanted.namespaces)
    life_ms = _life(wanted.expires_in)
    token = new_token(seat.opened.rooms.rng.token)
    row = seat.opened.authenticator.row(
        token,
        owner,
        permissions,
        " ".join(wanted.namespaces),
        max(seat.now_ms, wanted.not_before_ms) + life_ms,
        default_namespace=wanted.default_namespace,
        name=wanted.name,
        not_before_ms=wanted.not_before_ms,
        created_by=seat.caller.name,
    )
    await seat.opened.rooms.catalog.add_token(row, seat.now_ms)
    return _made(row, token, seat.now_ms)


@router.post("/tenants/{tenant}/tokens/{token_id}/rotate", status_code=201)
async def rotate_token(seat: Seated, tenant: TenantName, token_id: TokenId, wanted: Rotation) -> MadeToken:
    """Make a token's successor, with its permissions; the old one ends after the overlap."""
    seat.require(Permission.TENANT)
    owner = await seat.tenant(tenant)
    old = next((row for row in await seat.opened.rooms.catalog.tokens(owner) if row.token_id == token_id), None)
    if old is None or old.revoked_ms is not None or old.expires_ms <= seat.now_ms:
        raise NamespaceUnknown("there is no such token, or it has ended")
    _check_reach(seat, owner, old.namespaces.split())
    life_ms, overlap_ms = _life(wanted.expires_in), _life(wanted.overlap)
    token = new_token(seat.opened.rooms.rng.token)
    row = seat.opened.authenticator.row(
        token,
        owner,
        _permissions(seat, old.permissions.split()),
        old.namespaces,
        max(seat.now_ms, old.not_before_ms) + life_ms,
        default_namespace=old.default_namespace,
        name=old.name,
        not_before_ms=old.not_before_ms,
        created_by=seat.caller.name,
    )
    await seat.opened.rooms.catalog.replace_token(old.token_id, row, seat.now_ms + overlap_ms, seat.now_ms)
    return _made(row, token, seat.now_ms)


@router.delete("/tenants/{tenant}/tokens/{token_id}")
async def revoke_token(seat: Seated, tenant: TenantName, token_id: TokenId) -> Revoked:
    """End a token on every gateway within five seconds."""
    seat.require(Permission.TENANT)
    owner = await seat.tenant(tenant)
    catalog = seat.opened.rooms.catalog
    return Revoked(revoked=await catalog.revoke_token(owner, token_id, seat.now_ms, seat.caller.name))


def _permissions(seat: Seat, names: list[str]) -> frozenset[Permission]:
    known = {one.value for one in Permission}
    unknown = sorted(set(names) - known)
    if unknown:
        raise RegistryRefused(f"{unknown[0]!r:.60} is no permission; there are {', '.join(sorted(known))}")
    wanted = frozenset(Permission(name) for name in names)
    if wanted & DANGEROUS and wanted & CHUNK_PERMISSIONS:
        raise RegistryRefused(
            f"no token has {_listed(wanted & DANGEROUS)} together with {_listed(wanted & CHUNK_PERMISSIONS)}: make two"
        )
    if not wanted <= seat.caller.permissions:
        raise PermissionMissing(
            f"this credential cannot give {_listed(wanted - seat.caller.permissions)}: it lacks that"
        )
    return wanted


def _check_reach(seat: Seat, owner: UUID, patterns: Sequence[str]) -> None:
    """Raises `PermissionMissing` unless the caller may name all that the patterns name: a token's text is power."""
    if owner != seat.caller.tenant:
        return  # an operator's own patterns speak of its own tenant
    beyond = [one for one in patterns if not seat.caller.may_name_all(one)]
    if beyond:
        raise PermissionMissing(
            f"this credential cannot give the namespaces {beyond[0]}: it may not name all of them itself"
        )


def _listed(permissions: frozenset[Permission]) -> str:
    return ", ".join(sorted(permissions))


def _check_patterns(wanted: NewToken) -> None:
    for pattern in wanted.namespaces:
        if PATTERN.fullmatch(pattern) is None:
            raise RegistryRefused(f"{pattern!r} is no pattern of namespaces: use a-z, 0-9, '.', '_', '-' and '*'")
    check_name("namespace", wanted.default_namespace)


def _life(written: str) -> int:
    life_ms = duration_ms(written)
    if life_ms > LIFE_MS_MAX:
        raise RegistryRefused(f"a token lives at most 365d, not {written}: rotate it")
    return life_ms


def _told(row: TokenRow) -> dict[str, Any]:
    return {
        "id": row.token_id,
        "name": row.name,
        "permissions": row.permissions.split(),
        "namespaces": row.namespaces.split(),
        "default_namespace": row.default_namespace,
        "created_ms": row.created_ms,
        "created_by": row.created_by,
        "not_before_ms": row.not_before_ms,
        "expires_ms": row.expires_ms,
        "revoked_ms": row.revoked_ms,
        "last_used_ms": row.last_used_ms,
    }


def _made(row: TokenRow, token: Token, now_ms: int) -> MadeToken:
    return MadeToken(**{**_told(row), "created_ms": now_ms, "token": token.text})
