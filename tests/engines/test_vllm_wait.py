"""A request of an engine that only reads waits for chunks that another engine is about to store; never for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'kvgw[torch]'")

from kvgw.engines.options import parse_options
from kvgw.engines.vllm import handover
from kvgw.errors import FormatError
from kvgw.gateway import wait as wait_verb
from tests.engines.fake_vllm import CHUNK, FakeVllm
from tests.engines.test_vllm_halves import PROMPT, engine, options_for, serve
from tests.support.aio import aio
from tests.support.gateways import House, house, until

LONG = {"store": False, "wait_deadline_s": 60.0}
"""Settings of an engine that decodes."""


@asynccontextmanager
async def engine_of(folder: Path) -> AsyncIterator[tuple[House, FakeVllm]]:
    """A gateway, which ends first, and an engine that decodes."""
    (folder / "data").mkdir(mode=0o700)
    endpoint = f"unix:{folder / 'data' / 'kvgw.sock'}"
    options = parse_options({"endpoint": endpoint, "tokens_per_chunk": CHUNK, "lookup_deadline_s": 10.0, **LONG})
    async with engine(options) as decode, house("unix", folder / "data", check=False) as gateway:
        yield gateway, decode


def waiting(gateway: House) -> int:
    return sum(len(events) for events in gateway.opened.rooms.arrivals._waiting.values())


@aio
async def test_what_is_stored_meanwhile_is_loaded_as_soon_as_all_of_it_is_there(tmp_path: Path) -> None:
    async with (
        house("unix", tmp_path) as gateway,
        engine(options_for(gateway)) as prefill,
        engine(options_for(gateway, **LONG)) as decode,
    ):
        with mock.patch.object(wait_verb, "LOOK_SECONDS", 3600.0):  # it is told, and does not look
            request = asyncio.create_task(serve(decode, PROMPT))
            await until(lambda: waiting(gateway) == 1)
            await serve(prefill, PROMPT[: 2 * CHUNK + 1], step=CHUNK)
            await asyncio.sleep(0.05)
            assert waiting(gateway) == 1, "two of five chunks are there, and it goes on waiting"
            await serve(prefill, PROMPT, step=CHUNK)
            served = await request
        assert served.loaded == 5 * CHUNK
        assert served.slowest_s < 0.1, "the scheduler's thread did not wait"
        assert (decode.counters.total("waits"), decode.counters.total("waits_over")) == (1, 0)
        assert (await serve(decode, PROMPT)).loaded == 5 * CHUNK
        assert decode.counters.total("waits") == 1, "what is there is not waited for"
        assert decode.counters.total("tokens_stored") == 0
        assert waiting(gateway) == 0, "law 7"


@aio
async def test_when_the_time_is_over_it_loads_what_came_and_computes_the_rest(tmp_path: Path) -> None:
    """Law 9."""
    async with (
        house("unix", tmp_path) as gateway,
        engine(options_for(gateway)) as prefill,
        engine(options_for(gateway, store=False, wait_deadline_s=3.0)) as decode,
    ):
        await serve(prefill, PROMPT[: 3 * CHUNK + 1])
        for number in (1, 2):
            started = time.monotonic()
            assert (await serve(decode, PROMPT)).loaded == 3 * CHUNK
            assert 2.5 < time.monotonic() - started < 10, "it waited for as long as it was told, behind the lookup"
            assert decode.counters.total("waits_over") == number
        assert decode.counters.total("lookups_late") == 0


@aio
async def test_a_gateway_that_goes_ends_the_wait(tmp_path: Path) -> None:
    """Law 2: an outage is no answer, and nothing is waited for that nobody can bring."""
    async with engine_of(tmp_path) as (gateway, decode):
        request = asyncio.create_task(serve(decode, PROMPT))
        await until(lambda: waiting(gateway) == 1)
    started = time.monotonic()
    assert (await request).loaded == 0
    assert time.monotonic() - started < 10
    assert decode.counters.total("lookup_outages") >= 1


@aio
async def test_many_requests_wait_and_more_stand_in_line(tmp_path: Path) -> None:
    """Law 9. Those that find no room to wait are not failures of the gateway: lookups go on."""
    prompts = [[number, *PROMPT] for number in range(1, 6)]
    with mock.patch.object(handover, "WAITS_AT_ONCE", 2):
        async with (
            house("unix", tmp_path) as gateway,
            engine(options_for(gateway), blocks=400) as prefill,
            engine(options_for(gateway, **LONG), blocks=400) as decode,
        ):
            requests = [decode.request(prompt) for prompt in prompts]
            asked = [decode.scheduler.matched_tokens(request, 0) for request in requests]
            assert asked == [(None, False)] * 5
            await until(lambda: waiting(gateway) == 2)
            for prompt in prompts[::-1]:
                await serve(prefill, prompt)
            for request in requests:
                await until(lambda request=request: decode.scheduler.matched_tokens(request, 0) == (5 * CHUNK, True))
            assert waiting(gateway) == 0


def test_an_engine_that_stores_does_not_wait() -> None:
    """Each cold prompt would wait for itself."""
    storing = parse_options({"endpoint": "unix:/kvgw.sock", "wait_deadline_s": 3.0})
    with pytest.raises(FormatError, match="wait_deadline_s is 3, and this engine stores"):
        handover.check_waits(storing)
    handover.check_waits(parse_options({"endpoint": "unix:/kvgw.sock", "wait_deadline_s": 3.0, "store": False}))


@aio
async def test_a_request_that_ends_waits_no_longer(tmp_path: Path) -> None:
    """Law 7: its room is the next one's."""
    with mock.patch.object(handover, "WAITS_AT_ONCE", 1):
        async with engine_of(tmp_path) as (gateway, decode):
            for number in (1, 2):
                request = decode.request([number, *PROMPT])
                assert decode.scheduler.matched_tokens(request, 0) == (None, False)
                await until(lambda number=number: waiting(gateway) == number)
                decode.scheduler.finished(request.request_id)
