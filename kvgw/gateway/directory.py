"""Where a request is: its namespace with policy and keys, and its KV format. Looked up once, remembered briefly."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from kvgw.runtime import Clock
from tenancy.access import Caller
from tenancy.catalog import Catalog
from tenancy.errors import FormatUnknown, KeyRefused, KeyUnavailable, NamespaceUnknown
from tenancy.keys.keyring import Keyring, NamespaceKeys
from tenancy.model import FormatRow, Namespace, Scope
from tenancy.naming import format_fingerprint
from tenancy.policy import may_read

POLICY_SECONDS: Final = 2.0
"""A change of policy is in force on every gateway after this time. State and epochs are checked by every statement."""

REMEMBERED_MAX: Final = 16_384

_UNKNOWN: Final = "the namespace does not exist, or this credential may not use it"


@dataclass(frozen=True, slots=True)
class Place:
    """A namespace and its keys."""

    namespace: Namespace
    keys: NamespaceKeys

    @property
    def scope(self) -> Scope:
        return self.namespace.scope


class Directory:
    """Resolves claims of requests. A namespace that is missing and one that is forbidden look alike."""

    def __init__(self, catalog: Catalog, keyring: Keyring, clock: Clock) -> None:
        self._catalog = catalog
        self._keyring = keyring
        self._clock = clock
        self._namespaces: OrderedDict[tuple[UUID, str], tuple[float, Namespace]] = OrderedDict()
        self._tenants: OrderedDict[str, tuple[float, UUID | None]] = OrderedDict()
        self._formats: OrderedDict[tuple[Scope, bytes], FormatRow] = OrderedDict()

    async def place(self, caller: Caller, claim: str) -> Place:
        """The namespace that `caller` claims. Raises `AccessDenied` or `NamespaceUnknown`."""
        namespace = await self._namespace(caller.tenant, caller.namespace(claim))
        place = Place(namespace, await self._keyring.keys(namespace.scope))
        return await self.reaching(place, (namespace.epoch,))

    async def reaching(self, place: Place, epochs: Collection[int]) -> Place:
        """`place` with the data keys of chunks that were found there: another gateway may just have rotated them.

        What cannot be had now stays out, and costs those chunks alone. Raises `KeyGone`.
        """
        if all(epoch in place.keys.data for epoch in epochs):
            return place
        try:
            return Place(place.namespace, await self._keyring.keys(place.scope, epochs))
        except (KeyUnavailable, KeyRefused):
            return place

    async def shared(self, caller: Caller, reference: str) -> Place:
        """The public namespace ``tenant/namespace``, to be read. Raises `NamespaceUnknown`, alike for each reason."""
        tenant, _, name = reference.partition("/")
        owner = await self._tenant(tenant)
        if owner is not None:
            found = await self._namespace(owner, name)
            if found.visibility == "public" and may_read(found.readers, caller.tenant):
                return Place(found, await self._keyring.keys(found.scope))
        raise NamespaceUnknown(_UNKNOWN)

    async def shared_format(self, place: Place, canonical: bytes) -> FormatRow | None:
        """A format as a shared namespace knows it, where it has a fingerprint of its own; None: it does not know it."""
        fingerprint = format_fingerprint(place.keys.names.fingerprint, canonical)
        try:
            return await self.format(place.scope, fingerprint)
        except FormatUnknown:
            return None

    async def format(self, scope: Scope, fingerprint: bytes) -> FormatRow:
        """The registered format. Raises `FormatUnknown`."""
        known = self._formats.get((scope, fingerprint))
        if known is None:
            known = await self._catalog.format(scope, fingerprint)
            if known is None:
                raise FormatUnknown("this KV format is not registered in the namespace; call register first")
            self.remember(scope, known)
        return known

    def remember(self, scope: Scope, known: FormatRow) -> None:
        """Formats never change: once known, known for good."""
        self._formats[scope, known.fingerprint] = known
        if len(self._formats) > REMEMBERED_MAX:
            self._formats.popitem(last=False)

    def forget(self, tenant: UUID) -> None:
        """Look the tenant's namespaces up anew."""
        for key in [key for key in self._namespaces if key[0] == tenant]:
            del self._namespaces[key]

    async def _tenant(self, name: str) -> UUID | None:
        remembered = self._tenants.get(name)
        if remembered is not None and remembered[0] > self._clock.monotonic():
            return remembered[1]
        found = await self._catalog.tenant(name)
        self._tenants[name] = (self._clock.monotonic() + POLICY_SECONDS, found)
        if len(self._tenants) > REMEMBERED_MAX:
            self._tenants.popitem(last=False)
        return found

    async def _namespace(self, tenant: UUID, name: str) -> Namespace:
        remembered = self._namespaces.get((tenant, name))
        if remembered is not None and remembered[0] > self._clock.monotonic():
            return remembered[1]
        found = await self._catalog.namespace(tenant, name)
        if found is None or found.state != "active":
            raise NamespaceUnknown(_UNKNOWN)
        self._namespaces[tenant, name] = (self._clock.monotonic() + POLICY_SECONDS, found)
        if len(self._namespaces) > REMEMBERED_MAX:
            self._namespaces.popitem(last=False)
        return found
