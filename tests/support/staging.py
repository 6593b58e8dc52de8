"""What the tests of staging share: a pool of a few pages, a tier that answers when told to, and what clean means."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from uuid import UUID

from storage.arena import Arena
from storage.host_memory import PAGE
from storage.policy import SegmentedLru
from storage.shares import Shares
from storage.staging import Staging
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
