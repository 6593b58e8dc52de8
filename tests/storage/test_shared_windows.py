"""Shared windows and who may have which: claims never overlap, limits hold, and nothing is unmapped under a view."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.lending import Lending, LendingLimits, Loan
from storage.shared_window import SharedWindow
from tests.support.aio import aio

PAGE = mmap.PAGESIZE
A, B, C = (UUID(int=number) for number in range(1, 4))


class Inline:
    """Workers that work at once."""

    async def run(self, work):  # type: ignore[no-untyped-def]
        return work()


def lending(*, total: int = 8, tenant: int = 4, connection: int = 2, windows: int = 100) -> Lending:
    """Limits in pages."""
    limits = LendingLimits(total_bytes=total * PAGE, tenant_bytes=tenant * PAGE, connection_bytes=connection * PAGE)
    return Lending(limits, Inline(), windows_max=windows)


async def lent(pool: Lending, tenant: UUID, pages: int, least: int = 1) -> Loan:
    loan = await pool.lend(tenant, least, pages * PAGE)
    assert loan is not None
    return loan


# One window


def test_nobody_can_change_the_length_of_a_window() -> None:
    window = SharedWindow(2 * PAGE)
    for length in (0, PAGE, 3 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(window.descriptor, length)
    with pytest.raises(PermissionError):
        fcntl.fcntl(window.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(window.descriptor).st_blocks * 512 == 2 * PAGE, "every page is there: no access fails later"
    window.close()


def test_both_sides_see_the_same_bytes() -> None:
    window = SharedWindow(PAGE)
    with mmap.mmap(window.descriptor, PAGE) as other:
        view = window.claim(100, 8)
        assert bytes(view) == bytes(8), "zeroed"
        other[100:108] = b"from you"
        assert bytes(view) == b"from you"
        view[:] = b"from me."
        assert other[100:108] == b"from me."
        view.release()
    window.close()


@pytest.mark.parametrize("nbytes", [0, -PAGE, 1, PAGE + 1])
def test_a_window_is_whole_pages(nbytes: int) -> None:
    with pytest.raises(ValueError, match="whole pages"):
        SharedWindow(nbytes)


@given(st.lists(st.tuples(st.integers(-10, PAGE + 10), st.integers(-2, 300)), max_size=40))
def test_what_is_claimed_is_inside_and_overlaps_nothing(asked: list[tuple[int, int]]) -> None:
    window = SharedWindow(PAGE)
    taken: set[int] = set()
    for offset, nbytes in asked:
        wanted = set(range(offset, offset + nbytes))
        fits = nbytes > 0 and offset >= 0 and offset + nbytes <= PAGE and not wanted & taken
        if not fits:
            with pytest.raises(ValueError, match=r"inside|overlap"):
                window.claim(offset, nbytes)
            continue
        assert len(window.claim(offset, nbytes)) == nbytes
        taken |= wanted
    window.unclaim()
    assert len(window.claim(0, PAGE)) == PAGE
    window.close()


@given(st.lists(st.integers(-10, PAGE + 10), max_size=6), st.integers(-2, 900), st.booleans())
def test_many_parts_at_once_are_claimed_as_one_by_one(offsets: list[int], nbytes: int, ascending: bool) -> None:
    asked = sorted(offsets) if ascending else offsets
    outcomes: list[object] = []
    for many in (True, False):
        window = SharedWindow(PAGE)
        window.claim(PAGE - 1, 1) if len(asked) % 2 else None
        try:
            views = window.claim_all(asked, nbytes) if many else [window.claim(offset, nbytes) for offset in asked]
            for number, view in enumerate(views, 1):
                view[:] = bytes([number]) * nbytes
            outcomes.append((len(views), [len(view) for view in views]))
        except ValueError as error:
            outcomes.append(str(error))
        window.unclaim()
        with window.claim(0, PAGE) as whole:
            outcomes.append(bytes(whole))
        window.close()
        assert window.closed
    assert outcomes[:2] == outcomes[2:]


def test_law_7_a_window_stays_while_a_view_of_it_is_left() -> None:
    window = SharedWindow(PAGE)
    view = window.claim(0, 20)[:10]
    window.close()
    assert not window.closed
    view[:] = b"0123456789"
    view.release()
    window.close()
    assert window.closed
    window.close()


# All of them


@aio
async def test_limits_of_a_connection_a_tenant_and_all() -> None:
    pool = lending()
    first = await lent(pool, A, 1)
    assert (await lent(pool, A, 100)).window.nbytes == 2 * PAGE, "as much as a connection may have"
    assert (await lent(pool, A, 2)).window.nbytes == PAGE, "as much as is left for the tenant"
    assert await pool.lend(A, 1, PAGE) is None
    assert await pool.lend(B, 3 * PAGE, 3 * PAGE) is None, "less than asked for is none"
    for _ in range(2):
        await lent(pool, B, 2)
    assert (pool.lent_bytes, pool.count, pool.held(A), pool.held(B)) == (8 * PAGE, 5, 4 * PAGE, 4 * PAGE)
    assert await pool.lend(C, 1, PAGE) is None, "law 9: no more than all together may have"
    await pool.give_back(first)
    assert (await lent(pool, C, 2)).window.nbytes == PAGE


@aio
async def test_so_many_windows_and_no_more() -> None:
    pool = lending(windows=2)
    loans = [await lent(pool, A, 1) for _ in range(2)]
    assert await pool.lend(B, 1, PAGE) is None
    await pool.give_back(loans[0])
    await lent(pool, B, 1)


@aio
async def test_without_bytes_or_windows_nothing_is_lent() -> None:
    for pool in (lending(total=0), lending(tenant=0), lending(connection=0), lending(windows=0)):
        assert not pool.enabled
        assert await pool.lend(A, 1, PAGE) is None
    assert lending().enabled


@aio
async def test_a_window_that_is_still_seen_counts_until_it_is_not() -> None:
    pool = lending(tenant=1)
    loan = await lent(pool, A, 1)
    view = loan.window.claim(0, 2)[:1]
    await pool.give_back(loan)
    assert pool.held(A) == PAGE
    assert await pool.lend(A, 1, PAGE) is None
    view.release()
    await lent(pool, A, 1)
    assert pool.count == 1


@aio
async def test_memory_or_descriptors_that_are_not_there_are_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = lending()
    for name in ("memfd_create", "posix_fallocate"):
        files = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            patch.setattr(os, name, _refuses)
            assert await pool.lend(A, 1, PAGE) is None
        assert (pool.count, pool.lent_bytes, len(os.listdir("/proc/self/fd"))) == (0, 0, files)


@aio
async def test_law_6_windows_are_made_one_at_a_time() -> None:
    most = 0

    class Slow(Inline):
        inside = 0

        async def run(self, work):  # type: ignore[no-untyped-def]
            nonlocal most
            self.inside += 1
            most = max(most, self.inside)
            await asyncio.sleep(0)
            self.inside -= 1
            return work()

    pool = lending()
    pool._workers = Slow()
    loans = await asyncio.gather(*(lent(pool, tenant, 1) for tenant in (A, B, C)))
    assert (pool.count, most) == (3, 1)
    for loan in loans:
        await pool.give_back(loan)


def _refuses(*_: object) -> None:
    raise OSError(12, "no memory")


@aio
async def test_one_who_gives_up_while_the_window_is_made_leaves_nothing() -> None:
    class Late(Inline):
        async def run(self, work):  # type: ignore[no-untyped-def]
            work()
            raise asyncio.CancelledError

    pool = lending()
    pool._workers = Late()
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(asyncio.CancelledError):
        await pool.lend(A, 1, PAGE)
    assert (pool.count, pool.lent_bytes, len(os.listdir("/proc/self/fd"))) == (0, 0, files)
