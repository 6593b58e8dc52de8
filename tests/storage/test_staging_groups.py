"""Several pieces of staging at once: nobody who holds some waits for more, and nobody who waits is passed over."""

from __future__ import annotations

import asyncio

import pytest

from storage.errors import StagingBusy
from storage.host_memory import PAGE
from tests.support.aio import run
from tests.support.staging import LONG, A, B, Fill, Pieces, assert_clean, cancel, make, read, store, turns


def zone(pieces: Pieces) -> bytes:
    region = pieces.staging.window_region
    return bytes(pieces.arena.memory.view(region.address - pieces.arena.region.address, region.length))


def test_drafts_are_as_many_as_have_room_now() -> None:
    async def main() -> None:
        staging = make(resident_pages=3).staging
        async with staging.drafts(A, ["a", "b", "c", "d", "e"], PAGE, LONG) as drafts:
            assert len(drafts) == 3, "it does not wait for the others: their room may come from its like"
            for number, draft in enumerate(drafts[:2]):
                draft.view[:1] = bytes([number])
                draft.publish(dirty=False)
        assert [staging.holds(name) for name in "abc"] == [True, True, False], "what was not published was never there"
        assert_clean(staging)

    run(main())


def test_the_first_draft_waits_its_turn() -> None:
    async def main() -> None:
        staging = make(resident_pages=2).staging
        async with staging.drafts(A, ["a", "b"], PAGE, LONG) as held:
            waiting = asyncio.create_task(_drafts(staging, B, ["c", "d"]))
            await turns()
            assert not waiting.done()
            assert len(held) == 2
        assert await waiting == 2
        assert_clean(staging)

    run(main())


async def _drafts(staging, tenant, names) -> int:  # type: ignore[no-untyped-def]
    async with staging.drafts(tenant, names, PAGE, LONG) as drafts:
        return len(drafts)


def test_further_drafts_take_nothing_from_a_read_that_waits() -> None:
    async def main() -> None:
        staging = make(resident_pages=3).staging
        first, second = Fill(waits=True), Fill()
        async with staging.draft(A, "held", 2 * PAGE, LONG):
            filling = asyncio.create_task(read(staging, A, "one", first))
            await first.began.wait()
            waiting = asyncio.create_task(read(staging, B, "two", second))
            await turns()
            assert not waiting.done()
            drafting = asyncio.create_task(_drafts(staging, A, ["x", "y"]))
            await turns()
        first.may_end.set()
        assert list(await asyncio.gather(filling, waiting)) == [(b"sealed", False)] * 2
        assert await drafting >= 1
        assert_clean(staging)

    run(main())


def test_residents_are_the_leading_run_that_is_here() -> None:
    async def main() -> None:
        staging = make().staging
        for name in ("a", "b", "d"):
            await store(staging, A, name)
        with staging.residents(A, [(name, PAGE) for name in "abcd"]) as readings:
            assert [bytes(reading.view[:6]) for reading in readings] == [b"stored"] * 2
            assert all(reading.was_resident and reading.view.readonly for reading in readings)
            staging.drop("a")
            assert bytes(readings[0].view[:6]) == b"stored", "what is being read stays"
        with pytest.raises(ValueError, match="given back"):
            _ = readings[0].view
        with staging.residents(A, [("b", PAGE), ("d", 2 * PAGE)]) as readings:
            assert len(readings) == 1, "another length than its record says is for `read` to refuse"
        with staging.residents(A, []) as readings:
            assert readings == []
        assert_clean(staging)

    run(main())


def test_residents_do_not_pass_a_read_that_waits() -> None:
    async def main() -> None:
        staging = make(resident_pages=2).staging
        await store(staging, A, "here")
        async with staging.draft(A, "held", PAGE, LONG):
            with staging.residents(A, [("here", PAGE)]) as readings:
                assert len(readings) == 1
                waiting = asyncio.create_task(read(staging, B, "new", Fill()))
                await turns()
                with staging.residents(A, [("here", PAGE)]) as others:
                    assert others == [], "it stands in line like everybody"
            assert (await waiting)[0] == b"sealed"
        assert_clean(staging)

    run(main())


def test_a_window_that_was_wiped_is_zero_and_stays_so() -> None:
    async def main() -> None:
        pieces = make()
        async with pieces.staging.window(A, PAGE, LONG) as window:
            window.view[:] = b"\xee" * PAGE
            await asyncio.to_thread(window.wipe)
            assert not any(window.view)
            with pytest.raises(TypeError, match="read-only"):
                window.view[0] = 1
        assert not any(zone(pieces))
        assert_clean(pieces.staging)

    run(main())


def test_a_window_that_could_still_be_written_is_not_wiped_but_zeroed_at_its_end() -> None:
    async def main() -> None:
        pieces = make()
        async with pieces.staging.window(A, PAGE, LONG) as window:
            part = window.view[:10]
            part[:] = b"\xee" * 10
            with pytest.raises(BufferError, match="release it"):
                window.wipe()
            part.release()
        assert not any(zone(pieces))
        assert_clean(pieces.staging)

    run(main())


def test_cancelled_while_it_waits_a_group_leaves_nothing() -> None:
    async def main() -> None:
        staging = make(resident_pages=1).staging
        async with staging.draft(A, "held", PAGE, LONG):
            waiting = asyncio.create_task(_drafts(staging, A, ["a", "b"]))
            await turns()
            await cancel(waiting)
        assert_clean(staging)

    run(main())


def test_what_was_fetched_is_nobodys_and_its_first_reader_is_its_first_use() -> None:
    async def main() -> None:
        staging = make(resident_pages=2).staging
        for name in ("a", "b"):
            assert await staging.fetch(A, name, PAGE, Fill())
            assert not await staging.fetch(A, name, PAGE, Fill(error=AssertionError("it is here")))
        assert await read(staging, A, "a", Fill()) == (b"sealed", True)
        assert staging.statistics().hits == 0, "it was brought for this read"
        assert await staging.fetch(A, "c", PAGE, Fill())
        assert [staging.holds(name) for name in "abc"] == [False, True, True], "one use does not protect a"
        for _ in range(2):
            with staging.residents(A, [("b", PAGE)]) as readings:
                assert len(readings) == 1
        assert staging.statistics().hits == 1
        assert await staging.fetch(A, "d", PAGE, Fill())
        assert [staging.holds(name) for name in "bcd"] == [True, False, True], "two uses protect b"
        assert_clean(staging)

    run(main())


def test_a_fetch_waits_for_no_memory() -> None:
    async def main() -> None:
        staging = make(resident_pages=1).staging
        fill = Fill()
        async with staging.draft(A, "held", PAGE, LONG):
            with pytest.raises(StagingBusy):
                await staging.fetch(A, "a", PAGE, fill)
        assert fill.calls == 0
        assert_clean(staging)

    run(main())
