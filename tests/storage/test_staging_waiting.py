"""Waiting for staging: order, deadlines, shares, cancellation at every await, and closing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from uuid import UUID

import pytest

from storage.errors import StagingBusy
from storage.host_memory import PAGE
from storage.staging import Staging
from tests.support.aio import run
from tests.support.staging import LONG, A, B, Fill, assert_clean, cancel, make, make_shares, read, store, turns

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


def test_what_a_drop_frees_goes_to_who_waits() -> None:
    async def main() -> None:
        staging = make(resident_pages=1).staging
        await store(staging, A, "dirty", dirty=True)
        waiting = asyncio.create_task(store(staging, B, "next"))
        await turns()
        assert not waiting.done()
        staging.drop("dirty")
        await asyncio.wait_for(waiting, 5)
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
