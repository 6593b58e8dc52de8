"""What `kvgw fsck` must find and set right, on any catalog and tier: a suite that each footing runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from sqlalchemy import Connection, delete, insert, select, update

from kvgw.client import Client
from kvgw.maintenance import tiercheck, tierwalk
from kvgw.maintenance.crew import Crew
from kvgw.maintenance.findings import FsckReport, Kind
from kvgw.maintenance.fsck import LATE_MS
from kvgw.maintenance.tierwalk import UNSURE_MS
from kvgw.model import Durability
from kvgw.reports import Registered
from kvgw.wiring import Opened
from storage.errors import TierUnavailable
from storage.tier import blob_name
from tenancy import quota
from tenancy.audit.chain import Act
from tenancy.deletion import jobs
from tenancy.deletion.jobs import Job, Progress
from tenancy.deletion.selection import Namespace
from tenancy.model import Scope
from tenancy.schema import audit_head, chunk, entry, owned, placement, reservation
from tenancy.schema import quota as quota_rows
from tests.support.aio import aio
from tests.support.gateways import keys_of, payloads_of, read, take_up_backlog
from tests.support.manual_clock import ManualClock

ACT = Act(actor="test", action="fsck.repair")


@dataclass
class Spot:
    """A gateway on a clock that stands still, and one tier of it that is damaged."""

    opened: Opened
    clock: ManualClock
    client: Client
    registered: Registered
    scope: Scope
    label: str
    transact: Callable[[Callable[[Connection], Any]], Any]
    """Runs a body as one who may change every row."""

    @property
    def crew(self) -> Crew:
        return self.opened.crew

    @property
    def tier(self) -> Any:
        return self.opened.rooms.tiers[self.label]

    async def put(self, count: int, name: str = "key", durability: str = "") -> None:
        payloads = payloads_of(self.registered, count, seed=sum(name.encode()))
        wanted = Durability(durability or self.label)
        report = await self.client.put(self.registered, keys_of(count, name), payloads, durability=wanted)
        assert report.stored == count

    async def hits(self, count: int, name: str = "key") -> int:
        """How many read back; wrong bytes fail (law 3)."""
        _, found = await read(self.client, self.registered, keys_of(count, name))
        payloads = payloads_of(self.registered, count, seed=sum(name.encode()))
        assert all(got in (None, want) for got, want in zip(found, payloads, strict=True)), "law 3"
        return sum(got is not None for got in found)

    async def blobs(self) -> list[bytes]:
        """Ids of the blobs that rows say are in the tier, in the order of their birth."""
        where = (*owned(placement, self.scope), placement.c.tier == self.label)
        statement = select(placement.c.blob_id).where(*where).order_by(placement.c.blob_id)
        found: list[bytes] = await self.transact(lambda connection: list(connection.scalars(statement)))
        return found

    def name(self, blob_id: bytes) -> str:
        return blob_name(self.scope.namespace, blob_id)

    async def lose(self, *blob_ids: bytes) -> None:
        """Blobs vanish from the tier behind the catalog's back, and from staging."""
        await self.tier.delete([self.name(one) for one in blob_ids])
        self.forget(*blob_ids)

    def forget(self, *blob_ids: bytes) -> None:
        for one in blob_ids:
            self.opened.rooms.staging.drop(self.name(one))

    async def execute(self, statement: Any) -> None:
        await self.transact(lambda connection: connection.execute(statement) and None)

    async def look(self) -> FsckReport:
        return await self.crew.fsck.run()

    async def repair(self) -> FsckReport:
        return await self.crew.fsck.run(ACT)

    async def check(self, kind: Kind, count: int = 1) -> None:
        """Exactly this is found, looking changes nothing, repairing sets it right, and then the house is clean."""
        for _ in range(2):
            seen = await self.look()
            assert (dict(seen.found), seen.verdict) == ({kind: count}, "findings"), seen.findings
        done = await self.repair()
        assert (dict(done.found), done.verdict) == ({kind: count}, "clean"), (done.findings, done.mended)
        await self.check_clean()

    async def check_clean(self) -> None:
        seen = await self.look()
        assert (seen.verdict, seen.findings, seen.refused, seen.unseen) == ("clean", [], [], [])


