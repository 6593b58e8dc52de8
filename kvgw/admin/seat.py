"""Who asks, and about whom: a missing tenant or namespace and a forbidden one get the same answer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias
from uuid import UUID

from fastapi import Depends, Header, Path, Query, Request

from kvgw.errors import Code, RequestRefused
from kvgw.gateway.translate import translated
from kvgw.wiring import Opened
from tenancy.access import NAME, Caller, Permission
from tenancy.audit.chain import Act, Detail
from tenancy.errors import NamespaceUnknown
from tenancy.model import Namespace

OWN: Final = "-"
"""In a path, the tenant of the caller."""

PEER_UID: Final = "peer_uid"
"""Where the server notes, for a request over its own Unix socket, the user at the other end."""

_UNKNOWN: Final = "it does not exist, or this credential may not use it"

TenantName: TypeAlias = Annotated[str, Path(max_length=64, description="A tenant's name, or - for the caller's own.")]
NamespaceName: TypeAlias = Annotated[str, Path(max_length=64, description="A namespace's name.")]
Confirm: TypeAlias = Annotated[
    str | None, Query(max_length=64, description="The name of what is about to be destroyed, typed again.")
]


@dataclass(frozen=True, slots=True)
class Seat:
    """A request's caller at a gateway."""

    opened: Opened
    caller: Caller

    def require(self, permission: Permission) -> None:
        """Raises `AccessDenied`, which a client cannot tell from what does not exist."""
        self.caller.require(permission)

    async def tenant(self, name: str) -> UUID:
        """The tenant of this name: the caller's own, or any for an operator. Raises `NamespaceUnknown`."""
        if name == OWN:
            return self.caller.tenant
        found = await self.opened.rooms.catalog.tenant(name) if NAME.fullmatch(name) else None
        if found is None or not (found == self.caller.tenant or Permission.OPERATOR in self.caller.permissions):
            raise NamespaceUnknown(_UNKNOWN)
        return found

    async def namespace(self, tenant: str, name: str) -> Namespace:
        """The namespace, in whatever state, that the caller may name. Raises `AccessDenied`, `NamespaceUnknown`."""
        owner = await self.tenant(tenant)
        if owner == self.caller.tenant:
            self.caller.namespace(name)
        found = await self.opened.rooms.catalog.namespace(owner, name) if NAME.fullmatch(name) else None
        if found is None:
            raise NamespaceUnknown(_UNKNOWN)
        return found

    def act(
        self,
        action: str,
        *,
        target: str = "",
        tenant: UUID | None = None,
        namespace: UUID | None = None,
        detail: Detail | None = None,
    ) -> Act:
        """What the caller is about to do, for the audit log."""
        return Act(
            actor=self.caller.name,
            action=action,
            target=target,
            tenant=tenant,
            namespace=namespace,
            detail=detail or {},
        )

    def about(self, namespace: Namespace, action: str, detail: Detail | None = None) -> Act:
        """What the caller is about to do to a namespace, for the audit log."""
        scope = namespace.scope
        return self.act(action, target=namespace.name, tenant=scope.tenant, namespace=scope.namespace, detail=detail)

    @property
    def now_ms(self) -> int:
        return self.opened.rooms.time.now_ms()


def confirmed(given: str | None, name: str) -> None:
    """Raises `RequestRefused` unless the name of what will be destroyed was typed again."""
    if given != name:
        raise RequestRefused(f"this cannot be undone: repeat the name as confirm={name}")


async def _seat(request: Request, authorization: Annotated[str | None, Header()] = None) -> Seat:
    """The principal of a bearer token; over the gateway's own Unix socket, its own user without one."""
    gateway: Opened = request.app.state.gateway
    scheme, _, token = (authorization or "").partition(" ")
    peer_uid = getattr(request.state, PEER_UID, None)
    with gateway.rooms.meter.strangers_from("http" if peer_uid is None else "admin"), translated():
        if scheme.lower() == "bearer" and token:
            return Seat(gateway, await gateway.authenticator.token(token.strip()))
        if peer_uid == os.geteuid():
            return Seat(gateway, gateway.authenticator.owner())
        raise RequestRefused("a bearer token is needed", Code.UNAUTHENTICATED)


Seated: TypeAlias = Annotated[Seat, Depends(_seat)]
