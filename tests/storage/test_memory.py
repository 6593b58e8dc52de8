"""The reference tier passes the suite that it defines."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from storage.memory import MemoryTier
from storage.tier import Tier
from tests.support.aio import aio
from tests.support.tier_conformance import TierConformance, listed, name, opened


class TestMemoryTier(TierConformance):
    def open_tier(self) -> AbstractAsyncContextManager[Tier]:
        return opened(MemoryTier())


@aio
async def test_blobs_are_dated_by_the_given_time() -> None:
    tier = MemoryTier("staged", now_ms=lambda: 1234)
    await tier.put(name(1), memoryview(b"x"))
    assert [blob.modified_ms for blob in await listed(tier)] == [1234]
    assert tier.label == "staged"
