"""What ends without this gateway, and what a wrong clock or wrong bytes leave behind: all of it heals by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvgw.gateway.put import LEASE_MARGIN_MS
from kvgw.maintenance import erasing, writeback
from kvgw.maintenance.settling import EVERY_SECONDS
from kvgw.model import Durability, PutOutcome
from kvgw.model.values import DEADLINE_MS_MAX
from storage.errors import TierUnavailable
from storage.tier import parse_name
from tenancy.catalog import Catalog
from tenancy.errors import CatalogUnavailable
from tenancy.model import Node
from tenancy.processes import CLOCKS_MS
from tenancy.repair import REST_MS
from tenancy.timekeeping import FURTHEST_MS
from tests.kvgw.maintenance_bench import FlakyTier, Works, settings, works
from tests.support.aio import aio

STORED = PutOutcome.STORED
STAGED = Durability.STAGED
HOUR_MS = 3_600_000


def elsewhere(one: Works) -> Catalog:
    """The catalog as another gateway has it: what ends through it, this one is not told."""
    return Catalog(one.rooms.catalog._database, Node("elsewhere", "its-boot"))


async def look(one: Works) -> None:
    await one.wait(EVERY_SECONDS)
    await one.crew.settling.look([one.scope])


async def rows(one: Works, statement: str) -> list[tuple[object, ...]]:
    return await one.rooms.catalog._database.read(
        lambda connection: [tuple(row) for row in connection.exec_driver_sql(statement)]
    )


# What ends through another gateway


@pytest.mark.parametrize("purged", [False, True])
@aio
async def test_law_7_what_another_gateway_deletes_leaves_staging(tmp_path: Path, *, purged: bool) -> None:
    s3 = FlakyTier()
    s3.failure = TierUnavailable("away")
    async with works(tmp_path, chosen=settings(durability="staged"), s3=s3) as one:
        await one.put(4, durability=STAGED)
        names = one.rooms.staging.dirty_names()
        ((format_id,),) = await rows(one, "SELECT DISTINCT format_id FROM entry")
        keys = [key for (key,) in await rows(one, "SELECT entry_key FROM entry ORDER BY created_ms LIMIT 3")]
        now_ms = one.rooms.time.now_ms()
        other = elsewhere(one)
        await other.delete_keys(one.scope, format_id, keys, now_ms)
        if purged:
            await one.crew.sweep.collect(one.scope)
            assert (await rows(one, "SELECT count(*) FROM chunk")) == [(1,)]
        await look(one)
        assert one.rooms.staging.dirty_names() == names, "what has just come may be about to be made due"
        await look(one)
        assert len(one.rooms.staging.dirty_names()) == 1, "law 7: no slot outlives what it was for"
        assert len(one.rooms.staging.names()) == 1
        assert len(await one.hits(4)) == 1, "what is owed stays until it is written"
        s3.failure = None
        await one.wait(90.0)
        await one.crew.drain_everywhere()
        assert one.rooms.staging.dirty_names() == []
        await one.check()


@aio
async def test_law_7_what_expires_through_another_gateway_leaves_staging(tmp_path: Path) -> None:
    s3 = FlakyTier()
    s3.failure = TierUnavailable("away")
    async with works(tmp_path, chosen=settings(durability="staged"), s3=s3) as one:
        await one.put(3, durability=STAGED, ttl=60.0)
        await one.wait(61.0)
        assert (await elsewhere(one).expire(one.scope, one.rooms.time.now_ms(), 100))[0] == 3
        for _ in range(2):
            await look(one)
        assert one.rooms.staging.statistics().dirty_bytes == 0


@aio
async def test_what_another_gateway_has_written_may_be_evicted(tmp_path: Path) -> None:
    async with works(tmp_path, chosen=settings(durability="staged"), s3=FlakyTier()) as one:
        await one.put(2, durability=STAGED)
        await one.rooms.catalog._database.write(
            lambda connection: connection.exec_driver_sql("UPDATE placement SET state = 'ok'")
        )
        for _ in range(2):
            await look(one)
        assert one.rooms.staging.dirty_names() == []
        assert len(one.rooms.staging.names()) == 2, "it is live and good to read"


@aio
async def test_law_7_a_promotion_that_the_catalog_did_not_take_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = FlakyTier()
    async with works(tmp_path, s3=s3) as one:
        await one.put(1, durability=Durability.S3)
        await one.crew.drain_everywhere()
        blob = parse_name(one.rooms.staging.names()[0])[1]
        now_ms = one.rooms.time.now_ms()
        await one.rooms.catalog.evict_nvme(one.scope, [blob], now_ms)
        await one.crew.sweep.collect(one.scope)
        one.rooms.staging.drop(one.rooms.staging.names()[0])
        assert await one.hits(1) == [0]

        async def fails(*_: object) -> set[bytes]:
            raise CatalogUnavailable("away")

        monkeypatch.setattr(one.rooms.catalog, "promote", fails)
        with pytest.raises(CatalogUnavailable):
            await one.crew._hand_out()
        assert len(one.rooms.staging.dirty_names()) == 1
        for _ in range(2):
            await look(one)
        assert one.rooms.staging.dirty_names() == []


@aio
async def test_a_put_that_has_sealed_but_not_committed_keeps_what_it_sealed(tmp_path: Path) -> None:
    """However long it takes: its reservation says that it is at work; once that is over, its bytes may go."""
    async with works(tmp_path, chosen=settings(durability="staged"), s3=FlakyTier()) as one:
        await one.put(1, durability=STAGED)
        (name,) = one.rooms.staging.dirty_names()
        database = one.rooms.catalog._database
        await database.write(
            lambda connection: [
                connection.exec_driver_sql(f"DELETE FROM {table}")
                for table in ("entry_label", "entry", "placement", "chunk")
            ]
        )
        scope, boot = one.scope, one.rooms.catalog.node.boot
        values = (scope.tenant.hex, scope.namespace.hex)

        async def reserve(which: bytes) -> None:
            await database.write(
                lambda connection: connection.exec_driver_sql(
                    "INSERT INTO reservation VALUES (?, ?, ?, 1, 1, 0, ?, ?)", (*values, which, boot, 2**60)
                )
            )

        async def end(comparison: str, which: bytes) -> None:
            statement = f"DELETE FROM reservation WHERE reservation_id {comparison} ?"
            await database.write(lambda connection: connection.exec_driver_sql(statement, (which,)))

        mine = b"mine" * 4
        await reserve(mine)
        for number in range(4):  # others come and go meanwhile
            await look(one)
            await end("<>", mine)
            await reserve(bytes([number]) * 16)
        assert one.rooms.staging.dirty_names() == [name]
        await end("=", mine)
        await look(one)
        assert one.rooms.staging.names() == []


@aio
async def test_what_a_namespace_that_is_gone_has_left_leaves_staging(tmp_path: Path) -> None:
    async with works(tmp_path, chosen=settings(durability="staged"), s3=FlakyTier()) as one:
        await one.put(2, durability=STAGED)
        for scopes in ([one.scope], []):
            await one.wait(EVERY_SECONDS)
            await one.crew.settling.look(scopes)
        assert one.rooms.staging.names() == []


# Clocks


def test_R59_whatever_is_written_down_is_nearer_than_what_counts_as_wrong() -> None:
    """Law 9: each back-off and lease is bounded, so that a time beyond it says that a clock was wrong."""
    longest = (
        writeback.LEASE_MS,
        int(1.25 * writeback.RETRY_LAST_MS),
        erasing.RETRY_LAST_MS,
        DEADLINE_MS_MAX + LEASE_MARGIN_MS,
    )
    assert max(longest) + CLOCKS_MS < FURTHEST_MS < HOUR_MS / 2


@aio
async def test_R59_a_clock_set_back_by_an_hour_stops_no_job(tmp_path: Path) -> None:
    s3 = FlakyTier()
    s3.failure = TierUnavailable("away")
    async with works(tmp_path, s3=s3) as one:
        assert await one.put(2) == [STORED] * 2
        assert await one.put(1, "short", ttl=30.0) == [STORED]
        await one.crew.drain_everywhere()
        await one.crew.sweep_everywhere()
        one.clock._start_ms -= HOUR_MS
        s3.failure = None
        for _ in range(30):
            await one.wait(5.0)
            await one.crew.drain_everywhere()
            await one.crew.sweep_everywhere()
        assert len(s3.names) == 2, "written back within minutes, not after an hour"
        assert await one.hits(1, "short") == [], "and what had half a minute to live is over"
        assert await rows(one, "SELECT count(*) FROM chunk WHERE state <> 'live'") == [(0,)]
        assert await one.hits(2) == [0, 1]


# Wrong bytes


@pytest.mark.parametrize("how", ["rotten", "gone"])
@aio
async def test_law_2_what_is_wrong_in_S3_is_written_anew_from_the_disk(tmp_path: Path, how: str) -> None:
    s3 = FlakyTier()
    async with works(tmp_path, s3=s3) as one:
        await one.put(2)
        await one.crew.drain_everywhere()
        blob, _ = sorted(s3.names)
        whole = s3._blobs[blob].sealed
        if how == "gone":
            del s3._blobs[blob]
        else:
            s3._blobs[blob] = replace(s3._blobs[blob], sealed=bytes([*whole[:-1], whole[-1] ^ 1]))
        await read_from_s3_only(one)
        states = "SELECT state, count(*) FROM placement WHERE tier = 's3' GROUP BY state ORDER BY state"
        assert await rows(one, states) == [("ok", 1), ("quarantined", 1)]
        await one.crew.sweep_everywhere()
        await one.crew.drain_everywhere()
        assert await rows(one, states) == [("ok", 1), ("quarantined", 1)], "it rests first"
        await one.wait(REST_MS / 1000)
        await one.crew.sweep_everywhere()
        await one.crew.drain_everywhere()
        assert await rows(one, states) == [("ok", 2)], "law 2: the good copy is not the only one for ever"
        assert s3._blobs[blob].sealed == whole, "the same bytes under the same name"
        await one.check()


async def read_from_s3_only(one: Works) -> None:
    """Read all as a gateway does whose disk has nothing: it finds what S3 has of it."""
    found = one.rooms.catalog.lookup

    async def without_disk(*arguments: object) -> dict[bytes, object]:
        answer = await found(*arguments)  # type: ignore[arg-type]
        return {key: chunk._replace(on_nvme=False, at_home=False) for key, chunk in answer.items()}

    for name in one.rooms.staging.names():
        one.rooms.staging.drop(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one.rooms.catalog, "lookup", without_disk)
        assert len(await one.hits(2)) == 1
    for name in one.rooms.staging.names():
        one.rooms.staging.drop(name)
