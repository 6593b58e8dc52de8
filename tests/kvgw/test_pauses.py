"""Jobs that look through a lot rest between short spells, as long as anybody asks for anything (L06)."""

from __future__ import annotations

from typing import Any, cast
from uuid import UUID

import pytest

from kvgw.gateway.turns import Turns
from kvgw.maintenance.pacing import PAUSE_SECONDS_MAX, PAUSE_SPELLS, SPELL_SECONDS, Pauses
from tests.support.aio import aio

TENANT = UUID(int=1)


class Clock:
    """Time passes when it is told to, and while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def made(clock: Clock, turns: Turns) -> Pauses:
    return Pauses(cast("Any", clock), turns)


@aio
async def test_a_job_rests_after_a_spell_in_which_somebody_asked() -> None:
    clock, turns = Clock(), Turns(2)
    pauses = made(clock, turns)
    turns.done_at_once(TENANT)
    clock.now += SPELL_SECONDS / 2
    await pauses.between()
    assert clock.slept == [], "the spell is not over"
    clock.now += 1.5 * SPELL_SECONDS
    await pauses.between()
    assert clock.slept == [pytest.approx(PAUSE_SPELLS * 2 * SPELL_SECONDS)]
    clock.now += 2 * SPELL_SECONDS
    await pauses.between()
    assert len(clock.slept) == 1, "nobody has asked since"
    turns.done_at_once(TENANT)
    clock.now += 10 * PAUSE_SECONDS_MAX
    await pauses.between()
    assert clock.slept[1:] == [PAUSE_SECONDS_MAX], "what took so long waited rather than worked"


@aio
async def test_it_rests_while_a_request_is_at_work() -> None:
    clock, turns = Clock(), Turns(2)
    async with turns.of(TENANT):
        pauses = made(clock, turns)
        for _ in range(3):
            clock.now += 2 * SPELL_SECONDS
            await pauses.between()
    assert len(clock.slept) == 3
    clock.now += 2 * SPELL_SECONDS
    await pauses.between()
    assert len(clock.slept) == 3
