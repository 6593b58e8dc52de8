"""Scrubbing: opening blobs again that nobody reads, at a bounded rate, so that damage is found while a copy is left.

A blob is whole when it has its length, its header and commitment, every segment opens and the tag root is the row's:
what a read demands, and of the very tier, not of a resident in staging. What is not whole is quarantined as by a read,
and due again from the other tier. The plaintext goes into a window that is zeroed, and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Final, Literal

from kvgw.errors import RequestRefused
from kvgw.gateway.rooms import Rooms
from kvgw.maintenance.pacing import Bucket
from kvgw.maintenance.tiercheck import IMPLAUSIBLE_COUNT, IMPLAUSIBLE_SHARE
from storage.access import Window
from storage.errors import BlobDamaged, BlobMissing, StagingBusy, StorageError
from storage.tier import blob_name
from tenancy.audit.chain import Act
from tenancy.errors import KeyGone, KeyRefused, KeyUnavailable, NamespaceUnknown, SealBroken, TenancyError
from tenancy.inspecting import Sealing
from tenancy.keys.keyring import NamespaceKeys
from tenancy.keys.secret import SecretBytes
from tenancy.model import Scope
from tenancy.sealing import BlobAddress, Sealed, open_sealed

log = logging.getLogger("kvgw.maintenance")

PAGE: Final = 200
WINDOW_SECONDS: Final = 30.0
"""How long a scrub waits for memory; requests come first."""

State = Literal["none", "running", "done", "stopped", "failed", "refused"]


@dataclass(slots=True)
class TierProgress:
    """How far a scrub is in one tier."""

    blobs: int = 0
    nbytes: int = 0
    damaged: int = 0
    """Damaged or missing: quarantined."""
    skipped: int = 0
    """Not opened, since their key or memory for them could not be had."""


@dataclass(slots=True)
class ScrubReport:
    """The last scrub since this gateway started."""

    state: State = "none"
    rate: int = 0
    sample: float = 1.0
    started_ms: int = 0
    ended_ms: int = 0
    tiers: dict[str, TierProgress] = field(default_factory=dict)
    sentence: str = ""
    """Why it did not come to its end."""


class Scrub:
    """The scrub of one gateway: of its own disk, and of what all gateways share."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._asked = asyncio.Event()
        self._serving = False
        self._act = Act(actor="gateway", action="scrub.repair")
        self._limit: asyncio.Timeout | None = None
        self._buffer = bytearray()
        self.report = ScrubReport()

    def start(self, rate: int, sample: float, act: Act) -> None:
        """Have it done: `rate` bytes a second (0: no limit), of a share `sample` of the blobs.

        `act`: the audit log's words for what it sets right. Raises `RequestRefused` when one is under way, or when no
        gateway is there to do it.
        """
        if not self._serving:
            raise RequestRefused("a scrub is done by a gateway that runs, and none runs here: start it with kvgw serve")
        if self.report.state == "running":
            raise RequestRefused("a scrub is under way: see kvgw scrub --status, or end it with kvgw scrub --stop")
        self._act = act
        tiers = {label: TierProgress() for label in self._rooms.tiers}
        self.report = ScrubReport("running", rate, sample, self._rooms.time.now_ms(), tiers=tiers)
        self._asked.set()

    def stop(self) -> None:
        """End the scrub that is under way, if one is."""
        if self._limit is not None and not self._limit.expired():  # it may be ending already
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def serve(self) -> None:
        """Do what is asked for, until cancelled."""
        self._serving = True
        try:
            while True:
                await self._asked.wait()
                self._asked.clear()
                await self._until_stopped()
        finally:
            self._serving = False
            self._end("stopped", "the gateway stopped")

    async def _until_stopped(self) -> None:
        try:
            async with asyncio.timeout(None) as self._limit:
                await self._through_all()
        except TimeoutError:
            self._end("stopped", "it was told to stop")
        except (StorageError, TenancyError) as error:
            self._rooms.metrics.maintenance_failures.labels("scrub").inc()
            self._end("failed", str(error))
        except Exception:  # a bug of ours in one job must not end the others
            self._rooms.metrics.maintenance_failures.labels("scrub").inc()
            log.exception("the scrub failed in an unforeseen way")
            self._end("failed", "it failed in an unforeseen way; see the gateway's log")
        else:
            self._end("done", "")
        finally:
            self._limit = None
            self._buffer = bytearray()

    def _end(self, state: State, sentence: str) -> None:
        if self.report.state == "running":
            self.report.state, self.report.sentence = state, sentence
            self.report.ended_ms = self._rooms.time.now_ms()

    async def _through_all(self) -> None:
        catalog = self._rooms.catalog
        scopes = [one.scope for tenant, _ in await catalog.tenants() for one in await catalog.namespaces(tenant)]
        bucket = Bucket(self.report.rate, self._rooms.clock)
        for label in self._rooms.tiers:
            for scope in scopes:
                await self._through(label, scope, bucket)

    async def _through(self, label: str, scope: Scope, bucket: Bucket) -> None:
        rooms, progress, after = self._rooms, self.report.tiers[label], b""
        node = rooms.placement_node(label)
        while page := await rooms.catalog.sealings(scope, label, node, after, PAGE):
            after = page[-1].placed.blob_id
            chosen = [one for one in page if self.report.sample >= 1 or rooms.rng.jitter() < self.report.sample]
            keys = await self._keys(scope, {one.epoch for one in chosen})
            for one in chosen:
                if self.report.state != "running":
                    return
                await bucket.ready()
                bucket.spend(one.placed.length)
                if keys is None or one.epoch not in keys.data:
                    progress.skipped += 1
                else:
                    await self._open(label, scope, one, keys)

    async def _keys(self, scope: Scope, epochs: set[int]) -> NamespaceKeys | None:
        """The namespace's keys; None while they cannot be had, or since they are gone for good."""
        try:
            return await self._rooms.keyring.keys(scope, epochs)
        except (KeyUnavailable, KeyRefused, KeyGone, NamespaceUnknown):
            return None

    async def _open(self, label: str, scope: Scope, one: Sealing, keys: NamespaceKeys) -> None:
        """Read one blob and open it. Raises `TierUnavailable`."""
        rooms, progress = self._rooms, self.report.tiers[label]
        name = blob_name(scope.namespace, one.placed.blob_id)
        if len(self._buffer) < one.placed.length:
            self._buffer = bytearray(one.placed.length)
        with memoryview(self._buffer)[: one.placed.length] as sealed:
            try:
                await rooms.tiers[label].get_into(name, sealed)
                async with rooms.staging.window(scope.tenant, one.length, WINDOW_SECONDS) as window:
                    data_key = keys.data_key(one.epoch)
                    fault = await rooms.workers.run(lambda: _fault(data_key, _address(scope, one), one, sealed, window))
            except (BlobMissing, BlobDamaged) as error:
                fault = type(error).__name__
            except StagingBusy:
                progress.skipped += 1
                return
        if fault:
            await self._refuse(label, scope, one, fault)
        progress.blobs += 1
        progress.nbytes += one.placed.length
        rooms.metrics.scrubbed.labels(label).inc(one.placed.length)

    async def _refuse(self, label: str, scope: Scope, one: Sealing, reason: str) -> None:
        """What is not whole is not read from there again, unless its row has changed since; many are not believed."""
        rooms, progress = self._rooms, self.report.tiers[label]
        if progress.damaged >= max(IMPLAUSIBLE_COUNT, IMPLAUSIBLE_SHARE * progress.blobs):
            self._end(
                "refused",
                f"{progress.damaged} of {progress.blobs} blobs in {label} are damaged or missing: is its disk mounted, "
                "its bucket the right one? The others were not touched; look with kvgw fsck",
            )
            return
        act = Act(actor=self._act.actor, action=self._act.action, target=reason, detail={"tier": label})
        node = rooms.placement_node(label)
        try:
            done = await rooms.catalog.end_dangling(scope, label, node, [one.placed], act, rooms.time.now_ms())
        except NamespaceUnknown:  # deleted meanwhile
            return
        for blob_id in done.dead:
            rooms.staging.drop(blob_name(scope.namespace, blob_id))
        rooms.backlog.note_dead(scope)
        rooms.backlog.note_writes(scope)
        progress.damaged += done.count
        rooms.metrics.scrub_damaged.labels(label).inc(done.count)
        rooms.metrics.refused_blobs.labels(label, reason).inc(done.count)


def _fault(data_key: SecretBytes, address: BlobAddress, one: Sealing, sealed: memoryview, window: Window) -> str:
    """In a worker thread: the check that the blob does not pass; empty when it is whole. The plaintext is zeroed here.

    The error itself ends here, since it holds the memory in which it arose.
    """
    try:
        open_sealed(data_key, address, one.salt, Sealed(one.chunk_id, one.tag_root), sealed, window.view)
    except SealBroken as error:
        return error.reason
    window.wipe()
    return ""


def _address(scope: Scope, one: Sealing) -> BlobAddress:
    return BlobAddress(
        tenant=scope.tenant,
        namespace=scope.namespace,
        epoch=one.epoch,
        length=one.length,
        created_ms=one.created_ms,
        fingerprint=one.fingerprint,
        seg_log2=one.seg_log2,
    )
