"""Keys while a gateway runs: those of a shredded namespace leave memory within seconds, old ones go once unused."""

from __future__ import annotations

from functools import partial
from typing import Final

from kvgw.gateway.rooms import Rooms
from storage.tier import blob_name
from tenancy.audit.chain import Act
from tenancy.errors import NamespaceUnknown
from tenancy.keys import epochs
from tenancy.model import Namespace, Scope
from tenancy.registrar import GATEWAY

BATCH: Final = 256

OLD_KEY_MS: Final = 3_600_000
"""An epoch's key is kept for so long after the next one began, far above the longest request that may still use it."""


class KeyCare:
    """What the gateway does about keys by itself."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    async def watch(self) -> None:
        """Zero the keys in memory of namespaces that are on their way out, whichever gateway was told to shred them.

        No request finds a chunk of them any more since the moment of the shredding; this ends those under way.
        """
        rooms = self._rooms
        held = rooms.keyring.held()
        there: dict[Scope, Namespace] = {}
        for tenant in {scope.tenant for scope in held}:
            there |= {one.scope: one for one in await rooms.catalog.namespaces(tenant)}
        for scope in held:
            if scope not in there or there[scope].state == "deleting":
                rooms.keyring.destroy(scope)

    async def tend(self) -> None:
        """End what may not be opened any more, then drop the keys that nothing needs: one gateway does it for all."""
        for tenant, _ in await self._rooms.catalog.tenants():
            for namespace in await self._rooms.catalog.namespaces(tenant):
                if namespace.state == "deleting":
                    await self._end_unreadable(namespace.scope)
                elif namespace.epoch > 1:
                    await self._tend(namespace)

    async def _tend(self, namespace: Namespace) -> None:
        rooms, scope = self._rooms, namespace.scope
        try:
            rows = await rooms.catalog.wrapped_keys(scope)
        except NamespaceUnknown:
            return  # shredded in this moment
        kept = [row.epoch for row in rows if row.purpose == "data"]
        if len(kept) < 2:
            return
        if min(kept) < namespace.min_decrypt_epoch:
            await self._end_unreadable(scope)
        before_ms = rooms.time.now_ms() - OLD_KEY_MS
        unused = await rooms.catalog.unused_epochs(scope, before_ms)
        if unused:
            act = Act(
                actor=GATEWAY,
                action="key.prune",
                target=namespace.name,
                tenant=scope.tenant,
                namespace=scope.namespace,
                detail={"epochs": " ".join(map(str, unused))[:1024]},
            )
            body = partial(epochs.prune, scope=scope, superseded_before_ms=before_ms)
            await rooms.catalog.act(act, body, scope.tenant, rooms.time.now_ms())
            rooms.keyring.forget(scope)

    async def _end_unreadable(self, scope: Scope) -> None:
        rooms = self._rooms
        while True:
            count, dead = await rooms.catalog.end_unreadable(scope, rooms.time.now_ms(), BATCH)
            for blob_id in dead:
                rooms.staging.drop(blob_name(scope.namespace, blob_id))
            if dead:
                rooms.backlog.note_dead(scope)
            rooms.metrics.ended.labels("lost").inc(count)
            if count < BATCH:
                return