class FsckContract:
    """Each footing says how a `Spot` is made."""

    def spot(self) -> AbstractAsyncContextManager[Spot]:
        raise NotImplementedError

    @aio
    async def test_a_gateway_in_use_is_clean(self) -> None:
        async with self.spot() as one:
            await one.put(4)
            await one.put(2, "staged", "staged")
            await one.client.delete(one.registered, keys_of(1))
            seen = await one.look()
            assert seen.verdict == "clean", seen.findings
            assert seen.looked[f"{one.label} blobs"] == 4
            assert min(seen.looked[f"{one.label} rows"], seen.looked["counters"], seen.looked["audit"]) > 0

    @aio
    async def test_a_missing_blob_is_quarantined_and_its_entry_ends(self) -> None:
        async with self.spot() as one:
            await one.put(4)
            await one.lose((await one.blobs())[0])
            await one.check("dangling")
            assert await one.hits(4) == 3, "law 2: what is left is read"

    @aio
    async def test_a_blob_of_another_length_is_dangling_too(self) -> None:
        async with self.spot() as one:
            await one.put(4)
            wrong = (await one.blobs())[1]
            await one.lose(wrong)
            await one.tier.put(one.name(wrong), memoryview(b"short"))
            await one.check("dangling")
            assert await one.hits(4) == 3

    @aio
    async def test_orphans_are_the_sweeps_until_their_grace_is_over(self) -> None:
        async with self.spot() as one:
            await one.put(4)
            name = one.name(os.urandom(16))
            await one.tier.put(name, memoryview(b"left by a crash"))
            await one.check_clean()
            one.clock.advance(UNSURE_MS / 1000 + 60)
            grace_s = one.crew.fsck._grace_s[one.label]
            if grace_s > UNSURE_MS / 1000 + 60:
                done = await one.repair()
                assert (dict(done.found), done.left, done.verdict) == ({"orphan": 1}, 1, "findings")
                assert await one.tier.stat([name]), "left to the orphan sweep"
                one.clock.advance(grace_s)
            await one.check("orphan")
            assert not await one.tier.stat([name])
            assert len(await one.blobs()) == 4, "law 1: what has a row stays"

    @aio
    async def test_chunks_and_entries_that_do_not_belong_together(self) -> None:
        async with self.spot() as one:
            await one.put(6)
            first, second, third, *_ = await one.blobs()
            await one.execute(delete(entry).where(*owned(entry, one.scope), entry.c.blob_id == first))
            await one.check("unreferenced")
            dying = update(chunk).values(state="deleting")
            await one.execute(dying.where(*owned(chunk, one.scope), chunk.c.blob_id == second))
            await one.check("headless")
            await one.execute(delete(entry).where(*owned(entry, one.scope), entry.c.blob_id == third))
            await one.execute(dying.where(*owned(chunk, one.scope), chunk.c.blob_id == third))
            await one.check("undoomed")
            await one.crew.sweep.collect(one.scope)
            assert len(await one.blobs()) == 3, "law 1: the bytes go after the rows"
            assert await one.hits(6) == 3

    @aio
    async def test_what_only_a_dead_process_had_is_lost(self) -> None:
        async with self.spot() as one:
            await one.put(2)
            await one.put(3, "staged", "staged")
            await one.execute(
                update(chunk).where(*owned(chunk, one.scope), chunk.c.durability == "staged").values(home_boot="dead")
            )
            await one.check("stranded", 3)
            assert (await one.hits(2), await one.hits(3, "staged")) == (2, 0)

    @aio
    async def test_leases_that_nobody_took_up(self) -> None:
        async with self.spot() as one:
            await one.put(3)
            now_ms = one.opened.rooms.time.now_ms()
            row = {"reservation_id": b"r" * 16, "bytes": 7, "objects": 1, "s3_bytes": 7, "owner": "dead"}
            keys = {"tenant_id": one.scope.tenant, "namespace_id": one.scope.namespace}

            def reserve(connection: Connection, ended_ms: int) -> None:
                connection.execute(insert(reservation), {**row, **keys, "expires_ms": ended_ms})
                quota.apply(connection, one.scope, quota.Change(7, 1, 7))

            await one.transact(lambda connection: reserve(connection, now_ms - LATE_MS))
            await one.check("reservation")
            write = update(placement).where(
                *owned(placement, one.scope),
                placement.c.blob_id == (await one.blobs())[0],
                placement.c.tier == one.label,
            )
            await one.execute(write.values(state="writing", owner="dead", lease_ms=now_ms - LATE_MS + 1))
            await one.check_clean()
            await one.execute(write.values(lease_ms=now_ms - LATE_MS))
            await one.check("write")
            await take_up_backlog(one.crew)
            assert await one.hits(3) == 3

    @aio
    async def test_counters_that_drift(self) -> None:
        """Law 4."""
        async with self.spot() as one:
            await one.put(3)
            mine = quota_rows.c.tenant_id == one.scope.tenant, quota_rows.c.scope_id == one.scope.namespace
            await one.execute(update(quota_rows).where(*mine).values(stored_bytes=quota_rows.c.stored_bytes + 5))
            seen = await one.look()
            assert (dict(seen.found), seen.verdict) == ({"counter": 2}, "findings"), "the namespace's and the tenant's"
            assert (await one.repair()).verdict == "clean"
            await one.check_clean()

    @aio
    async def test_what_is_for_people_stays_a_finding(self) -> None:
        async with self.spot() as one:
            await one.put(1)
            job = Job(
                one.scope,
                b"j" * 16,
                "namespace",
                Namespace("free"),
                "failed",
                "test",
                one.opened.rooms.time.now_ms(),
                progress=Progress(sentence="a blob came back"),
            )
            await one.transact(lambda connection: jobs.add(connection, job))
            done = await one.repair()
            assert (dict(done.found), done.left, done.verdict) == ({"deletion": 1}, 1, "findings")
            assert "a blob came back" in done.findings[0].sentence

    @aio
    async def test_an_audit_log_whose_end_is_not_what_its_head_says(self) -> None:
        async with self.spot() as one:
            catalog = type(one.opened.rooms.catalog)
            head = await one.opened.rooms.catalog.audit_head()
            for wrong in ({"seq": head.seq - 1}, {"seq": head.seq + 1}, {"hash": b"x" * 32}):
                await one.execute(update(audit_head).values(**wrong))
                seen = await one.repair()
                assert (dict(seen.found), seen.left) == ({"audit": 1}, 1), "left for people"
                await one.execute(update(audit_head).values(seq=head.seq, hash=head.hash))
                await one.check_clean()
            page = await one.opened.rooms.catalog.audit_page(None, 0, 100)
            first, second, *others = page.records
            unlinked = replace(second, previous=b"x" * 32)
            for forged in (replace(second, actor="forger"), replace(unlinked, hash=unlinked.expected_hash())):
                told = replace(page, records=[first, forged, *others])
                with mock.patch.object(catalog, "audit_page", mock.AsyncMock(return_value=told)):
                    assert dict((await one.look()).found) == {"audit": 1}

    @aio
    async def test_a_tier_that_is_larger_than_a_slice_is_walked_in_slices(self) -> None:
        async with self.spot() as one:
            await one.put(9)
            with mock.patch.multiple(tierwalk, SLICE=2, PAGE=2):
                await one.check_clean()
                assert (await one.look()).looked[f"{one.label} blobs"] == 9, "each blob is in one slice"
                first, *_, last = await one.blobs()
                await one.lose(first, last)
                await one.check("dangling", 2)

    @aio
    async def test_an_empty_listing_is_not_believed(self) -> None:
        async with self.spot() as one:
            await one.put(3)
            await one.lose(*await one.blobs())
            done = await one.repair()
            assert (done.verdict, done.found["dangling"], done.mended.total()) == ("refused", 3, 0)
            assert "lists no blob at all" in done.refused[0]
            assert (await one.look()).found["dangling"] == 3, "nothing was touched"

    @aio
    async def test_a_mass_of_missing_blobs_is_not_believed(self) -> None:
        async with self.spot() as one:
            await one.put(110)
            blobs = await one.blobs()
            with mock.patch.object(tiercheck, "IMPLAUSIBLE_COUNT", 101):
                await one.lose(*blobs[:101])
                assert (await one.look()).verdict == "findings", "101 are believed where 101 may be"
            done = await one.repair()
            assert (done.verdict, done.found["dangling"], done.mended.total()) == ("refused", 101, 0)
            assert "101 of 110 blobs are gone" in done.refused[0]
            assert (await one.look()).found["dangling"] == 101, "nothing was touched"

    @aio
    async def test_no_more_is_quarantined_than_was_judged(self) -> None:
        async with self.spot() as one:
            await one.put(8)
            blobs = await one.blobs()
            await one.lose(blobs[3])
            judged = tiercheck.TierCheck._repair

            async def unmounted(self: tiercheck.TierCheck, act: Act) -> None:
                await one.lose(*blobs)
                await judged(self, act)

            with mock.patch.object(tiercheck.TierCheck, "_repair", unmounted):
                done = await one.repair()
            assert done.mended["dangling"] == 1
            assert (await one.look()).found["dangling"] == 7

    @aio
    async def test_a_tier_that_does_not_answer_is_unseen(self) -> None:
        async with self.spot() as one:
            await one.put(3)
            await one.lose((await one.blobs())[0])
            away = mock.Mock(side_effect=TierUnavailable("planted"))
            with mock.patch.object(type(one.tier), "scan", away):
                done = await one.repair()
            assert (done.verdict, done.mended.total()) == ("unseen", 0)
            assert "planted" in done.unseen[0]
            await one.check("dangling")

    @aio
    async def test_what_changes_between_two_sightings_is_no_finding(self) -> None:
        """A blob that is there at the second look, and a row that is not, are no damage."""
        async with self.spot() as one:
            await one.put(3)
            blind = mock.Mock(side_effect=_nothing)
            with mock.patch.object(type(one.tier), "scan", blind):
                await one.check_clean()
            (lost, *_) = await one.blobs()
            await one.lose(lost)
            stat = type(one.tier).stat

            async def deleted_meanwhile(tier: Any, names: Any) -> Any:
                lengths = await stat(tier, names)
                await one.client.delete(one.registered, keys_of(3))
                return lengths

            with mock.patch.object(type(one.tier), "stat", deleted_meanwhile):
                assert (await one.look()).verdict == "clean"

    def test_exit_codes_of_verdicts(self) -> None:
        report = FsckReport()
        assert report.verdict == "clean"
        report.refused.append("implausible")
        assert report.verdict == "refused"
        report.unseen.append("away")
        assert report.verdict == "unseen"


async def _nothing() -> Any:
    for _ in ():
        yield
