"""Coherence: what this gateway may answer from memory while others write too, by leases and never by hope (law 5).

A gateway answers for a tenant from memory while three things hold. The last look at the catalog that it *began* is less
than `LEASE_SECONDS` old by its own monotonic clock. That look saw, in one moment, the tenant's version and this
gateway's own word that it has seen that version. And what it remembers was read under that version.

Whoever ends something raises the version in the same transaction. It acknowledges when every other gateway's word has
reached that version, or when `SETTLED_SECONDS` have passed since its commit: each look that began before it is
over by then. A gateway gives its word only after what is older cannot be answered any more, and looks again before it
answers: so a word that was taken away, because a lease was over, is missed before it is relied on.

One that is frozen or cut off stops by itself, and the first thing that it does when it goes on is to look at its clock.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar
from uuid import UUID

from sqlalchemy import Connection

from kvgw.fence import Fence
from kvgw.metrics import Metrics
from kvgw.runtime import Clock
from tenancy import versions
from tenancy.errors import CatalogUnavailable
from tenancy.timekeeping import CatalogTime
from tenancy.versions import behind

Result = TypeVar("Result")

LEASE_SECONDS: Final = 1.0
"""After the beginning of a look."""
SETTLED_SECONDS: Final = 1.1
"""The lease, and more than any two clocks of machines drift apart meanwhile."""
WATCH_SECONDS: Final = 0.02
WATCH_SLOWER_MAX: Final = 10
"""Many who wait look less often each."""
TENANTS_MAX: Final = 1024
"""Beyond it the tenant asked longest ago is answered by the catalog."""
IDLE_SECONDS: Final = 600.0
"""A tenant that nobody asked for so long costs no look any more."""
EARLIER_RELEASE_MS: Final = 3_600_000
"""A gateway of an earlier release that was heard within this time may still end something, and raise no version."""


class Catalog(Protocol):
    """The database of the catalog, for single statements. Raises `CatalogUnavailable` in time."""

    async def quick(self, body: Callable[[Connection], Result]) -> Result: ...


@dataclass(slots=True)
class _Held:
    """A tenant that was asked for."""

    asked_at: float
    version: int | None = None
    """What may be answered from memory was read under it."""
    until: float = 0.0
    """By the monotonic clock."""
    least: int | None = None
    """A transaction of this gateway has raised the version to it: a look that saw less was too early."""


class Coherence:
    """Of one gateway process, for its event loop. Is the database's `Memory`."""

    def __init__(
        self, catalog: Catalog, boot: str, clock: Clock, time: CatalogTime, fence: Fence, metrics: Metrics
    ) -> None:
        self._catalog = catalog
        self._boot = boot
        self._clock = clock
        self._time = time
        self._fence = fence
        self._metrics = metrics
        self._held: OrderedDict[UUID, _Held] = OrderedDict()
        self._waiting = 0
        self._tidy = False
        self._left = False

    # Answering

    def version(self, tenant: UUID) -> int | None:
        """The version under which the tenant's matches may be remembered, and answered, in this moment; None: neither.

        A tenant that is asked for is looked at from the next turn on.
        """
        now = self._clock.monotonic()
        held = self._held.get(tenant)
        if held is None:
            self._hold(tenant, now)
            return None
        held.asked_at = now
        # A gateway that is fenced may have been given up by the others, and its word been taken away.
        if held.version is None or now >= held.until or self._fence.closed:
            return None
        return held.version

    def _hold(self, tenant: UUID, now: float) -> None:
        if self._left:
            return
        if len(self._held) >= TENANTS_MAX:
            del self._held[min(self._held, key=lambda one: self._held[one].asked_at)]
        self._held[tenant] = _Held(now)

    # Hearing of others

    async def poll(self) -> None:
        """One turn: look at the versions of all tenants that were asked for; give the word for what is new, look again.

        Turns never overlap. Raises `CatalogUnavailable`; what was known then lasts until its lease is over.
        """
        now = self._clock.monotonic()
        for tenant in [one for one, held in self._held.items() if now - held.asked_at > IDLE_SECONDS]:
            del self._held[tenant]
        if not self._held:
            return
        if not self._tidy:
            await self._catalog.quick(versions.forget_gone)
            self._tidy = True
        new = await self._look()
        if new:
            await self._catalog.quick(partial(versions.confirm, boot=self._boot, seen=new))
            await self._look()

    async def _look(self) -> dict[UUID, int]:
        """Renew what stands. The others' versions: from here on nothing older of them is answered."""
        wanted = list(self._held)
        began = self._clock.monotonic()
        since_ms = self._time.now_ms() - EARLIER_RELEASE_MS
        found = await self._catalog.quick(
            partial(versions.look, boot=self._boot, tenants=wanted, heard_since_ms=since_ms)
        )
        new = {}
        for tenant in wanted:
            held, seen = self._held.get(tenant), found.versions.get(tenant)
            if held is None:
                continue
            if seen is None or not found.everyone_raises:
                held.version = None
            elif held.least is not None and behind(seen.current, held.least):
                continue
            elif seen.seen == seen.current:
                held.version, held.until, held.least = seen.current, began + LEASE_SECONDS, None
            else:
                held.version = None
                new[tenant] = seen.current
        return new

    async def leave(self) -> None:
        """Nothing is answered from memory any more; a catalog that cannot be told finds out when the lease is over."""
        self._left = True
        self._held.clear()
        with contextlib.suppress(CatalogUnavailable):
            await self._catalog.quick(partial(versions.leave, boot=self._boot))

    # Telling others

    def ended(self, tenant: UUID, version: int) -> None:
        """A transaction of this gateway has raised the version: nothing older is answered here."""
        held = self._held.get(tenant)
        if held is not None:
            held.version = None
            if held.least is None or behind(held.least, version):
                held.least = version

    async def settled(self, tenant: UUID, version: int) -> None:
        """Return when no other gateway answers from memory what was before `version`, which is committed."""
        committed = self._clock.monotonic()
        self._waiting += 1
        try:
            if not await self._all_dropped(tenant, version, committed + SETTLED_SECONDS):
                self._metrics.coherence_lapsed.inc()
        finally:
            self._waiting -= 1
        self._metrics.coherence_seconds.observe(self._clock.monotonic() - committed)

    async def _all_dropped(self, tenant: UUID, version: int, until: float) -> bool:
        """Wait for every gateway's word; False: there is one that never came, and its lease is over."""
        while True:
            late = await self._late(tenant, version)
            if late == {}:
                return True
            left = until - self._clock.monotonic()
            if left <= 0:
                break
            await self._clock.sleep(min(left, WATCH_SECONDS * min(self._waiting, WATCH_SLOWER_MAX)))
        for boot, seen in (late or {}).items():
            with contextlib.suppress(CatalogUnavailable):
                await self._catalog.quick(partial(versions.drop_reader, tenant_id=tenant, boot=boot, seen=seen))
        return False

    async def _late(self, tenant: UUID, version: int) -> dict[str, int] | None:
        """Gateways that have not yet seen the version, with what they have; None: the catalog does not say."""
        try:
            readers = await self._catalog.quick(partial(versions.readers, tenant_id=tenant))
        except CatalogUnavailable:
            return None
        return {boot: seen for boot, seen in readers.items() if boot != self._boot and behind(seen, version)}
