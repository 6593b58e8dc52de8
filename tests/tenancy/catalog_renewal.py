"""The suite that the catalog passes on every database: what was written down by a clock that was ahead, copies that
proved wrong and are written anew, and what is still owed of what waits in staging.
"""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import update

from tenancy.outbox import Debts
from tenancy.processes import CLOCKS_MS
from tenancy.repair import REST_MS
from tenancy.schema import owned, placement
from tenancy.timekeeping import FURTHEST_MS
from tests.support.aio import aio
from tests.tenancy.catalog_bench import ELSEWHERE, HERE, NOW, Bench, BenchSuite

HOUR_MS = 3_600_000


async def quarantine(bench: Bench, blob_id: bytes, tier: str) -> list[bytes]:
    node = HERE.node if tier == "nvme" else ""
    found: list[bytes] = await bench.catalog.quarantine(bench.scope, blob_id, tier, node, bench.now)
    return found


async def in_both(bench: Bench, key: str) -> bytes:
    """A chunk on this node's disk and in S3; its blob."""
    put = await bench.put(key)
    await bench.end(done=await bench.claim("s3"))
    return put.blobs[key]


class CatalogRenewal(BenchSuite):
    # Times that are too far ahead

    @aio
    async def test_R59_a_write_that_is_due_in_an_hour_is_due(self) -> None:
        async with self.bench() as bench:
            await bench.put("a", "b")
            due = await bench.claim("s3")
            await bench.end(failed=[(due[0], bench.now + HOUR_MS), (due[1], bench.now + FURTHEST_MS)])
            assert await bench.claim("s3", lease_ms=HOUR_MS) == [
                replace(due[0], attempts=1, lease_until_ms=bench.now + HOUR_MS)
            ]
            again = await bench.claim("s3")
            assert [one.blob_id for one in again] == [due[0].blob_id], "its lease ends too late to be true"

    @aio
    async def test_R59_bytes_that_may_be_deleted_in_an_hour_may_be_now(self) -> None:
        async with self.bench() as bench:
            await bench.put("a")
            await bench.claim("s3", lease_ms=HOUR_MS)
            await bench.delete("a")
            assert await bench.sweep() == 1, "both placements, though the write's lease goes on for an hour"

    @aio
    async def test_R59_a_reservation_until_in_an_hour_is_over(self) -> None:
        async with self.bench() as bench:
            await bench.catalog.reserve(bench.batch(["a"]), bench.unique(), bench.now + HOUR_MS, bench.now)
            await bench.catalog.reserve(bench.batch(["b"]), bench.unique(), bench.now + FURTHEST_MS, bench.now)
            assert await bench.catalog.reclaim_expired(bench.scope, bench.now) == 1

    @aio
    async def test_R59_a_job_that_somebody_has_for_far_too_long_is_free(self) -> None:
        async with self.bench() as bench:
            here, there = bench.on(HERE), bench.on(ELSEWHERE)
            assert await here.lead("sweep", NOW + HOUR_MS, NOW)
            assert not await there.lead("sweep", 0, NOW), "who asks for nothing gets nothing"
            assert await there.lead("sweep", NOW + 30_000, NOW)
            assert not await here.lead("sweep", NOW + 30_000, NOW)
            assert await there.lead("sweep", NOW + FURTHEST_MS + CLOCKS_MS, NOW)
            assert not await here.lead("sweep", NOW + 30_000, NOW), "as far ahead as it may be"

    # Copies that proved wrong

    @aio
    async def test_law_2_what_proved_wrong_in_one_tier_is_written_anew_from_the_other(self) -> None:
        async with self.bench() as bench:
            for tier in ("s3", "nvme"):
                blob_id = await in_both(bench, tier)
                assert await quarantine(bench, blob_id, tier) == []
                assert await bench.catalog.renew(bench.scope, bench.now + REST_MS - 1, 10) == 0, "it rests first"
                bench.now += REST_MS
                assert await bench.catalog.renew(bench.scope, bench.now, 10) == 1
                (due,) = await bench.claim(tier)
                assert (due.blob_id, due.attempts, due.sources) == (blob_id, 1, {"s3", "nvme"} - {tier})
                await bench.end(done=[due])
                assert set((await bench.states()).values()) == {"ok"}

    @aio
    async def test_law_9_a_copy_that_is_wrong_again_and_again_is_written_less_and_less_often(self) -> None:
        async with self.bench() as bench:
            blob_id = await in_both(bench, "a")
            for tries in (1, 2, 3):
                await quarantine(bench, blob_id, "s3")
                bench.now += REST_MS * tries**2 - 1
                assert await bench.catalog.renew(bench.scope, bench.now, 10) == 0
                bench.now += 1
                assert await bench.catalog.renew(bench.scope, bench.now, 10) == 1
                await bench.end(done=await bench.claim("s3"))

    @aio
    async def test_what_no_tier_of_this_node_has_whole_is_not_written_anew(self) -> None:
        async with self.bench() as bench:
            blob_id = await in_both(bench, "a")
            await quarantine(bench, blob_id, "s3")
            bench.now += REST_MS
            assert await bench.on(ELSEWHERE).renew(bench.scope, bench.now, 10) == 0, "the good copy is another node's"
            assert await quarantine(bench, blob_id, "nvme") == [blob_id], "its last copy: the entry ends"
            bench.now += REST_MS
            assert await bench.catalog.renew(bench.scope, bench.now, 10) == 0

    @aio
    async def test_few_at_a_time_are_written_anew(self) -> None:
        async with self.bench() as bench:
            blobs = [await in_both(bench, key) for key in "abc"]
            for blob_id in blobs:
                await quarantine(bench, blob_id, "s3")
            bench.now += REST_MS
            counts = [await bench.catalog.renew(bench.scope, bench.now, 2) for _ in range(3)]
            assert counts == [2, 1, 0]

    # What is owed

    @aio
    async def test_what_is_owed_of_what_waits(self) -> None:
        async with self.bench() as bench:
            put = await bench.put("due", "done", "gone", "elsewhere")
            await bench.run(
                update(placement)
                .where(
                    *owned(placement, bench.scope),
                    placement.c.tier == "s3",
                    placement.c.blob_id.in_([put.blobs["done"], put.blobs["elsewhere"]]),
                )
                .values(state="ok")
            )
            await bench.run(
                update(placement)
                .where(
                    *owned(placement, bench.scope),
                    placement.c.tier == "nvme",
                    placement.c.blob_id == put.blobs["elsewhere"],
                )
                .values(node=ELSEWHERE.node, state="due")
            )
            await bench.delete("gone")
            reservation = bench.unique()
            await bench.catalog.reserve(bench.batch(["new"]), reservation, bench.now + 1000, bench.now)
            unknown = bench.unique()
            names = ("due", "done", "gone", "elsewhere")
            found = await bench.catalog.debts(bench.scope, [unknown, *(put.blobs[one] for one in names)])
            assert found == Debts(
                owed=frozenset({put.blobs["due"]}),
                kept=frozenset({put.blobs["done"], put.blobs["elsewhere"]}),
                ended=frozenset({put.blobs["gone"]}),
                under_way=frozenset({reservation}),
            )
            assert (await bench.on(ELSEWHERE).debts(bench.scope, [put.blobs["elsewhere"]])).under_way == frozenset()
