"""Where a request is: its namespace with policy and keys, and its KV format. Looked up once, remembered briefly."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from kvgw.runtime import Clock
from tenancy.access import NAME, Caller
from tenancy.catalog import Catalog
from tenancy.errors import FormatUnknown, KeyRefused, KeyUnavailable, NamespaceUnknown
from tenancy.keys.keyring import Keyring, NamespaceKeys
from tenancy.model import FormatRow, Namespace, Scope
from tenancy.naming import format_fingerprint
from tenancy.policy import may_read

POLICY_SECONDS: Final = 2.0
"""A change of policy is in force on every gateway after this time. State and epochs are checked by every statement, and
change the version under which anything is answered from memory."""

REMEMBERED_MAX: Final = 16_384

_NOBODY: Final = UUID(int=0)
"""No tenant has this id."""

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
        self._published: OrderedDict[str, tuple[float, Namespace | None]] = OrderedDict()
        self._formats: OrderedDict[tuple[Scope, bytes], FormatRow] = OrderedDict()

    async def place(self, caller: Caller, claim: str) -> Place:
        """The namespace that `caller` claims. Raises `AccessDenied` or `NamespaceUnknown`."""
        namespace = await self._namespace(caller.tenant, caller.namespace(claim))
        place = Place(namespace, await self._keyring.keys(namespace.scope))
        return place if namespace.epoch in place.keys.data else await self.reaching(place, (namespace.epoch,))

    def remembered(self, caller: Caller, claim: str) -> Namespace | None:
        """The namespace that `caller` claims, if it was looked up a moment ago; None says nothing about it."""
        name = claim or caller.default_namespace
        until, namespace = self._namespaces.get((caller.tenant, name), (0.0, None))
        return namespace if until > self._clock.monotonic() and caller.may_name(name) else None

    def at_hand(self, caller: Caller, claim: str) -> Namespace | None:
        """The namespace that `place` would find, with its keys, without asking anybody; None says nothing about it."""
        namespace = self.remembered(caller, claim)
        if namespace is None:
            return None
        keys = self._keyring.at_hand(namespace.scope)
        return None if keys is None or namespace.epoch not in keys.data else namespace

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
        found = await self._public(reference)
        if found is None or not may_read(found.readers, caller.tenant):
            raise NamespaceUnknown(_UNKNOWN)
        return Place(found, await self._keyring.keys(found.scope))

    async def shared_format(self, place: Place, canonical: bytes) -> FormatRow | None:
        """A format as a shared namespace knows it, where it has a fingerprint of its own; None: it does not know it."""
        fingerprint = format_fingerprint(place.keys.names.fingerprint, canonical)
        try:
            return await self.format(place.scope, fingerprint)
        except FormatUnknown:
            return None

    async def format(self, scope: Scope, fingerprint: bytes) -> FormatRow:
        """The registered format. Raises `FormatUnknown`."""
        known = self.known_format(scope, fingerprint)
        if known is None:
            known = await self._catalog.format(scope, fingerprint)
            if known is None:
                raise FormatUnknown("this KV format is not registered in the namespace; call register first")
            self.remember(scope, known)
        return known

    def known_format(self, scope: Scope, fingerprint: bytes) -> FormatRow | None:
        """The registered format, if anybody has asked for it here; None says nothing about it."""
        return self._formats.get((scope, fingerprint))

    def remember(self, scope: Scope, known: FormatRow) -> None:
        """Formats never change: once known, known for good."""
        self._formats[scope, known.fingerprint] = known
        if len(self._formats) > REMEMBERED_MAX:
            self._formats.popitem(last=False)

    def forget(self, tenant: UUID) -> None:
        """Look the tenant's namespaces up anew."""
        for key in [key for key in self._namespaces if key[0] == tenant]:
            del self._namespaces[key]
        self._published.clear()

    async def _public(self, reference: str) -> Namespace | None:
        """The public namespace of an active tenant, whoever may read it; None: it is not there, or not public.

        All of that costs the same questions and is remembered alike, and apart from what owners ask for: the time of an
        answer says nothing about which tenants and private namespaces there are.
        """
        remembered = self._published.get(reference)
        if remembered is not None and remembered[0] > self._clock.monotonic():
            return remembered[1]
        tenant, _, name = reference.partition("/")
        if NAME.fullmatch(tenant) is None or NAME.fullmatch(name) is None:
            return None
        owner = await self._catalog.active_tenant(tenant)
        found = await self._catalog.namespace(_NOBODY if owner is None else owner, name)
        if found is not None and (found.state != "active" or found.visibility != "public"):
            found = None
        self._published[reference] = (self._clock.monotonic() + POLICY_SECONDS, found)
        if len(self._published) > REMEMBERED_MAX:
            self._published.popitem(last=False)
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
