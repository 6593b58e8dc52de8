"""What operators ask: how the gateway is, and the namespaces of their tenant."""

from __future__ import annotations

from dataclasses import dataclass

import kvgw
from kvgw.gateway.directory import Directory
from kvgw.gateway.rooms import Rooms
from kvgw.model import (
    NamespaceCreateRequest,
    NamespaceInfo,
    NamespacesReply,
    StagingStatus,
    StatReply,
    StatusReply,
    TierStatus,
)
from storage.arena import Arena
from storage.nvme import NvmeState, NvmeTier
from tenancy.access import Caller, Permission
from tenancy.errors import CatalogUnavailable, KeyRefused, KeyUnavailable, NamespaceUnknown, RegistryRefused
from tenancy.keys.rootkey import RootKey
from tenancy.model import Namespace
from tenancy.policy import Policy
from tenancy.provision import create_namespace
from tenancy.registry import check_name
from tenancy.schema import UNLIMITED


@dataclass(frozen=True, slots=True)
class AdminVerbs:
    """Answers to operators. Raises the rooms' errors."""

    rooms: Rooms
    directory: Directory
    arena: Arena
    nvme: NvmeTier | None
    root: RootKey
    default_policy: Policy

    async def status(self, caller: Caller) -> StatusReply:
        """The state of every room. What cannot be asked now is said in a note, not raised."""
        caller.require(Permission.METRICS)  # like the metrics it tells of all tenants' load together
        notes: list[str] = []
        catalog = await self._check_catalog(notes)
        root_key = await self._check_root_key(notes)
        tiers = [await self._tier(label, notes) for label in self.rooms.tiers]
        behind = self.rooms.outbox.behind()
        if behind is not None:
            notes.append(f"{behind.sentence}: chunks that are only staged are refused until it has moved")
        behind_ms = self.rooms.time.behind_ms
        if behind_ms > 1000:
            notes.append(f"the clock is {behind_ms / 1000:.0f} s behind the catalog's; entries expire by the catalog's")
        metrics = self.rooms.metrics
        if refused := metrics.total(metrics.refused_blobs):
            notes.append(
                f"{_counted(refused, 'blob')} refused since the start: not the bytes that the catalog describes"
            )
        if limited := metrics.total(metrics.limited):
            notes.append(f"{_counted(limited, 'request')} turned away since the start: over a limit of their tenant")
        return StatusReply(
            version=kvgw.__version__,
            node=self.rooms.catalog.node.node,
            boot=self.rooms.catalog.node.boot,
            catalog=catalog,
            root_key=root_key,
            ready=catalog == "ok" and root_key == "ok",
            notes=notes,
            staging=self._staging(),
            tiers=tiers,
            connections=int(self.rooms.metrics.connections._value.get()),
        )

    async def create_namespace(self, caller: Caller, request: NamespaceCreateRequest) -> NamespaceInfo:
        """Make a namespace with the defaults of this gateway where the request names no value."""
        caller.require(Permission.ADMIN)
        await self._check_new(caller, request.name)
        defaults = self.default_policy
        max_ttl_ms = request.max_ttl_ms or max(defaults.max_ttl_ms, request.default_ttl_ms or 0)
        policy = Policy(
            durability=request.durability or defaults.durability,
            default_ttl_ms=request.default_ttl_ms or min(defaults.default_ttl_ms, max_ttl_ms),
            max_ttl_ms=max_ttl_ms,
            limit_bytes=request.limit_bytes or UNLIMITED,
            limit_objects=request.limit_objects or UNLIMITED,
        )
        rooms = self.rooms
        await create_namespace(
            rooms.catalog,
            rooms.keyring,
            rooms.rng.token,
            rooms.time.now_ms(),
            caller.tenant,
            request.name,
            policy,
            caller.name,
        )
        self.directory.forget(caller.tenant)
        made = await rooms.catalog.namespace(caller.tenant, request.name)
        if made is None:
            raise NamespaceUnknown(f"the namespace {request.name!r} was deleted in the moment of its making")
        return await self._describe(made)

    async def _check_new(self, caller: Caller, name: str) -> None:
        """Refuse a name before keys are made for it. Raises `RegistryRefused` or `AccessDenied`."""
        check_name("namespace", name)
        caller.namespace(name)
        if await self.rooms.catalog.namespace(caller.tenant, name) is not None:
            raise RegistryRefused(f"a namespace named {name!r} exists already")

    async def namespaces(self, caller: Caller) -> NamespacesReply:
        """The namespaces of the caller's tenant that it may name."""
        caller.require(Permission.READ)
        found = await self.rooms.catalog.namespaces(caller.tenant)
        return NamespacesReply([await self._describe(one) for one in found if caller.may_name(one.name)])

    async def _describe(self, namespace: Namespace) -> NamespaceInfo:
        return NamespaceInfo(
            name=namespace.name,
            state=namespace.state,
            durability=namespace.durability,
            default_ttl_ms=namespace.default_ttl_ms,
            max_ttl_ms=namespace.max_ttl_ms,
            epoch=namespace.epoch,
            usage=await usage_of(self.rooms, namespace),
        )

    async def _check_catalog(self, notes: list[str]) -> str:
        try:
            await self.rooms.catalog.high_water_ms()
        except CatalogUnavailable as error:
            notes.append(str(error))
            return "unavailable"
        return "ok"

    async def _check_root_key(self, notes: list[str]) -> str:
        try:
            await self.root.check()
        except (KeyUnavailable, KeyRefused) as error:
            notes.append(str(error))
            return "unavailable"
        return "ok"

    async def _tier(self, label: str, notes: list[str]) -> TierStatus:
        count = length = age_ms = 0
        now_ms = self.rooms.time.now_ms()
        try:
            for tenant, _ in await self.rooms.catalog.tenants():
                for namespace in await self.rooms.catalog.namespaces(tenant):
                    waiting = (await self.rooms.catalog.outbox_length(namespace.scope)).get(label)
                    if waiting is not None:
                        count, length = count + waiting[0], length + waiting[1]
                        age_ms = max(age_ms, now_ms - waiting[2])
        except CatalogUnavailable:
            count = length = age_ms = -1  # said by the note about the catalog
        state, reason, used, limit = "ok", "", -1, -1
        if label == "nvme" and self.nvme is not None:
            space = self.nvme.statistics
            state, reason, used, limit = space.state.value, space.reason, space.used_bytes, space.limit_bytes
            if space.state is not NvmeState.OK:
                notes.append(f"the NVMe tier takes no writes: {space.reason}")
        if label == "s3" and self.rooms.metrics.registry.get_sample_value("kvgw_tier_up", {"tier": "s3"}) == 0:
            state, reason = "unreachable", "the last request to it failed; the gateway's log says how"
            notes.append(f"the S3 tier is unreachable: {reason}")
        return TierStatus(label, state, reason, used, limit, count, length, age_ms)

    def _staging(self) -> StagingStatus:
        now = self.rooms.staging.statistics()
        refusals = self.arena.memory.refusals
        return StagingStatus(
            capacity_bytes=now.windows.capacity_bytes + now.residents.capacity_bytes,
            window_bytes=now.windows.used_bytes,
            clean_bytes=now.clean_bytes,
            dirty_bytes=now.dirty_bytes,
            free_bytes=now.windows.free_bytes + now.residents.free_bytes,
            waiting=now.waiters,
            locked=f"not locked: {refusals['lock']}" if "lock" in refusals else "locked",
        )


def _counted(count: int, what: str) -> str:
    return f"{count} {what} was" if count == 1 else f"{count} {what}s were"


async def usage_of(rooms: Rooms, namespace: Namespace) -> StatReply:
    """Counters and counts of one namespace."""
    usage, entries, chunks, formats = await rooms.catalog.usage(namespace.scope)
    return StatReply(
        namespace=namespace.name,
        entries=entries,
        chunks=chunks,
        stored_bytes=usage.stored_bytes,
        limit_bytes=usage.limit_bytes,
        objects=usage.objects,
        limit_objects=usage.limit_objects,
        s3_bytes=usage.s3_bytes,
        formats=formats,
    )
