"""The suite that the catalog passes on every database: how entries end, the sweep, and the outbox of write-back."""

from __future__ import annotations

import pytest

from tenancy.placements import Endings
from tenancy.schema import entry, owned, reservation, tombstone
from tenancy.sweep import DoomedPlacement
from tests.support.aio import aio
from tests.tenancy.catalog_bench import (
    AFTER_RESTART,
    ELSEWHERE,
    NOW,
    SEALED,
    TTL,
    Bench,
    BenchSuite,
    name,
)


async def tombstones(bench: Bench) -> dict[bytes, str]:
    rows = await bench.rows(tombstone.select().where(*owned(tombstone, bench.scope)))
    return {row.entry_key: row.reason for row in rows}


async def settle(bench: Bench, tier: str = "s3") -> None:
    """Write back everything that is due in a tier."""
    assert await bench.end(done=await bench.claim(tier)) == frozenset()


class CatalogEndings(BenchSuite):
    """Delete, expire, lose, evict; sweep and purge; claims, promotion, quarantine."""

    # Delete

    @aio
    async def test_a_chunk_dies_with_its_last_entry(self) -> None:
        async with self.bench() as bench:
            put = await bench.put("a", contents=["same"])
            await bench.put("b", contents=["same"])
            assert await bench.delete("a", "missing") == (1, [])
            assert set(await bench.see("a", "b")) == {"b"}
            assert await bench.delete("b") == (1, [put.blobs["a"]])
            assert await bench.chunks() == {put.blobs["a"]: "deleting"}
            assert await tombstones(bench) == {name("a"): "deleted", name("b"): "deleted"}

    @aio
    async def test_delete_reaches_one_format_of_one_namespace(self) -> None:
        async with self.bench() as bench:
            await bench.put("a", "b")
            await bench.put("a", scope=bench.other)
            await bench.delete("a")
            assert set(await bench.see("a", "b")) == {"b"}
            assert set(await bench.see("a", scope=bench.other)) == {"a"}

    @aio
    async def test_bytes_are_swept_after_the_pointer_and_then_no_longer_charged(self) -> None:
        async with self.bench() as bench:
            put = await bench.put("a")
            await settle(bench)
            await bench.delete("a")
            usage = await bench.usage()
            assert (usage.stored_bytes, usage.objects, usage.s3_bytes) == (SEALED, 1, SEALED)
            for tier in ("nvme", "s3"):
                doomed = await bench.catalog.doomed(bench.scope, tier, NOW, 10)
                assert doomed == [DoomedPlacement(put.blobs["a"], tier, put.blobs["a"].hex())]
            assert await bench.catalog.purge(bench.scope, [DoomedPlacement(put.blobs["a"], "s3", "")], 10) == 0
            assert (await bench.usage()).s3_bytes == 0
            assert (await bench.usage()).objects == 1, "its bytes are still on NVMe"
            assert await bench.sweep() == 1
            assert (await bench.usage()).objects == 0
            assert await bench.chunks() == {}

    @aio
    async def test_a_purge_drops_nothing_that_is_not_doomed(self) -> None:
        async with self.bench() as bench:
            put = await bench.put("a")
            assert await bench.catalog.purge(bench.scope, [DoomedPlacement(put.blobs["a"], "nvme", "")], 10) == 0
            assert set(await bench.see("a")) == {"a"}

    @aio
    async def test_each_node_sweeps_its_own_disk(self) -> None:
        async with self.bench() as bench:
            await bench.put("a", node=ELSEWHERE)
            await bench.delete("a")
            assert await bench.sweep() == 0
            assert await bench.sweep(node=ELSEWHERE) == 1

    @aio
    async def test_a_write_that_is_on_its_way_is_waited_for(self) -> None:
        async with self.bench() as bench:
            put = await bench.put("a")
            due = await bench.claim("s3", lease_ms=1000)
            await bench.delete("a")
            states = await bench.states()
            assert states[put.blobs["a"], "s3", ""] == "doomed"
            assert await bench.catalog.doomed(bench.scope, "s3", NOW + 999, 10) == []
            assert await bench.end(done=due) == {put.blobs["a"]}, "no longer wanted"
            assert len(await bench.catalog.doomed(bench.scope, "s3", NOW + 1000, 10)) == 1
            bench.now = NOW + 1000
            assert await bench.sweep() == 1
            assert (await bench.usage()).s3_bytes == 0

    @aio
    async def test_what_was_doomed_while_it_was_written_can_be_given_up(self) -> None:
        async with self.bench() as bench:
            await bench.put("a")
            due = await bench.claim("s3")
            await bench.delete("a")
            assert await bench.end(lost=due) == {due[0].blob_id}
            assert (await bench.usage()).s3_bytes == SEALED, "charged until it is swept"
            bench.now += 1000
            await bench.sweep()
            assert (await bench.usage()).s3_bytes == 0

    @aio
    async def test_a_deleted_key_may_come_back(self) -> None:
        async with self.bench() as bench:
            await bench.put("a")
            await bench.delete("a")
            again = await bench.put("a")
            assert again.reserved.wanted == (0,)
            assert (await bench.see("a"))["a"].blob_id == again.blobs["a"]
            await bench.delete("a")
            assert await bench.sweep() == 2

    # Ends by themselves

    @aio
    async def test_expiry_ends_what_is_over_and_no_more_than_asked(self) -> None:
        async with self.bench() as bench:
            await bench.put("a", "b", "c", ttl_ms=10)
            await bench.put("d", ttl_ms=11)
            assert await bench.catalog.expire(bench.scope, NOW + 9, 100) == (0, [])
            count, dead = await bench.catalog.expire(bench.scope, NOW + 10, 2)
            assert (count, len(dead)) == (2, 2)
            assert (await bench.catalog.expire(bench.scope, NOW + 10, 100))[0] == 1
            assert set((await tombstones(bench)).values()) == {"expired"}
            assert set(await bench.see("d")) == {"d"}
            assert await bench.catalog.forget_tombstones(bench.scope, NOW + 10) == 0
            assert await bench.catalog.forget_tombstones(bench.scope, NOW + 11) == 3

    @aio
    async def test_a_restart_loses_what_only_staging_held(self) -> None:
        async with self.bench() as bench:
            lost = await bench.put("staged", durability="staged")
            await bench.put("kept", durability="nvme")
            await bench.put("theirs", durability="staged", node=ELSEWHERE)
            await bench.on(ELSEWHERE).announce("1", NOW, 0)
            assert (await bench.catalog.lose_unplaced(bench.scope, NOW))[0] == 0, "both stagings are alive"
            restarted = bench.on(AFTER_RESTART)
            assert await restarted.lose_unplaced(bench.scope, NOW) == (1, [lost.blobs["staged"]])
            assert set(await bench.see("staged", "kept", node=AFTER_RESTART)) == {"kept"}
            assert set(await bench.see("theirs", node=ELSEWHERE)) == {"theirs"}
            assert (await bench.usage()).objects == 3
            assert await bench.sweep() == 1

    @aio
    async def test_abandoned_reservations_are_given_back_and_others_are_not(self) -> None:
        async with self.bench() as bench:
            for index, lease in enumerate((10, 20, 30)):
                await bench.catalog.reserve(bench.batch([str(index)]), bench.unique(), NOW + lease, NOW)
            assert await bench.catalog.reclaim_expired(bench.scope, NOW + 20) == 2
            assert len(await bench.rows(reservation.select().where(*owned(reservation, bench.scope)))) == 1
            assert (await bench.usage()).objects == 1

    # Write-back

    @aio
    async def test_a_claim_is_exclusive_until_its_lease_ends(self) -> None:
        async with self.bench() as bench:
            await bench.put("a", "b")
            due = await bench.claim("s3", lease_ms=1000)
            assert len(due) == 2
            assert await bench.claim("s3") == []
            assert await bench.claim("s3", node=ELSEWHERE) == [], "that node cannot read the blobs"
            bench.now += 999
            assert await bench.claim("s3", node=AFTER_RESTART) == []
            bench.now += 1
            taken_over = await bench.claim("s3", node=AFTER_RESTART)
            assert len(taken_over) == 2
            assert await bench.end(done=due) == {one.blob_id for one in due}
            await bench.end(failed=[(one, bench.now) for one in due])
            assert await bench.end(lost=due) == frozenset()
            assert await bench.claim("s3") == [], "who lost the claim can neither finish, postpone nor drop it"
            assert await bench.end(done=taken_over, node=AFTER_RESTART) == frozenset()
            assert (await bench.see("a"))["a"].on_s3

    @aio
    async def test_nvme_is_written_by_its_own_node_only(self) -> None:
        async with self.bench() as bench:
            await bench.put("a", durability="staged")
            assert await bench.claim("nvme", node=ELSEWHERE) == []
            due = await bench.claim("nvme")
            assert [(one.tier, one.node, one.sources) for one in due] == [("nvme", "node-a", frozenset())]

    @aio
    async def test_due_writes_come_in_order_and_up_to_a_limit(self) -> None:
        async with self.bench() as bench:
            blobs = []
            for at, key in enumerate("cab"):
                bench.now = NOW + 10 - at
                blobs.append((await bench.put(key)).blobs[key])
            bench.now = NOW + 10
            assert [one.blob_id for one in await bench.claim("s3", limit=2)] == [blobs[2], blobs[1]]
            assert [one.blob_id for one in await bench.claim("s3", limit=2)] == [blobs[0]]

    @aio
    async def test_a_postponed_write_waits_and_counts_its_attempts(self) -> None:
        async with self.bench() as bench:
            await bench.put("a", "b")
            first, second = await bench.claim("s3")
            await bench.end(failed=[(first, NOW + 500), (second, NOW + 700)])
            assert await bench.catalog.outbox_length(bench.scope) == {
                "s3": (2, 2 * SEALED, NOW),
            }
            bench.now = NOW + 499
            assert await bench.claim("s3") == []
            bench.now = NOW + 500
            again = await bench.claim("s3")
            assert [(one.blob_id, one.attempts) for one in again] == [(first.blob_id, 1)]
            bench.now = NOW + 700
            assert [one.blob_id for one in await bench.claim("s3")] == [second.blob_id]
            ended = Endings(failed=[(first, NOW + 900), (second, NOW + 900)])
            turn = await bench.catalog.settle_writes(bench.scope, ended, None, bench.now)
            assert turn.settled == frozenset(), "they are still to be written"

    @aio
    async def test_a_write_without_a_source_is_dropped_and_takes_only_hopeless_entries_along(self) -> None:
        async with self.bench() as bench:
            kept = await bench.put("kept", durability="nvme")
            lost = await bench.put("lost", durability="staged", tiers=("s3",))
            due = await bench.claim("s3")
            assert len(due) == 2
            assert await bench.end(lost=due) == {lost.blobs["lost"]}
            assert set(await bench.see("kept", "lost")) == {"kept"}
            assert await tombstones(bench) == {name("lost"): "lost"}
            assert await bench.states() == {(kept.blobs["kept"], "nvme", "node-a"): "ok"}
            assert (await bench.usage()).s3_bytes == 0

    # Promotion and quarantine

    @aio
    async def test_what_was_read_from_below_becomes_due_here_once(self) -> None:
        async with self.bench() as bench:
            put = await bench.put("a", "b", node=ELSEWHERE)
            due = await bench.claim("s3", node=ELSEWHERE)
            await bench.end(done=due[:1], node=ELSEWHERE)
            blob = due[0].blob_id
            assert await bench.catalog.promote(bench.scope, list(put.blobs.values()), NOW) == {blob}, "not without S3"
            assert await bench.catalog.promote(bench.scope, [blob], NOW) == set()
            claimed = await bench.claim("nvme")
            assert [(one.blob_id, one.sources) for one in claimed] == [(blob, {"s3"})]
            await bench.end(done=claimed)
            assert len([1 for found in (await bench.see("a", "b")).values() if found.on_nvme]) == 1

    @aio
    async def test_a_dead_chunk_is_not_promoted(self) -> None:
        async with self.bench() as bench:
            put = await bench.put("a", durability="s3", tiers=("s3",))
            await bench.delete("a")
            assert await bench.catalog.promote(bench.scope, [put.blobs["a"]], NOW) == set()

    @aio
    async def test_a_quarantined_copy_is_not_read_and_the_next_one_is(self) -> None:
        async with self.bench() as bench:
            put = await bench.put("a")
            await settle(bench)
            assert await bench.catalog.quarantine(bench.scope, put.blobs["a"], "nvme", "node-a", NOW) == []
            found = (await bench.see("a"))["a"]
            assert (found.on_nvme, found.on_s3) == (False, True)

    @aio
    async def test_good_bytes_take_the_place_of_quarantined_ones(self) -> None:
        async with self.bench() as bench:
            put = await bench.put("a")
            await settle(bench)
            await bench.catalog.quarantine(bench.scope, put.blobs["a"], "nvme", "node-a", NOW)
            assert await bench.catalog.promote(bench.scope, [put.blobs["a"]], NOW) == {put.blobs["a"]}
            await settle(bench, "nvme")
            assert (await bench.see("a"))["a"].on_nvme

    @aio
    async def test_an_entry_ends_with_its_last_good_copy(self) -> None:
        async with self.bench() as bench:
            put = await bench.put("a", tiers=("nvme",))
            assert await bench.catalog.quarantine(bench.scope, put.blobs["a"], "nvme", "node-a", NOW) == [
                put.blobs["a"]
            ]
            assert await bench.see("a") == {}
            assert await tombstones(bench) == {name("a"): "lost"}
            assert await bench.sweep() == 1

    # Eviction

    @aio
    async def test_the_longest_unused_goes_first_and_of_a_chain_its_tail(self) -> None:
        async with self.bench() as bench:
            await bench.put("old-1", "old-2", "old-3")
            bench.now += 1
            await bench.put("new")
            order = [one.blob_id for one in await bench.catalog.eviction_candidates(bench.scope, bench.now, 10)]
            depth = {found.blob_id: key for key, found in (await bench.see("old-1", "old-2", "old-3", "new")).items()}
            assert [depth[blob] for blob in order] == ["old-3", "old-2", "old-1", "new"]
            await bench.catalog.record_hits(bench.scope, [(1, name("old-2"), 3, bench.now + 5)])
            order = [one.blob_id for one in await bench.catalog.eviction_candidates(bench.scope, bench.now, 10)]
            assert [depth[blob] for blob in order] == ["old-3", "old-1", "new", "old-2"]
            assert len(await bench.catalog.eviction_candidates(bench.scope, bench.now, 2)) == 2

    @aio
    async def test_a_chunk_is_as_dear_as_its_dearest_entry(self) -> None:
        async with self.bench() as bench:
            shared = await bench.put("a", contents=["same"])
            bench.now += 1
            await bench.put("b")
            bench.now += 1
            await bench.put("c", contents=["same"])
            order = [one.blob_id for one in await bench.catalog.eviction_candidates(bench.scope, bench.now, 10)]
            assert len(order) == 2
            assert order[-1] == shared.blobs["a"]

    @aio
    async def test_eviction_takes_the_entry_along_unless_another_tier_has_the_bytes(self) -> None:
        async with self.bench() as bench:
            kept = await bench.put("kept")
            await settle(bench)
            gone = await bench.put("gone", tiers=("nvme",))
            blobs = [kept.blobs["kept"], gone.blobs["gone"]]
            assert await bench.catalog.evict_nvme(bench.scope, blobs, NOW) == [gone.blobs["gone"]]
            found = await bench.see("kept", "gone")
            assert set(found) == {"kept"}
            assert (found["kept"].on_nvme, found["kept"].on_s3) == (False, True)
            assert await tombstones(bench) == {name("gone"): "evicted"}
            assert await bench.catalog.leaving_nvme(bench.scope) == 2 * SEALED
            assert await bench.sweep() == 1
            assert await bench.catalog.leaving_nvme(bench.scope) == 0

    @pytest.mark.parametrize(("restarted", "lives"), [(False, True), (True, False)])
    @aio
    async def test_a_write_to_s3_counts_as_a_copy_while_staging_feeds_it(self, restarted: bool, lives: bool) -> None:
        async with self.bench() as bench:
            put = await bench.put("a")
            evicting = bench.on(AFTER_RESTART) if restarted else bench.catalog
            dead = await evicting.evict_nvme(bench.scope, [put.blobs["a"]], NOW)
            assert dead == ([] if lives else [put.blobs["a"]])
            assert (await bench.chunks())[put.blobs["a"]] == ("live" if lives else "deleting")

    # Life

    @aio
    async def test_extend_lengthens_and_never_shortens_and_never_revives(self) -> None:
        async with self.bench() as bench:
            await bench.put("a", "b")
            bench.now += TTL // 2
            names = [name("a"), name("missing")]
            assert await bench.catalog.extend(bench.scope, 1, names, None, bench.now) == 1
            found = await bench.see("a", "b")
            assert (found["a"].expires_ms, found["b"].expires_ms) == (bench.now + TTL, NOW + TTL)
            await bench.catalog.extend(bench.scope, 1, names, 1, bench.now)
            assert (await bench.see("a"))["a"].expires_ms == bench.now + TTL
            bench.now = NOW + TTL
            assert await bench.catalog.extend(bench.scope, 1, [name("b")], TTL, bench.now) == 0
            assert await bench.see("b") == {}

    @aio
    async def test_hits_are_added_up(self) -> None:
        async with self.bench() as bench:
            await bench.put("a")
            await bench.catalog.record_hits(bench.scope, [(1, name("a"), 2, NOW + 5), (1, name("gone"), 9, NOW)])
            await bench.catalog.record_hits(bench.scope, [(1, name("a"), 3, NOW + 7)])
            rows = await bench.rows(entry.select().where(*owned(entry, bench.scope)))
            assert [(row.hits, row.last_hit_ms) for row in rows] == [(5, NOW + 7)]

    # Processes and time

    @aio
    async def test_the_high_water_never_falls(self) -> None:
        async with self.bench() as bench:
            assert await bench.catalog.high_water_ms() == 0
            await bench.catalog.announce("1", NOW, 0)
            await bench.catalog.heartbeat(NOW + 10)
            await bench.catalog.heartbeat(NOW - 10)
            await bench.on(ELSEWHERE).announce("1", NOW - 99, 0)
            assert await bench.catalog.high_water_ms() == NOW + 10
            await bench.catalog.leave(NOW + 4_000)
            assert await bench.catalog.high_water_ms() == NOW + 4_000, "law 5: also when beats before the end were lost"

    @aio
    async def test_known_objects_are_those_with_any_row_in_the_tier(self) -> None:
        async with self.bench() as bench:
            put = await bench.put("a", "b")
            await bench.delete("a")
            asked = [*put.blobs.values(), b"?" * 16]
            assert await bench.catalog.known_objects(bench.scope, "nvme", "node-a", asked) == set(put.blobs.values())
            assert await bench.catalog.known_objects(bench.scope, "nvme", "node-b", asked) == set()
            assert await bench.catalog.known_objects(bench.other, "nvme", "node-a", asked) == set()
            assert await bench.catalog.known_objects(bench.scope, "s3", "", asked) == {put.blobs["b"]}
