"""The suite that the catalog passes on every database: what a node has to write, and nodes that never return."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import literal

from tenancy.errors import RegistryRefused
from tenancy.outbox import Waiting
from tenancy.processes import PROCESS_LEASE_MS
from tenancy.schema import owned, placement, tombstone
from tests.support.aio import aio
from tests.tenancy.catalog_bench import AFTER_RESTART, ELSEWHERE, HERE, NOW, SEALED, Bench, BenchSuite, name

GONE_MS = NOW + PROCESS_LEASE_MS
"""When a process that was heard at `NOW` is given up."""


async def introduce(bench: Bench, **heard_ms: int) -> None:
    """Let both nodes announce themselves; then `HERE` is heard again, so that it is alive."""
    await bench.on(ELSEWHERE).announce("1", heard_ms.get("elsewhere", NOW), 0)
    await bench.on(HERE).announce("1", NOW, 0)
    bench.now = GONE_MS
    await bench.catalog.heartbeat(bench.now)


async def forget(bench: Bench, *, gone: str = ELSEWHERE.node, limit: int = 100) -> tuple[int, int, int]:
    """Both namespaces, to the end: placements, entries, chunks."""
    total = (0, 0, 0)
    for scope in (bench.scope, bench.other):
        more = True
        while more:
            piece = await bench.catalog.forget_placements(scope, gone, bench.now, limit)
            done = (piece.placements, piece.entries, piece.chunks)
            total = tuple(map(sum, zip(total, done, strict=True)))  # type: ignore[assignment]
            more = piece.placements > 0
    return total


class CatalogNodes(BenchSuite):
    """The outbox of one node, and forgetting a node."""

    # What a node has to write

    @aio
    async def test_a_nodes_outbox_is_its_own_and_trying_makes_nothing_younger(self) -> None:
        async with self.bench() as bench:
            await bench.put("a", "b")
            bench.now += 1000
            await bench.put("c", durability="staged")
            await bench.put("x", node=ELSEWHERE, durability="staged")
            expected = {"s3": Waiting(3, 3 * SEALED, NOW), "nvme": Waiting(1, SEALED, NOW + 1000)}
            assert await bench.catalog.own_outbox(bench.scope) == expected
            assert await bench.catalog.own_outbox(bench.other) == {}
            bench.now += 10_000
            due = await bench.claim("s3")
            await bench.end(failed=[(one, bench.now) for one in due])
            assert await bench.catalog.own_outbox(bench.scope) == expected, "tried and failed: as old as before"
            await bench.end(done=await bench.claim("s3"))
            assert set(await bench.catalog.own_outbox(bench.scope)) == {"nvme"}

    @aio
    async def test_a_claim_stops_at_its_bytes_but_takes_one(self) -> None:
        async with self.bench() as bench:
            await bench.put("a", "b", "c", "d")

            async def claimed(bytes_max: int) -> int:
                due = await bench.catalog.claim_due(bench.scope, "s3", bench.now + 1, bench.now, 10, bytes_max)
                await bench.end(failed=[(one, bench.now) for one in due])
                return len(due)

            assert [await claimed(bytes_max) for bytes_max in (1, SEALED, 3 * SEALED - 1, 3 * SEALED, 2**40)] == [
                1, 1, 2, 3, 4,
            ]  # fmt: skip

    @aio
    async def test_a_process_takes_over_at_once_what_its_node_was_writing_to_its_own_disk(self) -> None:
        """The lease is for others; of those that share a folder only one can be alive."""
        async with self.bench() as bench:
            blob = (await bench.put("a", durability="staged")).blobs["a"]
            await bench.end(done=await bench.claim("s3"))
            assert [one.blob_id for one in await bench.claim("nvme")] == [blob]
            assert await bench.claim("nvme") == [], "it is writing it"
            assert [one.blob_id for one in await bench.claim("nvme", node=AFTER_RESTART)] == [blob]
            assert await bench.claim("nvme", node=AFTER_RESTART) == []

    @aio
    async def test_on_disk_means_for_good_and_here(self) -> None:
        async with self.bench() as bench:
            here, staged = await bench.put("a"), await bench.put("b", durability="staged")
            there = await bench.put("c", node=ELSEWHERE)
            blobs = [here.blobs["a"], staged.blobs["b"], there.blobs["c"]]
            assert await bench.catalog.on_disk(bench.scope, blobs) == {here.blobs["a"]}

    # Equal content on two nodes

    @aio
    async def test_law_8_what_a_disk_has_is_not_given_up_for_another_nodes_staged_copy(self) -> None:
        async with self.bench() as bench:
            await introduce(bench)
            promised = await bench.put("a", contents=["same"], durability="nvme")
            for key in ("b", "a"):
                await bench.put(key, contents=["same"], node=ELSEWHERE, durability="staged")
            assert (await bench.chunks())[promised.blobs["a"]] == "live"
            await bench.catalog.lose_unplaced(bench.scope, bench.now)
            assert (await bench.see("a"))["a"].blob_id == promised.blobs["a"], "the other node may lose what it had"
            assert (await bench.usage()).objects == 1

    @aio
    async def test_another_node_that_stores_it_for_good_has_it_from_then_on(self) -> None:
        async with self.bench() as bench:
            await introduce(bench)
            await bench.put("a", contents=["same"], durability="nvme")
            other = await bench.put("b", contents=["same"], node=ELSEWHERE, durability="nvme")
            assert (await bench.see("b", node=ELSEWHERE))["b"].blob_id == other.blobs["b"]

    @aio
    async def test_a_gone_nodes_content_can_be_stored_anew_when_it_is_forgotten(self) -> None:
        async with self.bench() as bench:
            await introduce(bench)
            await bench.put("a", contents=["same"], node=ELSEWHERE, durability="nvme")
            await forget(bench)
            anew = await bench.put("b", contents=["same"], durability="staged")
            assert (await bench.see("b"))["b"].blob_id == anew.blobs["b"]

    # Forgetting

    @aio
    async def test_what_only_a_gone_node_had_ends_and_is_given_back(self) -> None:
        async with self.bench() as bench:
            await introduce(bench)
            put = await bench.put("a", "b", node=ELSEWHERE)
            await bench.put("staged", node=ELSEWHERE, durability="staged")
            await bench.put("o", node=ELSEWHERE, scope=bench.other)
            mine = await bench.put("mine")
            assert await forget(bench) == (4, 4, 4), "a staged chunk was due on its disk too"
            assert set(await bench.see("a", "b", "staged", "mine")) == {"mine"}
            usage = await bench.usage()
            assert (usage.stored_bytes, usage.objects, usage.s3_bytes) == (SEALED, 1, SEALED)
            assert {blob for blob, *_ in await bench.states()} == {mine.blobs["mine"]}
            assert put.blobs["a"] not in await bench.chunks()
            ended = await bench.rows(tombstone.select().where(*owned(tombstone, bench.scope)))
            assert {row.entry_key: row.reason for row in ended} == dict.fromkeys(
                map(name, ("a", "b", "staged")), "lost"
            )
            assert await bench.catalog.forget_process(ELSEWHERE.node, bench.now)
            assert [one.node for one in await bench.catalog.processes()] == [HERE.node]
            assert not await bench.catalog.forget_process(ELSEWHERE.node, bench.now), "nothing is left to forget"

    @aio
    async def test_what_another_place_has_too_stays(self) -> None:
        async with self.bench() as bench:
            await introduce(bench)
            both = await bench.put("both", node=ELSEWHERE, durability="s3")
            await bench.catalog.promote(bench.scope, [both.blobs["both"]], bench.now)
            home = await bench.put("home", durability="staged")
            await bench.run(
                placement.insert().from_select(
                    [column.name for column in placement.c],
                    placement.select()
                    .where(*owned(placement, bench.scope), placement.c.blob_id == home.blobs["home"])
                    .where(placement.c.tier == "nvme")
                    .with_only_columns(*(_elsewhere(column) for column in placement.c)),
                )
            )
            assert await forget(bench) == (2, 0, 0)
            assert set(await bench.see("both", "home")) == {"both", "home"}, "in S3; in a living process's staging"
            assert (await bench.usage()).objects == 2
            assert all(node != ELSEWHERE.node for _, _, node in await bench.states())

    @aio
    async def test_a_dying_chunk_whose_last_bytes_were_there_is_given_back(self) -> None:
        async with self.bench() as bench:
            await introduce(bench)
            await bench.put("a", node=ELSEWHERE)
            await bench.delete("a")
            assert await bench.sweep() == 0, "nobody can delete from that disk"
            assert (await bench.usage()).objects == 1
            assert await forget(bench) == (1, 0, 1)
            assert (await bench.usage()).objects == 0

    @aio
    async def test_it_goes_piece_by_piece(self) -> None:
        async with self.bench() as bench:
            await introduce(bench)
            await bench.put(*(f"k{number}" for number in range(7)), node=ELSEWHERE)
            piece = await bench.catalog.forget_placements(bench.scope, ELSEWHERE.node, bench.now, 3)
            assert (piece.placements, piece.entries, len(piece.unneeded)) == (3, 3, 3)
            assert await forget(bench, limit=3) == (4, 4, 4)
            assert (await bench.usage()).objects == 0

    @aio
    async def test_a_living_node_is_not_forgotten(self) -> None:
        async with self.bench() as bench:
            await introduce(bench)
            await bench.put("a", node=ELSEWHERE)
            await bench.on(ELSEWHERE).heartbeat(bench.now)
            for asked in ("forget_placements", "forget_process"):
                with pytest.raises(RegistryRefused, match=r"'node-b' is alive \(boot boot-2, last heard 0\.0 s ago"):
                    await _asked(bench, asked, ELSEWHERE.node)
            bench.now += PROCESS_LEASE_MS - 1
            with pytest.raises(RegistryRefused, match="counts as gone 15 s later"):
                await _asked(bench, "forget_placements", ELSEWHERE.node)
            assert len(await bench.states()) == 2
            bench.now += 1
            assert await forget(bench) == (1, 1, 1)

    @aio
    async def test_one_that_left_in_order_may_be_forgotten_at_once_and_one_that_came_back_not(self) -> None:
        async with self.bench() as bench:
            await introduce(bench)
            await bench.put("a", node=ELSEWHERE)
            await bench.on(ELSEWHERE).announce("1", bench.now, 0)
            with pytest.raises(RegistryRefused, match="alive"):
                await _asked(bench, "forget_placements", ELSEWHERE.node)
            await bench.on(ELSEWHERE).leave(bench.now)
            assert await forget(bench) == (1, 1, 1)

    @aio
    async def test_a_gateway_never_forgets_its_own_node(self) -> None:
        async with self.bench() as bench:
            await bench.put("a")
            for node in (HERE, AFTER_RESTART):
                with pytest.raises(RegistryRefused, match="'node-a' is this gateway's own"):
                    await bench.on(node).forget_placements(bench.scope, "node-a", bench.now, 10)
            assert set(await bench.see("a")) == {"a"}


def _elsewhere(column: Any) -> Any:
    return literal(ELSEWHERE.node) if column.name == "node" else column


async def _asked(bench: Bench, asked: str, node: str) -> None:
    if asked == "forget_process":
        await bench.catalog.forget_process(node, bench.now)
    else:
        await bench.catalog.forget_placements(bench.scope, node, bench.now, 10)
