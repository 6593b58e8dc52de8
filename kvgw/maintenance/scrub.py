"""Scrubbing: opening blobs again that nobody reads, at a bounded rate, so that damage is found while a copy is left.

A blob is whole when it has its length, its header and commitment, every segment opens and the tag root is the row's:
what a read demands, and of the very tier, not of a resident in staging. What is not whole is quarantined as by a read,
and due again from the other tier. The plaintext goes into a window that is zeroed, and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from kvgw.errors import RequestRefused
from kvgw.gateway.rooms import Rooms
from kvgw.maintenance.pacing import Bucket, Pauses
from kvgw.maintenance.tiercheck import IMPLAUSIBLE_COUNT, IMPLAUSIBLE_SHARE
from storage.access import Window
from storage.errors import BlobDamaged, BlobMissing, StagingBusy, StorageError
from storage.tier import blob_name
from tenancy.audit.chain import Act
from tenancy.errors import KeyGone, KeyRefused, KeyUnavailable, NamespaceUnknown, SealBroken, TenancyError
from tenancy.inspecting import Sealing
from tenancy.keys.keyring import NamespaceKeys
from tenancy.model import Scope
from tenancy.sealing import BlobAddress, Sealed, open_sealed

log = logging.getLogger("kvgw.maintenance")

PAGE: Final = 200
PIECE_BYTES: Final = 1 << 20
"""A visit to a thread for each small blob costs more than to open it."""
PIECE_SECONDS: Final = 1 / 64
"""But no more in one go than the rate allows in so long."""
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


@dataclass(slots=True)
class _Read:
    """A blob as it came from its tier, or why it did not."""

    sealing: Sealing
    sealed: memoryview
    fault: str = ""
    looked_at: bool = True


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
        node, pauses = rooms.placement_node(label), Pauses(rooms.clock, rooms.turns)
        most = min(PIECE_BYTES, rooms.staging.window_share, self.report.rate * PIECE_SECONDS or PIECE_BYTES)
        while page := await rooms.catalog.sealings(scope, label, node, after, PAGE):
            after = page[-1].placed.blob_id
            chosen = [one for one in page if self.report.sample >= 1 or rooms.rng.jitter() < self.report.sample]
            keys = await self._keys(scope, {one.epoch for one in chosen})
            for piece in _pieces(chosen, most):
                if self.report.state != "running":
                    return
                await bucket.ready()
                bucket.spend(sum(one.placed.length for one in piece))
                known = [] if keys is None else [one for one in piece if one.epoch in keys.data]
                progress.skipped += len(piece) - len(known)
                if keys is not None and known:
                    await self._look(label, scope, known, keys)
                await pauses.between()

    async def _keys(self, scope: Scope, epochs: set[int]) -> NamespaceKeys | None:
        """The namespace's keys; None while they cannot be had, or since they are gone for good."""
        try:
            return await self._rooms.keyring.keys(scope, epochs)
        except (KeyUnavailable, KeyRefused, KeyGone, NamespaceUnknown):
            return None

    async def _look(self, label: str, scope: Scope, piece: Sequence[Sealing], keys: NamespaceKeys) -> None:
        """Read some blobs and open them. Raises `TierUnavailable`."""
        rooms, progress = self._rooms, self.report.tiers[label]
        total = sum(one.placed.length for one in piece)
        if len(self._buffer) < total:
            self._buffer = bytearray(total)
        with memoryview(self._buffer)[:total] as sealed:
            read = await self._read(label, scope, piece, sealed)
            await self._open(scope, [one for one in read if not one.fault], keys)
        for one in read:
            if one.fault:
                await self._refuse(label, scope, one.sealing, one.fault)
            if self.report.state != "running":  # too much is wrong: the others are not touched
                return
            progress.blobs += one.looked_at
            progress.skipped += not one.looked_at
            progress.nbytes += one.sealing.placed.length * one.looked_at
            rooms.metrics.scrubbed.labels(label).inc(one.sealing.placed.length * one.looked_at)

    async def _open(self, scope: Scope, read: Sequence[_Read], keys: NamespaceKeys) -> None:
        """Note the fault of each; what cannot be opened for want of memory, or of its key, was not looked at."""
        nbytes = sum(one.sealing.length for one in read)
        if not nbytes:
            return
        try:
            async with self._rooms.staging.window(scope.tenant, nbytes, WINDOW_SECONDS) as window:
                await self._rooms.workers.run(lambda: _note_faults(scope, keys, read, window))
        except (StagingBusy, KeyUnavailable):
            for one in read:
                one.looked_at = bool(one.fault)

    async def _read(self, label: str, scope: Scope, piece: Sequence[Sealing], room: memoryview) -> list[_Read]:
        """Read blobs into `room`, one behind the other."""
        read, at = [], 0
        for sealing in piece:
            one = _Read(sealing, room[at : at + sealing.placed.length])
            at += sealing.placed.length
            try:
                await self._rooms.tiers[label].get_into(blob_name(scope.namespace, sealing.placed.blob_id), one.sealed)
            except (BlobMissing, BlobDamaged) as error:
                one.fault = type(error).__name__
            read.append(one)
        return read

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


def _pieces(page: Sequence[Sealing], most: float) -> Iterator[list[Sealing]]:
    """What is read and opened together: one blob, or several of `most` bytes in all."""
    piece: list[Sealing] = []
    nbytes = 0
    for one in page:
        if piece and nbytes + one.placed.length > most:
            yield piece
            piece, nbytes = [], 0
        piece.append(one)
        nbytes += one.placed.length
    if piece:
        yield piece


def _note_faults(scope: Scope, keys: NamespaceKeys, read: Sequence[_Read], window: Window) -> None:
    """In a worker thread: the check that each does not pass, if there is one. The plaintext is zeroed here."""
    at = 0
    for one in read:
        until = at + one.sealing.length
        with window.view[at:until] as plain:
            one.fault = _fault(scope, keys, one, plain)
        at = until
    window.wipe()


def _fault(scope: Scope, keys: NamespaceKeys, one: _Read, plain: memoryview) -> str:
    """The error itself ends here, since it holds the memory in which it arose."""
    of = one.sealing
    try:
        data_key, expected = keys.data_key(of.epoch), Sealed(of.chunk_id, of.tag_root)
        open_sealed(data_key, _address(scope, of), of.salt, expected, one.sealed, plain)
    except SealBroken as error:
        return error.reason
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
