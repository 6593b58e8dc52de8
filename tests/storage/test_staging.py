"""Staging under concurrency: single flight, hand-over, order and deadlines, zeroing, shares, cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from uuid import UUID

import pytest

from storage.arena import Arena
from storage.errors import BlobDamaged, BlobMissing, StagingBusy, TierUnavailable
from storage.host_memory import PAGE
from storage.policy import SegmentedLru
from storage.shares import Shares
from storage.staging import Staging
from tests.support.aio import run
from tests.support.manual_clock import ManualClock

A, B, C = (UUID(int=number) for number in range(1, 4))
LONG = 20.0


def make_shares(window_pages: int = 4, *, tenants: int = 0, guarantee: int = 0, read_pages: int = 0) -> Shares:
    return Shares(
        window_bytes=window_pages * PAGE,
        tenants=tenants,
        guaranteed_window_bytes=guarantee * PAGE,
        guaranteed_resident_bytes=guarantee * PAGE,
        read_bytes=read_pages * PAGE,
    )


@dataclass
class Pieces:
    """A staging pool with what a test needs of its inside."""

    arena: Arena
    staging: Staging
    clock: ManualClock = field(default_factory=ManualClock)


def make(resident_pages: int = 8, shares: Shares | None = None) -> Pieces:
    shares = make_shares() if shares is None else shares
    arena = Arena(shares.window_bytes + resident_pages * PAGE)
    clock = ManualClock()
    return Pieces(arena, Staging(arena, SegmentedLru(), clock, shares=shares), clock)


class Fill:
    """A tier that answers when told to."""

    def __init__(self, content: bytes = b"sealed", error: Exception | None = None, *, waits: bool = False) -> None:
        self.calls = 0
        self.began = asyncio.Event()
        self.may_end = asyncio.Event()
        self._content = content
        self._error = error
        if not waits:
            self.may_end.set()

    async def __call__(self, view: memoryview) -> None:
        self.calls += 1
        self.began.set()
        await self.may_end.wait()
        if self._error is not None:
            raise self._error
        view[: len(self._content)] = self._content


async def read(staging: Staging, tenant: UUID, name: str, fill: Fill, timeout_s: float = LONG) -> tuple[bytes, bool]:
    async with staging.read(tenant, name, PAGE, timeout_s, fill) as reading:
        return bytes(reading.view[:6]), reading.was_resident


async def store(staging: Staging, tenant: UUID, name: str, *, dirty: bool = False, timeout_s: float = LONG) -> None:
    async with staging.draft(tenant, name, PAGE, timeout_s) as draft:
        draft.view[:6] = b"stored"
        draft.publish(dirty)


async def turns(count: int = 10) -> None:
    """Let every task that can run do so."""
    for _ in range(count):
        await asyncio.sleep(0)


async def cancel(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def assert_clean(staging: Staging) -> None:
    """Nothing is held, waits or lingers; only clean residents may be there."""
    statistics = staging.statistics()
    assert statistics.tenant_bytes == {}
    assert statistics.windows.used_bytes == 0
    assert statistics.waiters == statistics.lingering == 0
    assert statistics.residents.used_bytes == statistics.clean_bytes == statistics.evictable_bytes
    assert statistics.draft_bytes == statistics.filling_bytes == statistics.dirty_bytes == statistics.gone_bytes == 0
    assert staging._wakes == {}


# Residents.


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


# Windows.


def raw(pieces: Pieces) -> bytes:
    """The whole of the window zone, as it lies in memory."""
    region = pieces.staging.window_region
    start = region.address - pieces.arena.region.address
    return bytes(pieces.arena.memory.view(start, region.length))


def test_C17_a_window_that_was_left_by_a_failure_is_all_zero() -> None:
    async def main() -> None:
        pieces = make()
        with contextlib.suppress(BlobDamaged):
            async with pieces.staging.window(A, 3 * PAGE, LONG) as window:
                window.view[:] = b"\xee" * (3 * PAGE)
                raise BlobDamaged("a tag is wrong")
        assert not any(raw(pieces))
        assert_clean(pieces.staging)

    run(main())


def test_a_large_window_is_zero_even_if_its_zeroing_is_cancelled() -> None:
    async def main() -> None:
        pieces = make(shares=make_shares(window_pages=4096))
        inside = asyncio.Event()

        async def use() -> None:
            async with pieces.staging.window(A, 4096 * PAGE, LONG) as window:
                window.view[:] = b"\xee" * (4096 * PAGE)
                inside.set()

        task = asyncio.create_task(use())
        await inside.wait()
        task.cancel()  # it is between two pieces now
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert not any(raw(pieces))
        assert_clean(pieces.staging)

    run(main())


def test_C18_a_frozen_window_cannot_be_written_by_any_thread() -> None:
    async def main() -> None:
        staging = make().staging
        outcomes: list[str] = []
        async with staging.window(A, PAGE, LONG) as window:
            writable = window.view
            writable[:] = b"\x01" * PAGE
            frozen = window.freeze()

            def mutate() -> None:
                for view in (writable, window.view, frozen):
                    try:
                        view[0] = 2
                    except (TypeError, ValueError) as error:
                        outcomes.append(type(error).__name__)

            thread = threading.Thread(target=mutate)
            thread.start()
            thread.join()
            assert outcomes == ["ValueError", "TypeError", "TypeError"]
            assert bytes(frozen) == b"\x01" * PAGE
            assert window.freeze() is frozen
        with pytest.raises(ValueError, match="given back"):
            _ = window.view
        with pytest.raises(ValueError, match="given back"):
            window.freeze()
        assert_clean(staging)

    run(main())


def test_C18_freezing_refuses_while_something_could_still_write() -> None:
    async def main() -> None:
        staging = make().staging
        async with staging.window(A, PAGE, LONG) as window:
            part = window.view[10:20]
            with pytest.raises(BufferError, match="release it"):
                window.freeze()
            part.release()
            del part
            assert window.freeze().readonly
        async with staging.draft(A, "a", PAGE, LONG) as draft:
            running_call = pickle.PickleBuffer(draft.view)
            with pytest.raises(BufferError, match="release it"):
                draft.publish(dirty=False)
            assert not staging.holds("a")
            running_call.release()
            draft.publish(dirty=False)
        assert_clean(staging)

    run(main())


def test_memory_that_a_call_still_uses_lingers() -> None:
    async def main() -> None:
        pieces = make()
        staging = pieces.staging
        async with staging.window(A, PAGE, LONG) as window:
            running_call = pickle.PickleBuffer(window.view)
            window.view[:3] = b"xyz"
        statistics = staging.statistics()
        assert statistics.lingering == 1
        assert statistics.windows.used_bytes == statistics.tenant_bytes[A] == PAGE
        running_call.release()
        assert_clean(staging)
        assert not any(raw(pieces))

    run(main())


def test_I12_no_byte_of_one_tenant_is_seen_by_another() -> None:
    """Two slots, 10,000 operations with aborts and cancellations; each writes its byte and looks for others."""

    async def main() -> None:
        pieces = make(resident_pages=2, shares=make_shares(window_pages=2))
        staging, rng, seen = pieces.staging, random.Random(12), [0]

        async def operation(tenant: UUID, size: int, fate: float, pauses: int) -> None:
            async with staging.window(tenant, size, LONG) as window:
                assert not any(window.view), "a byte of another tenant"
                seen[0] += 1
                half = size if fate < 0.6 else size // 2
                window.view[:half] = bytes([tenant.int]) * half
                for _ in range(pauses):
                    await asyncio.sleep(0)
                if fate < 0.3:
                    raise ZeroDivisionError
                assert set(window.freeze()[:half]) <= {tenant.int}, "written by another while it was held"

        for _ in range(1000):
            tasks = [
                asyncio.create_task(
                    operation(rng.choice((A, B, C)), rng.randint(1, PAGE), rng.random(), rng.randint(0, 3))
                )
                for _ in range(10)
            ]
            await turns(rng.randint(0, 4))
            for task in rng.sample(tasks, 2):
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(
                outcome is None or isinstance(outcome, (ZeroDivisionError, asyncio.CancelledError))
                for outcome in outcomes
            ), outcomes
        assert seen[0] > 8000
        assert not any(raw(pieces)), "canary scan of the whole window zone"
        assert_clean(staging)

    run(main(), timeout=100)


def test_R27_windows_and_reads_go_on_when_write_back_stands_still() -> None:
    async def main() -> None:
        staging = make(resident_pages=8, shares=make_shares(window_pages=4, read_pages=2)).staging
        names = [f"dirty-{number}" for number in range(6)]
        for name in names:
            await store(staging, A, name, dirty=True)
        with pytest.raises(StagingBusy, match="drafts and dirty residents"):
            await store(staging, A, "too many", dirty=True, timeout_s=0.01)

        async def get(number: int) -> bool:
            async with staging.window(A, PAGE, LONG) as window:
                content, _ = await read(staging, A, f"cold-{number}", Fill())
                window.view[:6] = content
                return True

        assert all(await asyncio.gather(*(get(number) for number in range(16))))
        assert staging.dirty_names() == names
        for name in names:
            staging.settle(name)
        assert_clean(staging)

    run(main())


# Order, deadlines, shares.


def hold(
    staging: Staging, tenant: UUID, pages: int, log: list[str], label: str, until: asyncio.Event
) -> asyncio.Task[object]:
    async def holder() -> None:
        async with staging.window(tenant, pages * PAGE, LONG):
            log.append(label)
            await until.wait()

    return asyncio.create_task(holder())


def test_waiters_are_served_in_the_order_of_their_arrival() -> None:
    async def main() -> None:
        pieces = make()
        staging, log, end, done = pieces.staging, [], asyncio.Event(), asyncio.Event()
        log = list[str]()
        done.set()
        first = hold(staging, A, 4, log, "first", end)
        await turns()
        others = []
        for number, pages in enumerate((3, 1, 4, 1)):
            others.append(hold(staging, A, pages, log, str(number), done))
            await turns()
        pieces.clock.advance(1.5)
        assert log == ["first"]
        assert (staging.statistics().waiters, staging.statistics().oldest_wait_s) == (4, 1.5)
        end.set()
        await asyncio.gather(first, *others)
        assert log == ["first", "0", "1", "2", "3"]
        assert_clean(staging)

    run(main())


def test_a_deadline_ends_the_wait_and_says_what_was_short() -> None:
    async def main() -> None:
        staging = make().staging
        async with staging.window(A, 4 * PAGE, LONG):
            with pytest.raises(StagingBusy, match=rf"window of 100 bytes.*holds {4 * PAGE} of.*waited 0.01 s"):
                async with staging.window(A, 100, 0.01):
                    pass
            with pytest.raises(StagingBusy):
                async with staging.window(A, 100, 0):
                    pass
            with pytest.raises(StagingBusy, match=rf"takes {5 * PAGE} .* at most {4 * PAGE}"):
                async with staging.window(A, 5 * PAGE, LONG):
                    pass
        assert_clean(staging)

    run(main())


def test_one_that_gives_up_lets_those_behind_it_pass() -> None:
    async def main() -> None:
        staging, log, end, done = make().staging, list[str](), asyncio.Event(), asyncio.Event()
        done.set()
        holder = hold(staging, A, 3, log, "holder", end)
        await turns()
        large = hold(staging, A, 2, log, "large", done)
        await turns()
        small = hold(staging, A, 1, log, "small", done)
        await turns()
        assert log == ["holder"]
        await cancel(large)
        await small
        assert log == ["holder", "small"]
        end.set()
        await holder
        assert_clean(staging)

    run(main())


def test_Q15_a_tenant_that_fills_the_pool_leaves_others_their_share() -> None:
    async def main() -> None:
        shares = make_shares(window_pages=8, tenants=2, guarantee=2)
        staging, log, end = make(resident_pages=8, shares=shares).staging, list[str](), asyncio.Event()
        greedy = [hold(staging, A, 1, log, "greedy", end) for _ in range(20)]
        await turns()
        assert len(log) == 6, "its guarantee and all of the common rest"
        for number in range(20):
            with contextlib.suppress(StagingBusy):
                await store(staging, A, f"dirty-{number}", dirty=True, timeout_s=0)
        assert len(staging.dirty_names()) == 6

        loop = asyncio.get_running_loop()
        start = loop.time()
        async with staging.window(B, 2 * PAGE, LONG):
            await store(staging, B, "b1", dirty=True)
            await read(staging, B, "b2", Fill())
        assert loop.time() - start < 0.1
        end.set()
        await asyncio.gather(*greedy)
        assert staging.statistics().tenant_bytes == {A: 6 * PAGE, B: PAGE}

    run(main())


# Cancellation and closing.


async def _window(staging: Staging) -> None:
    async with staging.window(A, 2 * PAGE, LONG) as window:
        window.view[:4] = b"data"
        await asyncio.sleep(0)
        window.freeze()
        await asyncio.sleep(0)


async def _draft(staging: Staging) -> None:
    async with staging.draft(A, "draft", 2 * PAGE, LONG) as draft:
        await asyncio.sleep(0)
        draft.publish(dirty=False)
        await asyncio.sleep(0)


async def _read(staging: Staging) -> None:
    async def fill(view: memoryview) -> None:
        await asyncio.sleep(0)
        view[:1] = b"x"
        await asyncio.sleep(0)

    async with staging.read(A, "read", 2 * PAGE, LONG, fill):
        await asyncio.sleep(0)


@pytest.mark.parametrize("operation", [_window, _draft, _read])
@pytest.mark.parametrize("contended", [False, True])
def test_cancellation_at_every_await_leaves_nothing_behind(
    operation: Callable[[Staging], Coroutine[None, None, None]], contended: bool
) -> None:
    """The operation alone, and waiting behind another that gives its memory back after one, two, … turns."""

    async def once(before: int, held_turns: int) -> bool:
        staging = make(resident_pages=2, shares=make_shares(window_pages=2)).staging

        async def occupy() -> None:
            async with staging.window(B, 2 * PAGE, LONG), staging.draft(B, "other", 2 * PAGE, LONG):
                await turns(held_turns)

        occupier = asyncio.create_task(occupy()) if contended else None
        await asyncio.sleep(0)
        tasks = [asyncio.create_task(operation(staging)) for _ in range(2)]
        await turns(before)
        finished = tasks[0].done()
        tasks[0].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        unexpected = [outcome for outcome in outcomes if isinstance(outcome, Exception) and "once" not in str(outcome)]
        assert not unexpected, "a second draft of the name may fail, nothing else"
        if occupier is not None:
            await occupier
        assert_clean(staging)
        return finished

    async def main() -> None:
        for held_turns in range(6 if contended else 1):
            before = 0
            while not await once(before, held_turns):
                before += 1
            assert before >= 3

    run(main())


def test_closing_refuses_the_waiting_and_the_coming_only() -> None:
    async def main() -> None:
        staging = make().staging
        async with staging.window(A, 4 * PAGE, LONG) as window:
            waiting = asyncio.create_task(_window(staging))
            await turns()
            await staging.aclose()
            with pytest.raises(StagingBusy, match="closing"):
                await waiting
            with pytest.raises(StagingBusy, match="closing"):
                await store(staging, A, "late")
            window.view[0] = 1
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
