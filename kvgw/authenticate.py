"""Who is calling: a token's owner, or the gateway's own user at the other end of a Unix socket."""

from __future__ import annotations

import hmac
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from kvgw.errors import Code, RequestRefused
from kvgw.runtime import Clock
from tenancy.access import DEFAULT_NAMESPACE, Caller, Permission, Token, parse_token, token_digest
from tenancy.catalog import Catalog
from tenancy.timekeeping import CatalogTime
from tenancy.tokens import TokenRow

REMEMBERED_SECONDS: Final = 5.0
"""A revoked token works for at most so long."""
REMEMBERED_MAX: Final = 4096
_NEVER_MS: Final = 2**63

_REFUSAL: Final = "this token is not valid: unknown, mistyped, expired or revoked"


@dataclass(frozen=True, slots=True)
class Known:
    """A caller, and for how long that needs no new look."""

    caller: Caller
    until: float
    """By the monotonic clock."""
    expires_ms: int
    """When the credential itself does, by the catalog's time."""

    @classmethod
    def for_good(cls, caller: Caller) -> Known:
        """Somebody who needs no credential that may end."""
        return cls(caller, math.inf, _NEVER_MS)


class Authenticator:
    """Turns credentials into callers. Every wrong token gets the same answer."""

    def __init__(self, catalog: Catalog, clock: Clock, time: CatalogTime, pepper: bytes, owner_tenant: UUID) -> None:
        self._catalog = catalog
        self._clock = clock
        self._time = time
        self._pepper = pepper
        self._owner = Caller(owner_tenant, "owner", frozenset(Permission), ("*",), DEFAULT_NAMESPACE)
        self._remembered: OrderedDict[bytes, Known] = OrderedDict()

    def row(
        self,
        token: Token,
        tenant: UUID,
        permissions: frozenset[Permission],
        namespaces: str,
        expires_ms: int,
        *,
        default_namespace: str = DEFAULT_NAMESPACE,
        name: str = "",
        not_before_ms: int = 0,
        created_by: str = "",
    ) -> TokenRow:
        """The row that makes a new token known to this installation."""
        return token_row(
            token,
            self._pepper,
            tenant,
            permissions,
            namespaces,
            expires_ms,
            default_namespace=default_namespace,
            name=name,
            not_before_ms=not_before_ms,
            created_by=created_by,
        )

    def owner(self) -> Caller:
        """The caller for the gateway's own user: every permission, every namespace of the first tenant."""
        return self._owner

    def holds(self, known: Known) -> bool:
        """Whether what was answered for a credential may still be believed without asking again."""
        return known.until > self._clock.monotonic() and known.expires_ms > self._time.now_ms()

    async def token(self, text: str) -> Caller:
        """The caller of a token. Raises `RequestRefused`; a malformed token costs no look-up."""
        return (await self.known(text)).caller

    async def known(self, text: str) -> Known:
        """As `token`, with how long the answer holds."""
        token = parse_token(text)
        if token is None:
            raise RequestRefused(_REFUSAL, Code.UNAUTHENTICATED)
        digest = token_digest(self._pepper, token)
        remembered = self._remembered.get(digest)
        if remembered is not None and self.holds(remembered):
            return remembered
        now_ms = self._time.now_ms()
        row = await self._catalog.token(token.token_id)
        if not _valid(row, digest, now_ms) or row is None:
            raise RequestRefused(_REFUSAL, Code.UNAUTHENTICATED)
        known = Known(as_caller(row), self._clock.monotonic() + REMEMBERED_SECONDS, row.expires_ms)
        self._remembered[digest] = known
        if len(self._remembered) > REMEMBERED_MAX:
            self._remembered.popitem(last=False)
        return known


def as_caller(row: TokenRow) -> Caller:
    """The principal that a token's row describes."""
    permissions = frozenset(Permission(one) for one in row.permissions.split())
    return Caller(
        row.tenant, f"token:{row.token_id}", permissions, tuple(row.namespaces.split()), row.default_namespace
    )


def token_row(
    token: Token,
    pepper: bytes,
    tenant: UUID,
    permissions: frozenset[Permission],
    namespaces: str,
    expires_ms: int,
    *,
    default_namespace: str = DEFAULT_NAMESPACE,
    name: str = "",
    not_before_ms: int = 0,
    created_by: str = "",
) -> TokenRow:
    """The row that makes `token` known."""
    return TokenRow(
        tenant=tenant,
        token_id=token.token_id,
        digest=token_digest(pepper, token),
        permissions=" ".join(sorted(permissions)),
        namespaces=namespaces,
        default_namespace=default_namespace,
        expires_ms=expires_ms,
        revoked_ms=None,
        name=name,
        not_before_ms=not_before_ms,
        created_by=created_by,
    )


def _valid(row: TokenRow | None, digest: bytes, now_ms: int) -> bool:
    # An unknown id is compared too, against nothing that any token has, so that it takes the same time.
    expected = row.digest if row is not None else bytes(32)
    same = hmac.compare_digest(expected, digest)
    return same and row is not None and row.revoked_ms is None and row.not_before_ms <= now_ms < row.expires_ms
