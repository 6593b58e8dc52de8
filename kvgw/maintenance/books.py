"""The books: writes down what the meter counted, samples what is kept, and signs checkpoints of the audit log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Final

from kvgw.gateway.rooms import Rooms
from kvgw.runtime import finish
from storage.errors import StorageError
from tenancy.audit import checkpoints
from tenancy.audit.chain import Act
from tenancy.audit.verifying import Broken, Finding, Verification
from tenancy.errors import AuditBroken, CatalogUnavailable
from tenancy.metering import DAY_MS, HOUR_MS, KEPT_DAYS
from tenancy.model import Scope
from tenancy.registrar import GATEWAY

log = logging.getLogger("kvgw.audit")

CHECKPOINT_RECORDS: Final = 1_000
CHECKPOINT_MS: Final = 60_000
"""A checkpoint is made after so many records, or after this time if there is any."""
MINUTE_MS: Final = 60_000
PAGE: Final = 500
ACTS_AT_ONCE: Final = 200
"""Totals recorded in one transaction: others that record wait meanwhile."""
SAMPLE_MS_MAX: Final = 120_000
"""A longer time between two samples was no time in which this gateway looked."""


class Books:
    """Bookkeeping of one gateway."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._witness = rooms.witness
        self._totals_since_ms = rooms.time.now_ms()
        self._sampled_at: float | None = None
        self._forgotten_hour = 0

    async def write_down_usage(self) -> None:
        """Add the counts to their hours. Raises `CatalogUnavailable`; what was not added is kept for the next time.

        Cancelled, it still ends what it began: counts that were written must not come back, nor others be lost.
        """
        await finish(asyncio.ensure_future(self._add_usage()))

    async def write_down_totals(self, *, now: bool = False) -> None:
        """Once a minute (or `now`), record what each namespace did, and who came without a credential.

        Raises and ends as `write_down_usage` does.
        """
        now_ms = self._rooms.time.now_ms()
        if now or now_ms - self._totals_since_ms >= MINUTE_MS:
            await finish(asyncio.ensure_future(self._record_totals(now_ms)))

    async def _add_usage(self) -> None:
        meter = self._rooms.meter
        failures: list[CatalogUnavailable] = []
        for tenant, amounts in meter.take_usage().items():
            try:
                await self._rooms.catalog.add_usage(tenant, amounts)
            except CatalogUnavailable as error:
                meter.give_back(tenant, amounts)
                failures.append(error)
        if failures:
            raise failures[0]

    async def _record_totals(self, now_ms: int) -> None:
        meter = self._rooms.meter
        since_ms, self._totals_since_ms = self._totals_since_ms, now_ms
        totals, strangers = meter.take_minutes(), meter.take_strangers()
        acts = [(scope, self._total(scope, totals[scope], since_ms)) for scope in sorted(totals)]
        try:
            while acts:
                await self._rooms.catalog.record_all([act for _, act in acts[:ACTS_AT_ONCE]], now_ms)
                del acts[:ACTS_AT_ONCE]
            await self._rooms.catalog.record_all(self._refusals(strangers, since_ms), now_ms)
        except CatalogUnavailable:
            self._totals_since_ms = since_ms
            meter.give_back_minutes({scope: totals[scope] for scope, _ in acts})
            meter.give_back_strangers(strangers)
            raise

    async def sample(self, scopes: list[Scope], *, leads: bool) -> None:
        """The leader counts what is kept as kept since its last sample, and drops sums that are too old."""
        rooms = self._rooms
        now, last = rooms.clock.monotonic(), self._sampled_at
        self._sampled_at = now if leads else None
        if not leads or last is None:
            return
        now_ms = rooms.time.now_ms()
        elapsed_ms = min(int((now - last) * 1000), SAMPLE_MS_MAX)
        for tenant in dict.fromkeys(scope.tenant for scope in scopes):
            await rooms.catalog.sample_usage(tenant, elapsed_ms, now_ms)
        if now_ms // HOUR_MS != self._forgotten_hour:
            for scope in scopes:
                await rooms.catalog.forget_usage(scope, now_ms - KEPT_DAYS * DAY_MS)
            self._forgotten_hour = now_ms // HOUR_MS

    async def checkpoint(self, *, leads: bool) -> None:
        """The leader signs a checkpoint when it is time, and keeps copies outside the database.

        It signs only what continues the last checkpoint. Raises `AuditBroken` when the log was tampered with.
        """
        if leads:
            await self._sign()
        await self._witness.settle()

    async def _sign(self) -> None:
        rooms = self._rooms
        now_ms = rooms.time.now_ms()
        head = await rooms.catalog.audit_head()
        last = await rooms.catalog.last_checkpoint()
        seq, at_ms, note = last or (0, 0, "")
        if head.seq == seq or (head.seq - seq < CHECKPOINT_RECORDS and 0 <= now_ms - at_ms < CHECKPOINT_MS):
            return
        checked = await self._checked(note, head.seq)
        one = checkpoints.sign(rooms.signer, checked.seq, checked.hash, now_ms)
        await self._witness.keep(one)  # outside first: whatever is in the database has been written out there
        with contextlib.suppress(StorageError):  # it is owed then, and `checkpoint` says why when it tries once more
            await self._witness.settle()
        await rooms.catalog.add_checkpoint(one)
        log.info("audit log checkpoint %s", one.note.replace("\n", " ").strip())

    async def close(self) -> None:
        """Write down what is left, at the end of a gateway."""
        try:
            await self.write_down_usage()
            await self.write_down_totals(now=True)
        except CatalogUnavailable as error:
            log.warning("counts of the last seconds are lost, since the catalog did not take them: %s", error)

    async def _checked(self, note: str, head_seq: int) -> Verification:
        """The log from the last checkpoint to its end, every link of it. Raises `AuditBroken`."""
        rooms = self._rooms
        check = Verification(rooms.signer.public_key)
        try:
            if note:
                check.resume(note)
            while True:
                page = await rooms.catalog.audit_page(None, check.seq, PAGE)
                for record in page.records:
                    check.record(record.fields(), record.previous, record.hash)
                if len(page.records) < PAGE:
                    break
            if check.seq < head_seq:
                raise Broken(Finding.TRUNCATED, check.seq + 1, f"it ends at {check.seq}, its head says {head_seq}")
        except Broken as error:
            raise AuditBroken(
                f"the audit log is not what it was at its last checkpoint: {error}; no checkpoint is signed until "
                "kvgw audit verify has been looked into"
            ) from error
        return check

    def _total(self, scope: Scope, counts: Mapping[str, int], since_ms: int) -> Act:
        return Act(
            actor=GATEWAY,
            action="chunk.totals",
            target=self._rooms.catalog.node.node,
            tenant=scope.tenant,
            namespace=scope.namespace,
            detail={**counts, "since_ms": since_ms},
        )

    def _refusals(self, strangers: Mapping[str, int], since_ms: int) -> list[Act]:
        node = self._rooms.catalog.node.node
        return [
            Act(
                actor=GATEWAY,
                action="caller.refuse",
                target=source,
                result="refused",
                detail={"count": count, "node": node, "since_ms": since_ms},
            )
            for source, count in sorted(strangers.items())
        ]
