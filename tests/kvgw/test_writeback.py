"""Write-back under pressure: rates, back-pressure, tiers that hang or fail, and PUTs that come first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replace_fields

from kvgw.errors import Code, Outage
from kvgw.maintenance import writeback
from kvgw.maintenance.crew import Crew
from kvgw.maintenance.pacing import Bucket, Sparing, Turns
from kvgw.maintenance.writeback import (
    CONCURRENT,
    GROUP,
    SMALL_BYTES,
    STAND_BACK_SECONDS,
    STAND_BACK_STEP_SECONDS,
    WriteBack,
)
from kvgw.model import Durability, NamespaceCreateRequest, PutOutcome, StatusRequest
from kvgw.settings import Settings, WriteBackSettings
from storage.errors import TierUnavailable
from tenancy.outbox import Waiting
from tenancy.sealing import sealed_length
from tests.kvgw.maintenance_bench import CHUNK, FlakyTier, Works, settings, works
from tests.support.aio import aio
from tests.support.gateways import format_of, keys_of, payloads_of, take_up_backlog, until
from tests.support.manual_clock import ManualClock

STORED = PutOutcome.STORED
STAGED, NVME, S3 = Durability.STAGED, Durability.NVME, Durability.S3
SEALED = sealed_length(CHUNK)


class SlowTier(FlakyTier):
    """A tier whose writes wait for `flowing`, as behind a network that drops packets; it counts those at work."""

    def __init__(self, label: str = "s3") -> None:
        super().__init__()
        self.label = label
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.at_work = 0
        self.most_at_work = 0

    async def put(self, name: str, sealed: memoryview) -> None:
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        try:
            await self.flowing.wait()
            await super().put(name, sealed)
        finally:
            self.at_work -= 1


def limited(**limits: Any) -> Settings:
    return replace_fields(settings(durability="staged"), writeback=WriteBackSettings(**limits))


def counted(one: Works, name: str, **labels: str) -> float:
    return one.rooms.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def at_work(one: Works) -> AsyncIterator[None]:
    """The crew's own loops, on the test's clock."""
    running = asyncio.create_task(one.crew.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until_moved(one: Works, reached: Any, step_s: float = 0.1) -> None:
    """Move the clock until `reached()`; each step lets the loops do what is theirs."""

    def moved() -> bool:
        one.clock.advance(step_s)
        one.rooms.fence.heard(one.clock.monotonic())  # the clock may be faster here than a heartbeat is written down
        return bool(reached())

    await until(moved)


# Rates


@aio
async def test_write_back_keeps_to_its_rate(tmp_path: Path) -> None:
    s3 = FlakyTier()
    async with works(tmp_path, s3=s3) as one:
        await one.put(12)
        rate = 2 * SEALED
        one.crew.write_back = WriteBack(one.rooms, {"s3": rate})
        draining = asyncio.create_task(one.crew.drain_everywhere())
        written = []
        for second in range(6):
            await until(lambda second=second: len(s3.names) >= 2 * (second + 1))
            await until(lambda: bool(one.clock._sleepers))
            written.append(len(s3.names))
            one.clock.advance(0.999)
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(s3.names) == written[-1], "not before its time"
            one.clock.advance(0.001)
        await draining
        assert written == [2, 4, 6, 8, 10, 12]


@aio
async def test_a_blob_larger_than_a_second_of_its_rate_is_written_and_paid_for() -> None:
    clock = ManualClock()
    bucket = Bucket(100, clock)
    await bucket.ready()
    bucket.spend(250)
    owed = asyncio.create_task(bucket.ready())
    await asyncio.sleep(0)
    for step, done in ((2.4, False), (0.1, True)):
        clock.advance(step)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert owed.done() is done
    clock.advance(1000)
    bucket.spend(100)
    assert bucket._even_at == clock.monotonic() + 1, "what was not used does not add up"
    unlimited = Bucket(0, clock)
    unlimited.spend(2**50)
    await unlimited.ready()


# Tiers that hang


@aio
async def test_NVMe_does_not_wait_for_an_S3_that_hangs(tmp_path: Path) -> None:
    s3 = SlowTier()
    async with works(tmp_path, chosen=settings(durability="staged"), s3=s3) as one, at_work(one):
        s3.flowing.clear()
        for count in (1, 2, 3):
            await one.put(2, f"round-{count}", durability=STAGED)
            await until_moved(one, lambda count=count: len(one.blob_files()) == 2 * count)
            await until(lambda: s3.at_work > 0)
        assert s3.names == set(), "law 8: staged promises nothing, and what can be done is"
        s3.flowing.set()
        await until_moved(one, lambda: len(s3.names) == 6)


@aio
async def test_a_namespace_with_much_to_write_does_not_hold_up_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writeback, "BATCH", 2)
    s3 = FlakyTier()
    async with works(tmp_path, s3=s3) as one:
        owner = one.gateway.authenticator.owner()
        await one.gateway.gateway.answer(owner, NamespaceCreateRequest("other"))
        other = await one.rooms.catalog.namespace(owner.tenant, "other")
        await one.put(6)
        one.client._options = replace(one.client._options, namespace="other")
        registered = await one.client.register(format_of(CHUNK))
        await one.client.put(registered, keys_of(6), payloads_of(registered, 6))
        await one.crew.drain_everywhere()
        assert len(s3.puts) == 12
        first = {name.split("/")[1] for name in s3.puts[:4]}
        assert first == {str(scope.namespace) for scope in (one.scope, other.scope)}, "law 6: each has its turn"


# Back-pressure


@aio
async def test_an_outbox_too_old_refuses_what_is_only_staged_and_recovers_by_itself(tmp_path: Path) -> None:
    s3 = FlakyTier()
    async with works(tmp_path, chosen=limited(outbox_seconds=60), s3=s3) as one:
        s3.failure = TierUnavailable("away")
        assert await one.put(3) == [STORED] * 3
        for _ in range(6):
            await one.crew.drain_everywhere()
            await one.wait(10.0)
        await one.crew.drain_everywhere()
        assert one.rooms.outbox.behind() is None, "60 s are not more than 60 s"
        await one.wait(1.0)
        await one.crew.drain_everywhere()
        assert counted(one, "kvgw_outbox_seconds", tier="s3") == 61, "tried again and again, it is no younger"
        for durability in (STAGED, None):
            with pytest.raises(Outage, match=r"s3 tier is behind.*waited 61 s.*writeback\.outbox_seconds = 60") as busy:
                await one.client.put(
                    one.registered, [b"new"], payloads_of(one.registered, 1, 9),
                    durability=durability, deadline_s=1.0, on_error="raise",
                )  # fmt: skip
            assert (busy.value.code, busy.value.retryable) == (Code.BUSY, True)
        assert await one.put(1, "durable", durability=NVME) == [STORED], "written through: it needs no write-back"
        assert await one.hits(3) == [0, 1, 2], "a read never waits"
        assert counted(one, "kvgw_held_puts_total", tier="s3", outcome="refused") == 2
        status: Any = await one.gateway.gateway.answer(one.gateway.authenticator.owner(), StatusRequest())
        assert any("the s3 tier is behind" in note for note in status.notes)

        waiting = asyncio.create_task(one.put(2, "later", durability=STAGED))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert not one.rooms.outbox.foreground, "who waits here does not keep write-back from working"
        s3.failure = None
        await one.wait(90.0)
        await one.crew.drain_everywhere()
        assert await waiting == [STORED] * 2
        assert counted(one, "kvgw_held_puts_total", tier="s3", outcome="admitted") == 1
        status = await one.gateway.gateway.answer(one.gateway.authenticator.owner(), StatusRequest())
        assert status.notes == []
        await one.check()


@aio
async def test_an_outbox_too_large_refuses_what_is_only_staged(tmp_path: Path) -> None:
    s3 = FlakyTier()
    async with works(tmp_path, chosen=limited(outbox_bytes=3 * SEALED), s3=s3) as one:
        s3.failure = TierUnavailable("away")
        assert await one.put(3) == [STORED] * 3
        await take_up_backlog(one.crew)
        assert await one.put(1, "fits") == [STORED], "three are not more than three"
        await take_up_backlog(one.crew)
        with pytest.raises(Outage, match=rf"{4 * SEALED} bytes wait, over writeback\.outbox_bytes = {3 * SEALED}"):
            await one.client.put(
                one.registered, [b"new"], payloads_of(one.registered, 1, 9), deadline_s=1.0, on_error="raise"
            )
        s3.failure = None
        await one.wait(90.0)
        await one.crew.drain_everywhere()
        assert await one.put(1, "after") == [STORED]


@aio
async def test_a_client_that_goes_while_it_waits_leaves_nothing(tmp_path: Path) -> None:
    s3 = FlakyTier()
    async with works(tmp_path, chosen=limited(outbox_bytes=1), s3=s3) as one:
        s3.failure = TierUnavailable("away")
        await one.put(1)
        await take_up_backlog(one.crew)
        waiting = asyncio.create_task(one.put(1, "later"))
        for _ in range(20):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not one.rooms.outbox.foreground
        assert one.rooms.staging.statistics().draft_bytes == 0
        await one.check()


@pytest.mark.parametrize("how", ["fails", "hangs"])
@aio
async def test_an_S3_that_is_away_fills_the_disk_and_not_staging(tmp_path: Path, how: str) -> None:
    s3 = SlowTier()
    async with works(tmp_path, s3=s3) as one, at_work(one):
        if how == "fails":
            s3.failure = TierUnavailable("away")
        else:
            s3.flowing.clear()
        count = 2 * one.gateway.settings.staging.bytes // CHUNK
        per = 16
        for start in range(0, count, per):
            putting = asyncio.create_task(one.put(per, f"k{start}"))
            await until_moved(one, putting.done)
            assert await putting == [STORED] * per, "law 8: nvme durability goes on as far as the disk has room"
        for start in range(0, count, per):
            assert await one.hits(per, f"k{start}") == list(range(per))
        s3.failure = None
        s3.flowing.set()
        await until_moved(one, lambda: len(s3.names) == count, 1.0)
        await one.check()


@aio
async def test_PUTs_that_together_exceed_staging_do_not_wait_for_each_other(tmp_path: Path) -> None:
    s3 = FlakyTier()
    s3.failure = TierUnavailable("away")
    async with works(tmp_path, s3=s3) as one:
        per = one.gateway.settings.staging.bytes // CHUNK // 3
        puts = [asyncio.create_task(one.put(per, f"p{number}")) for number in range(4)]
        assert await asyncio.gather(*puts) == [[STORED] * per] * 4, "what is on the disk need not stay until the commit"
        for number in range(4):
            assert await one.hits(per, f"p{number}") == list(range(per))
        await one.check()


@aio
async def test_dirty_residents_never_keep_reads_from_staging(tmp_path: Path) -> None:
    s3 = FlakyTier()
    async with works(tmp_path, chosen=settings(durability="staged"), s3=s3) as one:
        disk = SlowTier("nvme")
        rooms = replace(one.rooms, tiers={"nvme": disk, "s3": s3})
        assert await one.put(20, "before", durability=NVME) == [STORED] * 20
        await one.crew.drain_everywhere()
        one.forget_staging()
        one.crew = Crew(rooms, one.nvme, one.crew._pace)
        disk.failure = s3.failure = TierUnavailable("away")
        with pytest.raises(Outage, match=r"a draft") as refusal:
            for number in range(1000):
                await one.client.put(
                    one.registered, keys_of(8, f"n{number}"), payloads_of(one.registered, 8, number),
                    durability=STAGED, deadline_s=2.0, on_error="raise",
                )  # fmt: skip
                await take_up_backlog(one.crew)
        assert refusal.value.code is Code.BUSY
        assert await one.hits(20, "before") == list(range(20))
        await one.check()


# PUTs come first


@aio
async def test_NVMe_is_written_one_at_a_time_while_a_PUT_is_at_work(tmp_path: Path) -> None:
    disk, s3 = SlowTier("nvme"), SlowTier()
    async with works(tmp_path, chosen=settings(durability="staged"), s3=s3, chunk=2 * SMALL_BYTES) as one:
        await one.put(12, durability=STAGED)
        rooms = replace(one.rooms, tiers={"nvme": disk, "s3": s3})
        write_back = WriteBack(rooms, {})
        s3.flowing.clear()
        putting = asyncio.create_task(one.put(1, "now", durability=S3))
        await until(lambda: s3.at_work == 1)
        disk.flowing.clear()
        write_back.want([one.scope], ["nvme"])
        draining = asyncio.create_task(write_back.drain("nvme"))
        await until(lambda: disk.at_work == 1)
        for _ in range(50):
            await asyncio.sleep(0)
        assert disk.most_at_work == 1, "the disk is the PUT's"
        s3.flowing.set()
        await putting
        disk.flowing.set()
        disk.flowing.clear()  # one write went through
        await until(lambda: disk.at_work == CONCURRENT)
        disk.flowing.set()
        await draining
        assert (len(disk.names), disk.most_at_work) == (13, CONCURRENT), "and write-back's when no PUT is there"


class PickyTier(SlowTier):
    """A disk that refuses one blob."""

    refused = ""

    async def put(self, name: str, sealed: memoryview) -> None:
        if name == self.refused:
            raise TierUnavailable("not this one")
        await super().put(name, sealed)


@aio
async def test_small_blobs_go_to_NVMe_in_groups_and_each_fails_for_itself(tmp_path: Path) -> None:
    """A read of the disk waits behind one group at most; what failed alone is written again."""
    disk = PickyTier("nvme")
    async with works(tmp_path, chosen=settings(durability="staged")) as one:
        await one.put(2 * GROUP + 3, durability=STAGED)
        names = one.rooms.staging.dirty_names()
        disk.refused = names[GROUP + 1]
        write_back = WriteBack(replace(one.rooms, tiers={"nvme": disk}), {})
        disk.flowing.clear()
        write_back.want([one.scope], ["nvme"])
        draining = asyncio.create_task(write_back.drain("nvme"))
        await until(lambda: disk.at_work == GROUP)
        for _ in range(50):
            await asyncio.sleep(0)
        assert disk.at_work == GROUP
        disk.flowing.set()
        await draining
        assert disk.most_at_work == GROUP
        assert disk.names == set(names) - {disk.refused}
        assert one.rooms.staging.dirty_names() == [disk.refused], "law 7: a write that is to be tried keeps its bytes"
        disk.refused = ""
        await one.wait(90.0)
        write_back.want([one.scope], ["nvme"])
        await write_back.drain("nvme")
        assert disk.names == set(names)
        assert one.rooms.staging.dirty_names() == []
        await one.check()


@pytest.mark.parametrize("how", ["waits its time", "the PUT ends", "staging fills", "the outbox is behind"])
@aio
async def test_write_back_stands_back_for_PUTs_no_longer_than_it_may(tmp_path: Path, how: str) -> None:
    s3 = SlowTier()
    async with works(tmp_path, chosen=limited(outbox_bytes=64 * SEALED), s3=s3) as one:
        await one.put(3, durability=STAGED)
        s3.flowing.clear()
        putting = asyncio.create_task(one.put(1, "now", durability=S3))
        await until(lambda: s3.at_work == 1)
        disk = SlowTier("nvme")
        write_back = WriteBack(replace(one.rooms, tiers={"nvme": disk, "s3": s3}), {})
        write_back.want([one.scope], ["nvme"])
        at_work = asyncio.create_task(write_back.round("nvme"))

        async def pass_by(seconds: float) -> None:
            for _ in range(10):
                await asyncio.sleep(0)
            one.clock.advance(seconds)
            for _ in range(10):
                await asyncio.sleep(0)

        await pass_by(STAND_BACK_SECONDS - STAND_BACK_STEP_SECONDS)
        assert one.clock._sleepers, "the PUT is at work, and there is time"
        assert not disk.names
        if how == "the PUT ends":
            s3.flowing.set()
            await putting
        elif how == "staging fills":
            await one.put(30, "more", durability=STAGED)
        elif how == "the outbox is behind":
            one.rooms.outbox.found(one.scope, {"nvme": Waiting(65, 65 * SEALED, one.rooms.time.now_ms())})
        if how != "waits its time":
            write_back._wanted_at["nvme"] = one.clock.monotonic()  # its own time is far away
        await pass_by(STAND_BACK_STEP_SECONDS)
        await at_work
        assert len(disk.names) >= 3
        s3.flowing.set()
        await putting
        await one.check()


@aio
async def test_who_drains_does_not_stand_back(tmp_path: Path) -> None:
    s3 = SlowTier()
    async with works(tmp_path, chosen=settings(durability="staged"), s3=s3) as one:
        await one.put(3, durability=STAGED)
        s3.flowing.clear()
        putting = asyncio.create_task(one.put(1, "now", durability=S3))
        await until(lambda: s3.at_work == 1)
        one.crew.write_back.want([one.scope], ["nvme"])
        await one.crew.write_back.drain("nvme")
        assert len(one.blob_files()) == 3
        s3.flowing.set()
        await putting


@aio
async def test_turns_come_in_order_and_a_cancelled_one_is_nobodys() -> None:
    turns = Turns(lambda: 1)
    order: list[int] = []

    async def take(number: int) -> None:
        async with turns.turn():
            order.append(number)
            await asyncio.sleep(0)

    async with turns.turn():
        tasks = [asyncio.create_task(take(number)) for number in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
    tasks[0].cancel()  # admitted, but it has not run since
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [2, 3]
    async with asyncio.timeout(1), turns.turn():
        pass


@aio
async def test_a_dear_look_is_taken_seldom() -> None:
    clock = ManualClock()
    sparing = Sparing(clock)
    assert sparing.due
    with sparing.looking():
        clock.advance(0.5)
    for step, due in ((9.0, False), (1.0, True)):
        clock.advance(step)
        assert sparing.due is due
