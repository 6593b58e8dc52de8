"""Residents of the staging pool: single flight and its hand-over, drops, what is dirty, and readers under churn."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Awaitable, Callable

import pytest

from storage.errors import BlobDamaged, BlobMissing, StagingBusy, TierUnavailable
from storage.host_memory import PAGE
from tests.support.aio import run
from tests.support.staging import LONG, A, B, C, Fill, assert_clean, cancel, make, read, store, turns


def test_a_blob_is_filled_once_and_then_resident() -> None:
    async def main() -> None:
        staging, fill = make().staging, Fill()
        assert await read(staging, A, "a", fill) == (b"sealed", False)
        assert await read(staging, A, "a", fill) == (b"sealed", True)
        assert fill.calls == 1
        statistics = staging.statistics()
        assert (statistics.hits, statistics.fills, statistics.resident_blobs) == (1, 1, 1)
        assert_clean(staging)

    run(main())


def test_readers_of_one_blob_share_one_fill() -> None:
    async def main() -> None:
        staging, fill = make().staging, Fill(waits=True)
        readers = [asyncio.create_task(read(staging, tenant, "a", fill)) for tenant in (A, A, B, C)]
        await fill.began.wait()
        await turns()
        assert not staging.holds("a"), "not before it is whole"
        fill.may_end.set()
        assert await asyncio.gather(*readers) == [(b"sealed", False)] * 4
        assert fill.calls == 1
        assert staging.holds("a")
        assert staging.statistics().joins == 3
        assert_clean(staging)

    run(main())


@pytest.mark.parametrize("error", [BlobMissing("no such blob"), TierUnavailable("the tier is down")])
def test_an_answer_about_the_blob_is_everybodys(error: BlobMissing | TierUnavailable) -> None:
    async def main() -> None:
        staging, fill = make().staging, Fill(error=error, waits=True)
        readers = [asyncio.create_task(read(staging, A, "a", fill)) for _ in range(3)]
        await turns()
        fill.may_end.set()
        outcomes = await asyncio.gather(*readers, return_exceptions=True)
        assert [(type(outcome), str(outcome)) for outcome in outcomes] == [(type(error), str(error))] * 3
        assert len({id(outcome) for outcome in outcomes}) == 3, "one exception raised thrice mixes up its tracebacks"
        assert fill.calls == 1
        assert not staging.holds("a")
        assert_clean(staging)
        assert await read(staging, A, "a", Fill()) == (b"sealed", False), "a failure is not remembered"

    run(main())


def test_a_failure_of_the_leader_alone_is_not_the_followers() -> None:
    async def main() -> None:
        staging, bad, good = make().staging, Fill(error=ZeroDivisionError("a bug"), waits=True), Fill()
        leader = asyncio.create_task(read(staging, A, "a", bad))
        await bad.began.wait()
        follower = asyncio.create_task(read(staging, A, "a", good))
        await turns()
        bad.may_end.set()
        with pytest.raises(ZeroDivisionError):
            await leader
        assert await follower == (b"sealed", False)
        assert_clean(staging)

    run(main())


def test_a_cancelled_leader_hands_over_to_the_next_that_still_waits() -> None:
    async def main() -> None:
        staging = make(resident_pages=1).staging
        fills = [Fill(waits=True) for _ in range(4)]
        readers: list[asyncio.Task[object]] = []
        for fill in fills:
            readers.append(asyncio.create_task(read(staging, A, "a", fill)))
            await turns()
        await cancel(readers[1])  # one that waits goes silently
        await cancel(readers[0])
        await fills[2].began.wait()
        await cancel(readers[2])
        await fills[3].began.wait()
        fills[3].may_end.set()
        assert await readers[3] == (b"sealed", False)
        assert [fill.calls for fill in fills] == [1, 0, 1, 1]
        assert_clean(staging)

    run(main())


def test_a_leader_by_inheritance_cancelled_before_it_begins_hands_over_too() -> None:
    async def main() -> None:
        staging = make(resident_pages=1).staging
        first, second, third = Fill(waits=True), Fill(), Fill()
        leader = asyncio.create_task(read(staging, A, "a", first))
        await first.began.wait()
        heir = asyncio.create_task(read(staging, A, "a", second))
        await turns()
        last = asyncio.create_task(read(staging, A, "a", third))
        await turns()
        leader.cancel()
        heir.cancel()
        await asyncio.gather(leader, heir, return_exceptions=True)
        assert await last == (b"sealed", False)
        assert (second.calls, third.calls) == (0, 1)
        assert_clean(staging)

    run(main())


def test_R19_a_cancelled_fill_keeps_its_slot_until_its_worker_has_finished() -> None:
    async def main() -> None:
        pieces = make(resident_pages=1)
        staging = pieces.staging
        worker_may_end, worker_wrote = threading.Event(), threading.Event()

        def work(view: memoryview) -> None:
            assert worker_may_end.wait(10)
            view[:6] = b"late!!"
            worker_wrote.set()

        async def fill(view: memoryview) -> None:  # as Workers.run: ends only when the thread has ended
            future = asyncio.get_running_loop().run_in_executor(None, work, view)
            try:
                await asyncio.shield(future)
            except asyncio.CancelledError:
                await future
                raise

        async def victim() -> None:
            async with staging.read(A, "a", PAGE, LONG, fill):
                raise AssertionError("was cancelled")

        task = asyncio.create_task(victim())
        await turns()
        task.cancel()
        other = asyncio.create_task(read(staging, B, "b", Fill(b"others")))
        await turns(50)
        assert not other.done(), "the only slot is still written to"
        worker_may_end.set()
        assert await other == (b"others", False)
        assert worker_wrote.is_set()
        assert task.cancelled()
        assert_clean(staging)

    run(main())


def test_a_resident_of_another_length_is_damage() -> None:
    async def main() -> None:
        staging = make().staging
        await store(staging, A, "a")
        with pytest.raises(BlobDamaged, match="4096 bytes in staging, not 100"):
            async with staging.read(A, "a", 100, LONG, Fill()):
                pass
        assert_clean(staging)

    run(main())


def test_S16_a_dropped_blob_is_read_to_the_end_and_its_slot_not_reused() -> None:
    async def main() -> None:
        staging = make(resident_pages=1).staging
        await store(staging, A, "a", dirty=True)
        async with staging.read(A, "a", PAGE, LONG, Fill()) as reading:
            staging.drop("a")
            staging.drop("a")
            assert not staging.holds("a")
            assert staging.dirty_names() == []
            with pytest.raises(StagingBusy):
                await store(staging, A, "b", timeout_s=0.01)
            assert bytes(reading.view[:6]) == b"stored"
        await store(staging, A, "b")
        assert staging.holds("b")
        assert_clean(staging)

    run(main())


def test_dirty_blobs_stay_until_they_are_settled() -> None:
    async def main() -> None:
        staging = make(resident_pages=2).staging
        for name in ("a", "b"):
            await store(staging, A, name, dirty=True)
        assert staging.dirty_names() == ["a", "b"]
        waiting = asyncio.create_task(store(staging, A, "c"))
        await turns()
        assert staging.statistics().waiters == 1
        staging.settle("unknown")
        staging.settle("b")
        await waiting
        assert staging.holds("a")
        assert not staging.holds("b")
        assert staging.soil("c")
        assert not staging.soil("b")
        assert staging.dirty_names() == ["a", "c"]
        for name in staging.dirty_names():
            staging.settle(name)
        assert_clean(staging)

    run(main())


def test_a_draft_is_seen_by_nobody_before_it_is_published() -> None:
    async def main() -> None:
        staging = make().staging
        async with staging.draft(A, "a", PAGE, LONG) as draft:
            draft.view[:6] = b"sealed"
            assert not staging.holds("a")
            draft.publish(dirty=True)
            assert staging.holds("a")
            assert bytes(draft.view[:6]) == b"sealed"
            assert draft.view.readonly
        with contextlib.suppress(ZeroDivisionError):
            async with staging.draft(A, "b", PAGE, LONG) as draft:
                raise ZeroDivisionError
        assert not staging.holds("b")
        with pytest.raises(ValueError, match="a is in staging already"):
            await store(staging, A, "a")
        staging.settle("a")
        assert_clean(staging)

    run(main())


def test_R11_readers_under_churn_always_see_their_own_blob() -> None:
    """Ten times as many blobs as slots, drops and cancellations: what is read is what was stored under the name."""

    async def main() -> None:
        staging, rng, reads = make(resident_pages=4).staging, random.Random(11), [0]

        def filler(name: str) -> Callable[[memoryview], Awaitable[None]]:
            async def fill(view: memoryview) -> None:
                view[:] = b"?" * len(view)
                await turns(rng.randint(0, 2))
                view[:] = name.encode() * (len(view) // len(name))

            return fill

        async def reader() -> None:
            for _ in range(40):
                name = f"{rng.randrange(40):04d}"
                async with staging.read(rng.choice((A, B)), name, PAGE, LONG, filler(name)) as reading:
                    for _ in range(rng.randint(0, 2)):
                        assert bytes(reading.view) == name.encode() * (PAGE // 4)
                        await asyncio.sleep(0)
                    if rng.random() < 0.2:
                        staging.drop(name)
                    assert bytes(reading.view) == name.encode() * (PAGE // 4)
                    reads[0] += 1

        for _ in range(20):
            tasks = [asyncio.create_task(reader()) for _ in range(6)]
            await turns(rng.randint(0, 60))
            tasks[0].cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes), outcomes
        assert reads[0] >= 20 * 5 * 40
        assert staging.statistics().evictions > 100
        assert_clean(staging)

    run(main())
