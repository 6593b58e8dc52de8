"""Looking for what a deletion left: an independent pass, which asks neither the sweep nor the tiers' bookkeeping.

Every gateway looks through its own memory and its own disk; one looks through what all share: the bucket, the catalog,
the key store. A look that finds something names it; the job fails, and goes on from there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from kvgw.gateway.rooms import Rooms
from storage.errors import StorageError
from storage.tier import blob_name
from storage.tracing import Trace, Tracer, namespace_prefix
from tenancy.deletion.deletions import Deletions
from tenancy.deletion.erasure import LEFT_MAX
from tenancy.deletion.jobs import Job, Look
from tenancy.errors import KeyRefused, KeyUnavailable
from tenancy.model import Scope
from tenancy.sealing import namespace_of

ONE_BY_ONE_MAX: Final = 256
"""Up to so many blobs are looked for by name; beyond it the whole namespace is listed once."""

STAGING_METHOD: Final = (
    "every slot with its blob's name, every row that reads remember; memory given back before holds sealed bytes "
    "without a name, which do not open"
)
CATALOG_METHOD: Final = "rows counted anew: chunks with their salts, placements, and for a namespace every other table"
KEYS_METHOD: Final = "asked the key store, which says that the key was destroyed"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is looked for: blobs by name, or a whole namespace."""

    namespace: UUID
    names: set[str]
    whole: bool

    def means(self, name: str) -> bool:
        return name in self.names or (self.whole and name.startswith(namespace_prefix(self.namespace)))


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen in one tier, or why nobody could look."""

    tier: str
    node: str
    method: str
    left: list[str]
    unseen: str


class Lookout:
    """Looks, for one gateway."""

    def __init__(self, rooms: Rooms, deletions: Deletions) -> None:
        self._rooms = rooms
        self._deletions = deletions

    async def at_home(self, job: Job) -> list[Look]:
        """Look through this gateway's staging and disk. Raises `TierUnavailable`."""
        wanted = await self.wanted(job)
        looks = [self._memory(wanted)]
        if "nvme" in self._rooms.tracers:
            looks.append(await self._through(self._rooms.tracers["nvme"], wanted))
        return looks

    async def at_large(self, job: Job) -> list[Look]:
        """Look through what all gateways share. Raises `TierUnavailable`, `CatalogUnavailable`, `KeyUnavailable`."""
        looks: list[Look] = []
        if "s3" in self._rooms.tracers:
            looks.append(await self._through(self._rooms.tracers["s3"], await self.wanted(job)))
        looks.append(self._look("catalog", CATALOG_METHOD, await self._deletions.left_in_catalog(job)))
        if job.kind == "namespace":
            looks.append(await self._keys(job.scope))
        return looks

    async def again(self, scope: Scope, blob_ids: Sequence[bytes], *, whole: bool) -> list[Seen]:
        """Look, long after a deletion, through all that this gateway reaches. Raises `CatalogUnavailable`."""
        wanted = Wanted(scope.namespace, {blob_name(scope.namespace, one) for one in blob_ids}, whole)
        rows = await self._deletions.rows_left(scope, blob_ids, whole=whole)
        looks = [self._memory(wanted), self._look("catalog", CATALOG_METHOD, rows)]
        seen = [Seen(look.tier, look.node, look.method, look.left, "") for look in looks]
        tracers = self._rooms.tracers.values()
        seen += [await self._tried(one.label, one.method, self._through(one, wanted)) for one in tracers]
        if whole:
            seen.append(await self._tried("keys", KEYS_METHOD, self._keys(scope)))
        return seen

    async def _tried(self, tier: str, method: str, looking: Awaitable[Look]) -> Seen:
        node = self._rooms.catalog.node.node
        try:
            look = await looking
        except (StorageError, KeyUnavailable, KeyRefused) as error:
            return Seen(tier, node, method, [], str(error))
        return Seen(tier, node, method, look.left, "")

    async def wanted(self, job: Job) -> Wanted:
        """What a job deletes."""
        return Wanted(job.scope.namespace, await self.names(job), job.kind == "namespace")

    async def names(self, job: Job) -> set[str]:
        """Names of the blobs that the job deletes."""
        found: set[str] = set()
        async for page in self._deletions.blobs(job):
            found.update(blob_name(job.scope.namespace, blob_id) for blob_id in page)
        return found

    async def traces(self, tracer: Tracer, wanted: Wanted) -> AsyncIterator[Trace]:
        """What a tier has of what is looked for."""
        names, namespace = wanted.names, wanted.namespace
        by_name = not wanted.whole and len(names) <= ONE_BY_ONE_MAX
        leaves = {name.rpartition("/")[2] for name in names}
        seen: set[str] = set()
        for prefix in sorted(names) if by_name else [namespace_prefix(namespace)]:
            async for trace in tracer.traces(prefix):
                if trace.kind != "unfinished":
                    if wanted.means(trace.name):
                        yield trace
                    continue
                leaf = trace.name.rpartition("/")[2].partition(".")[0]
                mine = leaf in leaves or (wanted.whole and namespace_of(trace.head) == namespace)
                if mine and trace.name not in seen:
                    seen.add(trace.name)
                    yield trace

    def _memory(self, wanted: Wanted) -> Look:
        names = *self._rooms.staging.names(), *self._rooms.recent.names()
        return self._look("staging", STAGING_METHOD, [name for name in names if wanted.means(name)])

    async def _keys(self, scope: Scope) -> Look:
        gone = await self._rooms.keyring.is_gone(scope)
        return self._look("keys", KEYS_METHOD, [] if gone else [f"the key of namespace {scope.namespace}"])

    async def _through(self, tracer: Tracer, wanted: Wanted) -> Look:
        left: list[str] = []
        async for trace in self.traces(tracer, wanted):
            left.append(f"{trace.kind} {trace.name}")
            if len(left) == LEFT_MAX:
                break
        return self._look(tracer.label, tracer.method, left)

    def _look(self, tier: str, method: str, left: list[str]) -> Look:
        rooms = self._rooms
        node = rooms.catalog.node
        return Look(tier, node.node, node.boot, method, rooms.time.now_ms(), left[:LEFT_MAX])
