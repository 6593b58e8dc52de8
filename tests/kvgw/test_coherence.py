"""Law 5, the protocol: no gateway answers from memory what another has acknowledged as gone, whatever comes between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from kvgw.gateway.coherence import LEASE_SECONDS, Coherence
from tests.support.coherence_world import World

SEEDS, STEPS = 60, 2_500


def first_breach(kind: Callable[..., Coherence], seeds: int) -> int | None:
    """The first world in which law 5 is broken."""
    for seed in range(seeds):
        world = World(seed, kind)
        world.run(STEPS)
        if world.wrong:
            return seed
    return None


def test_law_5_in_any_order_of_looks_losses_freezes_and_deaths() -> None:
    answers = 0
    for seed in range(SEEDS):
        world = World(seed)
        world.run(STEPS)
        assert not world.wrong, f"law 5, seed {seed}"
        answers += world.answers
    assert answers > 5 * SEEDS, "hardly anything was answered from memory"


class AcknowledgesAtOnce(Coherence):
    async def settled(self, tenant: UUID, version: int) -> None:
        return


class ForgetsItself(Coherence):
    def ended(self, tenant: UUID, version: int) -> None:
        return


class CountsFromTheAnswer(Coherence):
    async def _look(self) -> dict[UUID, int]:
        new = await super()._look()
        for held in self._held.values():
            held.until = self._clock.monotonic() + LEASE_SECONDS
        return new


class GivesItsWordTooEarly(Coherence):
    async def _look(self) -> dict[UUID, int]:
        before = {one: (held.version, held.until) for one, held in self._held.items()}
        new = await super()._look()
        for tenant in new:
            self._held[tenant].version, self._held[tenant].until = before.get(tenant, (None, 0.0))
        return new


class TrustsItsWord(Coherence):
    """Takes what it said for what the catalog has, and looks no second time."""

    async def _look(self) -> dict[UUID, int]:
        began = self._clock.monotonic()
        new = await super()._look()
        for tenant, version in new.items():
            self._held[tenant].version, self._held[tenant].until = version, began + LEASE_SECONDS
        return new


class WaitsForNoLease(Coherence):
    async def _all_dropped(self, tenant: UUID, version: int, until: float) -> bool:
        return await super()._all_dropped(tenant, version, until - LEASE_SECONDS)


class TakesSilenceForAWord(Coherence):
    async def _late(self, tenant: UUID, version: int) -> dict[str, int] | None:
        late = await super()._late(tenant, version)
        return {} if late is None else late


@pytest.mark.parametrize(
    "bug",
    [
        AcknowledgesAtOnce,
        ForgetsItself,
        CountsFromTheAnswer,
        GivesItsWordTooEarly,
        TrustsItsWord,
        WaitsForNoLease,
        TakesSilenceForAWord,
    ],
)
def test_law_5_the_worlds_find(bug: Any) -> None:
    assert first_breach(bug, 5 * SEEDS) is not None
