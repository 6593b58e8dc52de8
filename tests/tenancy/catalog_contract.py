"""The suite that the catalog passes on every database: reserving, committing, and what is visible.

Subclass it in a test module and say how an empty catalog is opened (`BenchSuite.backend`). Laws 1 and 4 are checked
after every call that the tests make.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tenancy.errors import NamespaceUnknown, ReservationExpired
from tenancy.placements import DueWrite, Endings
from tenancy.policy import Policy
from tenancy.schema import entry, entry_label, namespace, owned, placement, quota
from tenancy.sweep import DoomedPlacement
from tests.support.aio import aio
from tests.tenancy.catalog_bench import (
    AFTER_RESTART,
    ELSEWHERE,
    HERE,
    NOW,
    SEALED,
    TTL,
    Bench,
    BenchSuite,
    counted_statements,
    description,
    name,
)


async def set_namespace(bench: Bench, **values: Any) -> None:
    await bench.run(namespace.update().where(*owned(namespace, bench.scope)).values(**values))


class CatalogContract(BenchSuite):
    """Formats, reservations, commits, visibility, dedup."""

    # Formats

    @aio
    async def test_a_format_is_registered_once_and_belongs_to_its_namespace(self) -> None:
        async with self.bench() as bench:
            first = await bench.catalog.register_format(bench.scope, description("x"), NOW)
            again = await bench.catalog.register_format(bench.scope, description("x"), NOW + 1)
            assert first == again
            assert first.format_id == 2
            assert await bench.catalog.format(bench.scope, name("x")) == first
            assert await bench.catalog.format(bench.other, name("x")) is None

    # Reserve, commit, abort

    @aio
    async def test_what_was_committed_is_visible_and_what_was_reserved_is_not(self) -> None:
        async with self.bench() as bench:
            batch = bench.batch(["a", "b"])
            reserved = await bench.catalog.reserve(batch, b"r" * 16, NOW + 1000, NOW)
            assert (reserved.have, reserved.wanted, reserved.over_quota) == (frozenset(), (0, 1), frozenset())
            assert await bench.see("a", "b") == {}
            assert (await bench.usage()).stored_bytes == 2 * SEALED
            chunks = [bench.new_chunk(index, key, written=frozenset({"nvme"})) for index, key in enumerate("ab")]
            committed = await bench.catalog.commit(batch, b"r" * 16, chunks, NOW)
            assert committed.stored == {0, 1}
            found = await bench.see("b", "a", "c")
            assert set(found) == {"a", "b"}
            assert (found["a"].blob_id, found["a"].chunk_id) == (chunks[0].blob_id, chunks[0].chunk_id)
            assert (found["a"].on_nvme, found["a"].on_s3, found["a"].at_home) == (True, False, True)
            assert found["a"].expires_ms == NOW + TTL
            usage = await bench.usage()
            assert (usage.stored_bytes, usage.objects, usage.s3_bytes) == (2 * SEALED, 2, 2 * SEALED)

    @aio
    async def test_a_chunk_that_was_reserved_and_did_not_come_is_given_back(self) -> None:
        async with self.bench() as bench:
            batch = bench.batch(["a", "b", "c"])
            await bench.catalog.reserve(batch, b"r" * 16, NOW + 1000, NOW)
            only = [bench.new_chunk(1, "b", written=frozenset({"nvme"}))]
            assert (await bench.catalog.commit(batch, b"r" * 16, only, NOW)).stored == {1}
            assert (await bench.usage()).objects == 1

    @aio
    async def test_abort_gives_back_and_may_be_repeated(self) -> None:
        async with self.bench() as bench:
            await bench.catalog.reserve(bench.batch(["a"]), b"r" * 16, NOW + 1000, NOW)
            await bench.catalog.abort(bench.scope, b"r" * 16)
            await bench.catalog.abort(bench.scope, b"r" * 16)
            assert (await bench.usage()).objects == 0

    @aio
    async def test_R03_a_commit_after_its_lease_announces_nothing(self) -> None:
        async with self.bench() as bench:
            late = bench.batch(["a"])
            await bench.catalog.reserve(late, b"1" * 16, NOW + 1000, NOW)
            assert await bench.catalog.reclaim_expired(bench.scope, NOW + 999) == 0
            assert await bench.catalog.reclaim_expired(bench.scope, NOW + 1000) == 1
            assert (await bench.usage()).objects == 0
            bench.now = NOW + 1000
            winner = await bench.put("a", contents=["Y"])
            chunk = bench.new_chunk(0, "X", written=frozenset({"nvme"}))
            with pytest.raises(ReservationExpired):
                await bench.catalog.commit(late, b"1" * 16, [chunk], bench.now)
            assert (await bench.see("a"))["a"].blob_id == winner.blobs["a"]
            assert chunk.blob_id not in await bench.chunks()

    @aio
    async def test_a_reservation_serves_one_commit(self) -> None:
        async with self.bench() as bench:
            batch = bench.batch(["a"])
            await bench.catalog.reserve(batch, b"r" * 16, NOW + 1000, NOW)
            await bench.catalog.commit(batch, b"r" * 16, [bench.new_chunk(0, "a", written=frozenset({"nvme"}))], NOW)
            with pytest.raises(ReservationExpired):
                await bench.catalog.commit(batch, b"r" * 16, [bench.new_chunk(0, "b", written=frozenset())], NOW)

    # Visible

    @aio
    async def test_S15_an_entry_is_visible_until_its_last_millisecond(self) -> None:
        async with self.bench() as bench:
            await bench.put("a")
            bench.now = NOW + TTL - 1
            assert set(await bench.see("a")) == {"a"}
            bench.now = NOW + TTL
            assert await bench.see("a") == {}

    @aio
    async def test_C11_an_epoch_below_the_least_allowed_is_invisible(self) -> None:
        async with self.bench() as bench:
            await set_namespace(bench, epoch=2)
            await bench.put("old", epoch=1)
            await bench.put("new", epoch=2)
            assert set(await bench.see("old", "new")) == {"old", "new"}
            await set_namespace(bench, min_decrypt_epoch=2, min_encrypt_epoch=2)
            assert set(await bench.see("old", "new")) == {"new"}

    @pytest.mark.parametrize("state", ["suspended", "deleting"])
    @aio
    async def test_a_namespace_that_is_not_active_shows_and_takes_nothing(self, state: str) -> None:
        async with self.bench() as bench:
            await bench.put("a")
            open_batch = bench.batch(["b"])
            await bench.catalog.reserve(open_batch, b"r" * 16, NOW + 1000, NOW)
            await set_namespace(bench, state=state)
            assert await bench.see("a") == {}
            with pytest.raises(NamespaceUnknown):
                await bench.catalog.reserve(bench.batch(["a"]), b"s" * 16, NOW + 1000, NOW)
            with pytest.raises(NamespaceUnknown):
                chunk = bench.new_chunk(0, "b", written=frozenset({"nvme"}))
                await bench.catalog.commit(open_batch, b"r" * 16, [chunk], NOW)
            await set_namespace(bench, state="active")
            assert set(await bench.see("a")) == {"a"}, "the refused PUT must not have replaced it"

    @aio
    async def test_a_chunk_on_the_disk_of_another_node_is_invisible_until_s3_has_it(self) -> None:
        async with self.bench() as bench:
            put = await bench.put("a", node=ELSEWHERE)
            assert await bench.see("a") == {}
            assert set(await bench.see("a", node=ELSEWHERE)) == {"a"}
            due = await bench.claim("s3", node=ELSEWHERE)
            assert [one.blob_id for one in due] == [put.blobs["a"]]
            assert due[0].sources == {"nvme"}
            assert await bench.end(done=due, node=ELSEWHERE) == frozenset()
            found = await bench.see("a")
            assert (found["a"].at_home, found["a"].on_nvme, found["a"].on_s3) == (False, False, True)

    @aio
    async def test_what_is_only_staged_is_visible_to_the_run_that_staged_it(self) -> None:
        async with self.bench() as bench:
            await bench.put("a", durability="staged")
            assert set(await bench.see("a")) == {"a"}
            assert await bench.see("a", node=AFTER_RESTART) == {}
            assert await bench.see("a", node=ELSEWHERE) == {}

    @aio
    async def test_a_key_in_another_format_is_another_entry(self) -> None:
        async with self.bench() as bench:
            second = await bench.catalog.register_format(bench.scope, description("second"), NOW)
            await bench.put("a", contents=["one"])
            await bench.put("a", contents=["two"], format_id=second.format_id)
            assert (await bench.see("a"))["a"].chunk_id == name("one")
            found = await bench.catalog.lookup(bench.scope, [second.format_id], [name("a")], NOW)
            assert found[name("a")].chunk_id == name("two")
            assert await bench.see("a", scope=bench.other) == {}

    # Have

    @aio
    async def test_have_refreshes_the_life_and_attaches_labels(self) -> None:
        async with self.bench() as bench:
            await bench.put("a")
            bench.now = NOW + TTL // 2
            again = await bench.put("a", "b", label_macs=(name("label"),))
            assert again.reserved.have == {0}
            assert again.reserved.wanted == (1,)
            found = await bench.see("a", "b")
            assert found["a"].expires_ms == bench.now + TTL
            labelled = await bench.rows(entry_label.select().where(*owned(entry_label, bench.scope)))
            assert {row.entry_key for row in labelled} == {name("a"), name("b")}
            await bench.put("a", label_macs=(name("label"),))

    @aio
    async def test_have_never_shortens_a_life(self) -> None:
        async with self.bench() as bench:
            await bench.put("a", ttl_ms=TTL)
            await bench.put("a", ttl_ms=TTL // 2)
            assert (await bench.see("a"))["a"].expires_ms == NOW + TTL

    @aio
    async def test_law_8_have_is_not_said_of_what_is_less_durable_than_asked(self) -> None:
        async with self.bench() as bench:
            weak = await bench.put("a", "b", durability="staged")
            strong = await bench.put("a", durability="nvme")
            assert strong.reserved.wanted == (0,)
            assert strong.committed is not None
            assert strong.committed.stored == {0}
            assert set(strong.committed.doomed) == {weak.blobs["a"]}
            assert set(await bench.see("a", "b", node=AFTER_RESTART)) == {"a"}
            assert (await bench.see("a"))["a"].blob_id == strong.blobs["a"]
            await bench.sweep()
            assert (await bench.usage()).objects == 2
            assert (await bench.put("a", durability="staged")).reserved.have == {0}
            assert (await bench.put("a", durability="s3")).reserved.wanted == (0,)

    @aio
    async def test_what_write_back_has_made_durable_is_durable(self) -> None:
        async with self.bench() as bench:
            await bench.put("a", durability="staged")
            await bench.end(done=await bench.claim("nvme"))
            assert (await bench.put("a", durability="nvme")).reserved.have == {0}
            assert (await bench.put("a", durability="s3")).reserved.wanted == (0,)
            assert (await bench.see("a"))["a"].durability == "s3"

    # Stale

    @aio
    async def test_an_expired_entry_makes_way(self) -> None:
        async with self.bench() as bench:
            old = await bench.put("a", contents=["old"])
            bench.now = NOW + TTL
            new = await bench.put("a", contents=["new"])
            assert new.reserved.doomed == (old.blobs["a"],)
            assert (await bench.see("a"))["a"].blob_id == new.blobs["a"]
            assert (await bench.chunks())[old.blobs["a"]] == "deleting"

    @aio
    async def test_an_entry_whose_bytes_are_lost_makes_way(self) -> None:
        async with self.bench() as bench:
            lost = await bench.put("a", durability="staged")
            put = await bench.put("a", node=AFTER_RESTART)
            assert put.reserved.doomed == (lost.blobs["a"],)
            assert set(await bench.see("a", node=AFTER_RESTART)) == {"a"}

    # Quota

    @pytest.mark.parametrize(
        "limits", [{"limit_objects": 3}, {"limit_bytes": 3 * SEALED + SEALED - 1}, {"limit_s3_bytes": 3 * SEALED}]
    )
    @pytest.mark.parametrize("level", ["namespace", "tenant"])
    @aio
    async def test_a_leading_run_is_granted(self, level: str, limits: dict[str, int]) -> None:
        options: dict[str, Any] = limits if level == "namespace" else {"tenant_limits": Policy(**limits)}
        async with self.bench(**options) as bench:
            put = await bench.put("a", "b", "c", "d", "e")
            assert put.reserved.wanted == (0, 1, 2)
            assert put.reserved.over_quota == {3, 4}
            assert set(await bench.see(*"abcde")) == {"a", "b", "c"}
            again = await bench.put("d")
            assert (again.reserved.wanted, again.reserved.over_quota) == ((), {0})
            assert (await bench.put("a", "d")).reserved.have == {0}
            await bench.end(done=await bench.claim("s3"))
            await bench.delete("a")
            assert (await bench.put("d")).reserved.over_quota == {0}, "charged until the bytes are gone"
            await bench.sweep()
            assert (await bench.put("d")).reserved.wanted == (0,)

    @aio
    async def test_a_tenants_limit_holds_across_its_namespaces(self) -> None:
        async with self.bench(tenant_limits=Policy(limit_objects=3)) as bench:
            await bench.put("a", "b")
            theirs = await bench.put("a", "b", scope=bench.other)
            assert (theirs.reserved.wanted, theirs.reserved.over_quota) == ((0,), {1})
            assert (await bench.tenant_usage()).objects == 3

    @aio
    async def test_a_limit_below_what_is_used_grants_nothing(self) -> None:
        async with self.bench(limit_objects=5) as bench:
            await bench.put("a", "b", "c")
            mine = (quota.c.tenant_id == bench.scope.tenant, quota.c.scope_id == bench.scope.namespace)
            await bench.run(quota.update().where(*mine).values(limit_objects=2))
            reserved = await bench.backend.catalog(HERE).reserve(bench.batch(["d"]), b"r" * 16, NOW + 1, NOW)
            assert reserved.over_quota == {0}

    @aio
    async def test_Q01_racers_for_one_quota_get_the_limit_exactly(self) -> None:
        async with self.bench(limit_objects=37) as bench:
            catalog = bench.backend.catalog(HERE)

            async def racer(number: int) -> int:
                granted = 0
                for turn in range(5):
                    batch = bench.batch([f"{number}/{turn}"])
                    reserved = await catalog.reserve(batch, bench.unique(), NOW + 1000, NOW)
                    granted += len(reserved.wanted)
                return granted

            granted = await asyncio.gather(*(racer(number) for number in range(16)))
            assert sum(granted) == 37
            await bench.check()

    # Dedup

    @aio
    async def test_Q13_equal_content_under_two_keys_is_one_chunk_charged_once(self) -> None:
        async with self.bench() as bench:
            first = await bench.put("a", contents=["same"])
            second = await bench.put("b", contents=["same"])
            assert second.committed is not None
            assert (second.committed.stored, second.committed.fresh) == ({0}, frozenset())
            assert second.committed.discarded == (second.blobs["b"],)
            found = await bench.see("a", "b")
            assert found["a"].blob_id == found["b"].blob_id == first.blobs["a"]
            assert (await bench.usage()).objects == 1

    @aio
    async def test_equal_content_within_a_batch_is_one_chunk(self) -> None:
        async with self.bench() as bench:
            put = await bench.put("a", "b", "c", contents=["same", "same", "other"])
            assert put.committed is not None
            assert (put.committed.discarded, put.committed.fresh) == ((put.blobs["b"],), {0, 2})
            assert (await bench.usage()).objects == 2
            assert (await bench.see("b"))["b"].blob_id == put.blobs["a"]

    @aio
    async def test_C10_content_is_never_shared_across_epochs(self) -> None:
        async with self.bench() as bench:
            await bench.put("a", contents=["same"], epoch=1)
            await set_namespace(bench, epoch=2)
            second = await bench.put("b", contents=["same"], epoch=2)
            found = await bench.see("a", "b")
            assert found["b"].blob_id == second.blobs["b"] != found["a"].blob_id
            assert (found["a"].epoch, found["b"].epoch) == (1, 2)

    @aio
    async def test_content_is_never_shared_across_namespaces(self) -> None:
        async with self.bench() as bench:
            await bench.put("a", contents=["same"])
            await bench.put("a", contents=["same"], scope=bench.other)
            mine, theirs = await bench.see("a"), await bench.see("a", scope=bench.other)
            assert mine["a"].blob_id != theirs["a"].blob_id

    @aio
    async def test_a_less_durable_copy_is_replaced_for_all_its_entries(self) -> None:
        async with self.bench() as bench:
            weak = await bench.put("a", contents=["same"], durability="staged")
            strong = await bench.put("b", contents=["same"], durability="nvme")
            found = await bench.see("a", "b", node=AFTER_RESTART)
            assert found["a"].blob_id == found["b"].blob_id == strong.blobs["b"]
            assert (await bench.chunks())[weak.blobs["a"]] == "deleting"
            assert await bench.sweep() == 1
            assert (await bench.usage()).objects == 1

    @aio
    async def test_a_stronger_copy_extends_the_life_of_its_entry(self) -> None:
        async with self.bench() as bench:
            await bench.put("a", durability="staged")
            bench.now = NOW + TTL - 1
            await bench.put("a", durability="nvme")
            bench.now = NOW + TTL + 5
            assert set(await bench.see("a")) == {"a"}, "the PUT lives as long as it was told"
            bench.now = NOW + 2 * TTL - 1
            assert await bench.see("a") == {}

    @aio
    async def test_a_stronger_copy_serves_an_entry_of_an_older_epoch(self) -> None:
        async with self.bench() as bench:
            old = await bench.put("a", contents=["same"], durability="staged", epoch=1)
            await set_namespace(bench, epoch=2)
            new = await bench.put("a", contents=["same"], durability="nvme", epoch=2)
            found = await bench.see("a")
            assert (found["a"].blob_id, found["a"].epoch) == (new.blobs["a"], 2)
            assert new.committed is not None
            assert new.committed.fresh == frozenset(), "its entry is older than its bytes"
            assert (await bench.chunks())[old.blobs["a"]] == "deleting"

    @aio
    async def test_of_two_writers_of_a_key_the_first_wins(self) -> None:
        async with self.bench() as bench:
            slow = bench.batch(["a", "b"])
            await bench.catalog.reserve(slow, b"s" * 16, NOW + 1000, NOW)
            fast = await bench.put("a", "b", contents=["mine", "same"])
            chunks = [bench.new_chunk(at, text, written=frozenset({"nvme"})) for at, text in enumerate(("x", "same"))]
            committed = await bench.catalog.commit(slow, b"s" * 16, chunks, NOW)
            assert (committed.conflict, committed.have, committed.stored) == ({0}, {1}, frozenset())
            assert set(committed.discarded) == {one.blob_id for one in chunks}
            assert (await bench.see("a"))["a"].blob_id == fast.blobs["a"]
            assert (await bench.usage()).objects == 2

    # Statements

    @aio
    async def test_R51_statements_grow_with_batches_and_not_with_keys(self) -> None:
        async with self.bench() as bench:
            sent = {count: await self.statements_for(bench, count) for count in (1, 999, 4096)}
            assert sent[1] == sent[999] == sent[4096], sent
            assert max(sent[1].values()) <= 14, sent
            await bench.check()

    async def statements_for(self, bench: Bench, count: int) -> dict[str, int]:
        """How many statements each step of the life of a batch of `count` keys takes."""
        catalog = bench.backend.catalog(HERE)
        await bench.backend.gather_statistics()
        keys = [f"{count}/{index}" for index in range(count)]
        names = [name(key) for key in keys]
        batch = bench.batch(keys, label_macs=(name("x"), name("y")))
        chunks = [bench.new_chunk(at, key, written=frozenset({"nvme"})) for at, key in enumerate(keys)]
        blobs = [one.blob_id for one in chunks]

        def settled(ended: Endings) -> Awaitable[Any]:
            return catalog.settle_writes(bench.scope, ended, None, NOW)

        steps: dict[str, Callable[[], Awaitable[Any]]] = {
            "reserve": lambda: catalog.reserve(batch, b"r" * 16, NOW + 1000, NOW),
            "commit": lambda: catalog.commit(batch, b"r" * 16, chunks, NOW),
            "have": lambda: catalog.reserve(batch, b"s" * 16, NOW + 1000, NOW),
            "lookup": lambda: catalog.lookup(bench.scope, [1], names, NOW),
            "extend": lambda: catalog.extend(bench.scope, 1, names, None, NOW),
            "hits": lambda: catalog.record_hits(bench.scope, [(1, key, 1, NOW) for key in names]),
            "claim": lambda: catalog.claim_due(bench.scope, "s3", NOW + 1000, NOW, count),
            "postpone": lambda: settled(Endings(failed=[(one, NOW) for one in due])),
            "claim again": lambda: catalog.claim_due(bench.scope, "s3", NOW + 1000, NOW, count),
            "finish": lambda: settled(Endings(done=due)),
            "evict": lambda: catalog.evict_nvme(bench.scope, blobs, NOW),
            "doomed": lambda: catalog.doomed(bench.scope, "nvme", NOW, count),
            "purge": lambda: catalog.purge(
                bench.scope, [DoomedPlacement(blob, "nvme", blob.hex()) for blob in blobs], count
            ),
            "promote": lambda: catalog.promote(bench.scope, blobs, NOW),
            "claim to drop": lambda: catalog.claim_due(bench.scope, "nvme", NOW + 1000, NOW, count),
            "drop": lambda: settled(Endings(lost=due)),
            "delete": lambda: catalog.delete_keys(bench.scope, 1, names, NOW),
        }
        sent: dict[str, int] = {}
        due: list[DueWrite] = []
        for step, call in steps.items():
            with counted_statements() as seen:
                answer = await call()
            sent[step] = len(seen)
            if step == "commit":
                await bench.backend.gather_statistics()  # for the rows that there are now, not for an empty catalog
            if step.startswith("claim"):
                due = answer
                assert len(due) == count, step
            elif step in ("lookup", "doomed", "promote"):
                assert len(answer) == count, step
        assert answer[0] == count
        return sent

    @aio
    async def test_R51_a_match_of_64_formats_with_4096_keys_each_gets_its_answer(self) -> None:
        async with self.bench() as bench:
            await bench.put("a")
            keys = [name(f"k{index}") for index in range(64 * 4096 - 1)] + [name("a")]
            with counted_statements() as seen:
                found = await bench.backend.catalog(HERE).lookup(bench.scope, list(range(1, 65)), keys, NOW)
            assert set(found) == {name("a")}
            assert len(seen) < 10

    @aio
    async def test_the_order_of_a_chain_is_kept(self) -> None:
        async with self.bench() as bench:
            await bench.put("a", "b", "c", depth=5)
            rows = await bench.rows(
                entry.select().where(*owned(entry, bench.scope)).order_by(entry.c.depth).with_only_columns(
                    entry.c.entry_key, entry.c.parent, entry.c.depth
                )
            )  # fmt: skip
            assert [tuple(row) for row in rows] == [
                (name("a"), None, 5), (name("b"), name("a"), 6), (name("c"), name("b"), 7),
            ]  # fmt: skip

    @aio
    async def test_a_placement_is_made_for_every_tier(self) -> None:
        async with self.bench() as bench:
            put = await bench.put("a", durability="s3")
            states = await bench.states()
            assert states == {(put.blobs["a"], "s3", ""): "ok", (put.blobs["a"], "nvme", "node-a"): "due"}
            rows = await bench.rows(placement.select().where(*owned(placement, bench.scope)))
            assert {row.length for row in rows} == {SEALED}
