"""Windows of the staging pool: zeroed whatever ends them, frozen against every writer, never shown to another."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
import threading
from uuid import UUID

import pytest

from storage.errors import BlobDamaged
from storage.host_memory import PAGE
from tests.support.aio import run
from tests.support.staging import LONG, A, B, C, Pieces, assert_clean, make, make_shares, turns


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
        assert statistics.lingering == 1, "law 7: a call still uses it"
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
