"""Holds, and room made inside a quota: the part of the catalog's suite that both databases pass."""

from __future__ import annotations

from tests.support.aio import aio
from tests.tenancy.catalog_bench import NOW, SEALED, TTL, BenchSuite, name
from tests.tenancy.catalog_endings import tombstones


class CatalogRoom(BenchSuite):
    @aio
    async def test_a_hold_keeps_from_eviction_for_its_time(self) -> None:
        async with self.bench(hold_bytes=10 * SEALED) as bench:
            put = await bench.put("a", "b", "c")
            assert await bench.catalog.hold(bench.scope, 1, [name("b")], NOW + 100, NOW) == 1
            there = [one.blob_id for one in await bench.catalog.eviction_candidates(bench.scope, NOW + 99, 10)]
            assert sorted(there) == sorted([put.blobs["a"], put.blobs["c"]])
            assert len(await bench.catalog.eviction_candidates(bench.scope, NOW + 100, 10)) == 3, "its time is over"

    @aio
    async def test_a_hold_covers_a_leading_run_within_its_quota(self) -> None:
        async with self.bench(hold_bytes=2 * SEALED) as bench:
            await bench.put("a", "b", "c")
            await bench.put("elsewhere", scope=bench.other)
            keys = [name(one) for one in ("a", "b", "c")]
            assert await bench.catalog.hold(bench.scope, 1, keys, NOW + 100, NOW) == 2, "as many as fit"
            assert await bench.catalog.hold(bench.scope, 1, keys, NOW + 200, NOW) == 2, "a longer hold costs no more"
            assert await bench.catalog.hold(bench.scope, 1, keys[2:], NOW + 100, NOW) == 0
            assert await bench.catalog.hold(bench.scope, 1, keys, 0, NOW) == 3, "ended"
            assert await bench.catalog.hold(bench.scope, 1, [*keys[2:], name("none"), keys[0]], NOW + 100, NOW) == 1
            assert await bench.catalog.hold(bench.other, 1, [name("elsewhere")], NOW + 100, NOW) == 1, "its own quota"

    @aio
    async def test_without_a_hold_quota_nothing_is_held(self) -> None:
        async with self.bench() as bench:
            await bench.put("a")
            assert await bench.catalog.hold(bench.scope, 1, [name("a")], NOW + 100, NOW) == 0

    @aio
    async def test_a_hold_defers_neither_expiry_nor_deletion(self) -> None:
        async with self.bench(hold_bytes=10 * SEALED) as bench:
            await bench.put("a", "b")
            await bench.catalog.hold(bench.scope, 1, [name("a"), name("b")], NOW + 10 * TTL, NOW)
            await bench.delete("a")
            assert list(await bench.see("a", "b")) == ["b"]
            bench.now += TTL
            assert await bench.see("b") == {}
            assert (await bench.catalog.expire(bench.scope, bench.now, 10))[0] == 1

    @aio
    async def test_room_is_made_by_what_expired_and_then_by_what_is_least_used(self) -> None:
        async with self.bench(limit_bytes=10 * SEALED) as bench:
            await bench.put("expired", ttl_ms=1)
            bench.now += 1
            for key in ("one", "two", "three", "four", "five", "six", "seven"):
                await bench.put(key)
                bench.now += 1
            assert await bench.catalog.make_room(bench.scope, bench.now) == [], "eight of ten is no reason"
            await bench.put("eight", "nine")
            assert len(await bench.catalog.make_room(bench.scope, bench.now)) == 2
            assert await tombstones(bench) == {name("expired"): "expired", name("one"): "evicted"}
            assert await bench.catalog.make_room(bench.scope, bench.now) == [], (
                "what waits for the sweep counts as gone"
            )
            assert await bench.sweep() == 2

    @aio
    async def test_room_is_made_from_the_tail_and_around_holds(self) -> None:
        async with self.bench(limit_bytes=10 * SEALED, hold_bytes=10 * SEALED) as bench:
            await bench.put(*(f"k{number}" for number in range(10)))
            held = [name(f"k{number}") for number in (7, 8, 9)]
            await bench.catalog.hold(bench.scope, 1, held, bench.now + 100, bench.now)
            assert len(await bench.catalog.make_room(bench.scope, bench.now)) == 2
            assert set(await tombstones(bench)) == {name("k6"), name("k5")}

    @aio
    async def test_room_that_one_namespace_makes_costs_no_other(self) -> None:
        async with self.bench(limit_bytes=10 * SEALED) as bench:
            await bench.put(*(f"k{number}" for number in range(10)), scope=bench.other)
            await bench.put("mine")
            assert await bench.catalog.make_room(bench.scope, bench.now) == []
            assert len(await bench.see(*(f"k{number}" for number in range(10)), scope=bench.other)) == 10, "law 6"
