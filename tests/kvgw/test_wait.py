"""Waiting for chunks that another process is about to store: pushed, bounded, and over when they are there."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from unittest import mock

import pytest

from kvgw.client import connect
from kvgw.gateway import wait as wait_verb
from kvgw.model import Durability, Outcome
from tests.support.aio import aio
from tests.support.gateways import House, format_of, house, keys_of, payloads_of
from tests.support.several import Footing, on_footing

NEVER = 3600.0


def waiting(made: House) -> int:
    return sum(len(events) for events in made.opened.rooms.arrivals._waiting.values())


@pytest.mark.parametrize("kind", ["embedded", "unix"])
@aio
async def test_what_is_there_is_answered_at_once(kind: str, tmp_path: Path) -> None:
    async with house(kind, tmp_path / "gw") as made:  # type: ignore[arg-type]
        client = made.client()
        registered = await client.register(format_of())
        await client.put(registered, keys_of(3), payloads_of(registered, 3))
        match = await client.wait(registered, keys_of(3), deadline_s=30)
        assert (match.count, match.outcome, match.cached_tokens) == (3, Outcome.OK, 48)
        assert waiting(made) == 0


@pytest.mark.parametrize("kind", ["embedded", "unix"])
@aio
async def test_an_arrival_wakes_without_polling(kind: str, tmp_path: Path) -> None:
    async with house(kind, tmp_path / "gw") as made:  # type: ignore[arg-type]
        engine, other = made.client(), made.client()
        registered = await engine.register(format_of())
        with mock.patch.object(wait_verb, "LOOK_SECONDS", NEVER):
            waiter = asyncio.create_task(other.wait(registered, keys_of(4), deadline_s=60))
            while not waiting(made):
                await asyncio.sleep(0.001)
            for at in range(4):  # a prefill engine publishes chunk by chunk
                await engine.put(registered, keys_of(4)[at : at + 1], payloads_of(registered, 4)[at : at + 1], depth=at)
            assert (await waiter).count == 4
        assert waiting(made) == 0, "law 7"


@aio
async def test_the_deadline_answers_with_what_there_is(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as made:
        client = made.client()
        registered = await client.register(format_of())
        await client.put(registered, keys_of(2), payloads_of(registered, 2))
        started = time.monotonic()
        match = await client.wait(registered, keys_of(5), deadline_s=0.6)
        assert (match.count, match.outcome) == (2, Outcome.OK)
        assert 0.4 < time.monotonic() - started < 0.85
        assert waiting(made) == 0


@aio
async def test_a_waiter_that_leaves_holds_nothing(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as made:
        client = made.client()
        registered = await client.register(format_of())
        waiters = [asyncio.create_task(client.wait(registered, keys_of(1), deadline_s=1.0)) for _ in range(8)]
        while waiting(made) < 3:
            await asyncio.sleep(0.001)
        for waiter in waiters:
            waiter.cancel()
        await asyncio.gather(*waiters, return_exceptions=True)
        while waiting(made):
            await asyncio.sleep(0.01)


@aio
async def test_a_gateway_that_goes_is_an_outage_within_the_deadline(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw", check=False) as made:
        client = made.client()
        registered = await client.register(format_of())
        waiter = asyncio.create_task(client.wait(registered, keys_of(1), deadline_s=20))
        while not waiting(made):
            await asyncio.sleep(0.001)
    started = time.monotonic()
    match = await waiter
    assert (match.count, match.outcome) == (0, Outcome.OUTAGE)
    assert time.monotonic() - started < 5


@on_footing
async def test_what_another_gateway_stores_is_found_when_it_is_in_s3(footing: Footing) -> None:
    async with footing.gateway("a") as here, footing.gateway("b") as there:
        engine, other = here.client(), there.client()
        registered = await engine.register(format_of())
        asked = await other.register(format_of())
        waiter = asyncio.create_task(other.wait(asked, keys_of(2), deadline_s=30))
        while not waiting(there):
            await asyncio.sleep(0.001)
        await engine.put(registered, keys_of(2), payloads_of(registered, 2), durability=Durability.S3)
        assert (await waiter).count == 2


@on_footing
async def test_a_fleet_goes_on_waiting_where_a_gateway_died(footing: Footing) -> None:
    async with AsyncExitStack() as dying, footing.gateway("b") as there:
        here = await dying.enter_async_context(footing.gateway("a"))
        engine = there.client()
        registered = await engine.register(format_of())
        async with connect([str(here.endpoint), str(there.endpoint)]) as fleet:
            asked = await fleet.register(format_of())
            waiter = asyncio.create_task(fleet.wait(asked, keys_of(1), deadline_s=30))
            while not (waiting(here) or waiting(there)):
                await asyncio.sleep(0.001)
            await dying.aclose()
            await engine.put(registered, keys_of(1), payloads_of(registered, 1), durability=Durability.S3)
            assert (await waiter).count == 1
