"""The end of some writes and the claim of the next, in one transaction."""

from __future__ import annotations

from typing import Any

from sqlalchemy import update

from tenancy.placements import Claim, Endings
from tenancy.schema import owned, placement
from tests.support.aio import aio
from tests.tenancy.catalog_bench import AFTER_RESTART, HERE, NOW, BenchSuite, counted_statements

NEXT = Claim("s3", NOW + 1000, 10)


class CatalogWrites(BenchSuite):
    @aio
    async def test_writes_that_ended_are_settled_and_the_next_ones_claimed(self) -> None:
        async with self.bench() as bench:
            put = await bench.put("a", "b", "c", "d")
            first, second = await bench.claim("s3", limit=2)
            ended = Endings(done=[first], failed=[(second, NOW + 500)])
            turn = await bench.catalog.settle_writes(bench.scope, ended, NEXT, NOW)
            rest = set(put.blobs.values()) - {first.blob_id, second.blob_id}
            assert (turn.unneeded, turn.settled) == (frozenset(), {first.blob_id}), "what is tried again is not settled"
            assert {one.blob_id for one in turn.due} == rest
            assert {one.sources for one in turn.due} == {frozenset({"nvme"})}
            states = await bench.states()
            assert states[first.blob_id, "s3", ""] == "ok"
            assert states[second.blob_id, "s3", ""] == "due"
            turn = await bench.catalog.settle_writes(bench.scope, Endings(done=turn.due), NEXT, NOW + 500)
            assert turn.settled == rest
            assert [(one.blob_id, one.attempts) for one in turn.due] == [(second.blob_id, 1)]
            turn = await bench.catalog.settle_writes(bench.scope, Endings(done=turn.due), None, NOW + 500)
            assert turn.due == []

    @aio
    async def test_a_blob_that_another_tier_waits_for_is_not_settled(self) -> None:
        async with self.bench() as bench:
            put = await bench.put("a", durability="staged")
            on_disk = await bench.claim("nvme")
            turn = await bench.catalog.settle_writes(bench.scope, Endings(done=on_disk), None, NOW)
            assert turn.settled == frozenset()
            turn = await bench.catalog.settle_writes(bench.scope, Endings(done=await bench.claim("s3")), None, NOW)
            assert turn.settled == set(put.blobs.values())

    @aio
    async def test_what_was_lost_or_is_not_wanted_any_more_is_said_to_be_the_sweeps(self) -> None:
        """Law 4: what the writes held of the quota in S3 goes with them."""
        async with self.bench() as bench:
            put = await bench.put("lost", durability="staged", tiers=("s3",))
            turn = await bench.catalog.settle_writes(bench.scope, Endings(lost=await bench.claim("s3")), None, NOW)
            assert turn.unneeded == {put.blobs["lost"]}
            assert await bench.see("lost") == {}
            await bench.put("deleted")
            due = await bench.claim("s3")
            await bench.delete("deleted")
            turn = await bench.catalog.settle_writes(bench.scope, Endings(done=due), None, NOW)
            assert (turn.unneeded, turn.settled) == ({due[0].blob_id}, {due[0].blob_id})

    @aio
    async def test_a_deletion_waits_for_a_write_under_way_and_no_longer(self) -> None:
        """Law 1: the bytes are deleted after whatever may still write them, be that over or its lease."""
        async with self.bench() as bench:
            await bench.put("done", "lost", "failed", "frozen", durability="staged", tiers=("s3",))
            due = await bench.claim("s3", lease_ms=1000)
            assert len(due) == 4
            await bench.delete("done", "lost", "failed", "frozen")
            assert await bench.sweep() == 0, "all of them may still arrive"
            done, lost, failed, _ = due
            bench.now += 1
            assert await bench.end(done=[done]) == {done.blob_id}
            assert await bench.sweep() == 1
            assert await bench.end(lost=[lost]) == {lost.blob_id}, "the sweep is told"
            assert await bench.sweep() == 1
            await bench.end(failed=[(failed, bench.now)])
            assert await bench.sweep() == 0, "a write that failed may arrive after all"
            bench.now = NOW + 1000
            assert await bench.sweep() == 2
            usage = await bench.usage()
            assert (usage.stored_bytes, usage.objects, usage.s3_bytes) == (0, 0, 0), "law 4"

    @aio
    async def test_a_deletion_waits_for_what_an_earlier_attempt_may_still_write(self) -> None:
        """Law 1: to give up waiting for an answer is no end of what was sent."""
        async with self.bench() as bench:
            await bench.put("a", durability="staged", tiers=("s3",))
            await bench.end(failed=[(one, bench.now) for one in await bench.claim("s3")])
            again = await bench.claim("s3", lease_ms=1000)
            assert [one.attempts for one in again] == [1]
            await bench.delete("a")
            assert await bench.end(done=again) == {again[0].blob_id}
            assert await bench.sweep() == 0
            bench.now += 1000
            assert await bench.sweep() == 1

    @aio
    async def test_who_lost_a_write_does_not_end_the_wait_for_whoever_took_it_over(self) -> None:
        async with self.bench() as bench:
            await bench.put("a")
            mine = await bench.claim("s3", lease_ms=10)
            bench.now += 20
            assert len(await bench.claim("s3", node=AFTER_RESTART)) == 1
            await bench.delete("a")
            await bench.end(done=mine)
            assert await bench.sweep() == 0
            assert "doomed" in (await bench.states()).values()

    @aio
    async def test_what_another_process_took_over_stays_its_own(self) -> None:
        async with self.bench() as bench:
            await bench.put("a", "b")
            mine = await bench.claim("s3", lease_ms=10)
            bench.now += 20
            (theirs, _) = await bench.claim("s3", node=AFTER_RESTART)
            await bench.on(AFTER_RESTART).settle_writes(bench.scope, Endings(done=[theirs]), None, bench.now)
            turn = await bench.catalog.settle_writes(bench.scope, Endings(done=mine), None, bench.now)
            states = await bench.states()
            other = next(one.blob_id for one in mine if one.blob_id != theirs.blob_id)
            assert (states[theirs.blob_id, "s3", ""], states[other, "s3", ""]) == ("ok", "writing")
            assert turn.settled == {theirs.blob_id}
            assert theirs.blob_id not in turn.unneeded, "it was written, if not as this process's"

    @aio
    async def test_R51_its_statements_do_not_grow_with_the_writes(self) -> None:
        async with self.bench() as bench:
            sent: dict[int, int] = {}
            for count in (1, 64):
                await bench.put(*(f"{count}/{index}" for index in range(2 * count)))
                due = await bench.claim("s3", limit=count)
                catalog: Any = bench.backend.catalog(HERE)
                with counted_statements() as seen:
                    turn = await catalog.settle_writes(
                        bench.scope, Endings(done=due), Claim("s3", NOW + 1000, count), NOW
                    )
                assert len(turn.due) == count
                sent[count] = len(seen)
                await bench.run(
                    update(placement)
                    .where(*owned(placement, bench.scope))
                    .values(state="ok", owner=None, lease_ms=None)
                )
            assert sent[1] == sent[64] <= 6, sent
