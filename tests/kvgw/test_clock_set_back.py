"""Law 5 over a restart: what a gateway said had expired does not come back because the clock was set back meanwhile.

On SQLite the time is the machine's. How late it is, is written down with each heartbeat and at the end.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvgw.client import Client
from kvgw.fence import FENCED_AFTER_SECONDS
from kvgw.model import Durability
from tests.support.aio import aio
from tests.support.gateways import House, format_of, house, keys_of, payloads_of
from tests.support.manual_clock import ManualClock

START_MS = 1_900_000_000_000
HOUR_MS = 3_600_000
LIFE_S = 6


async def put(client: Client) -> None:
    part = await client.register(format_of())
    report = await client.put(part, keys_of(1), payloads_of(part, 1), ttl=LIFE_S, durability=Durability.NVME)
    assert report.stored == 1


async def matched(gateway: House) -> int:
    client = gateway.client()
    return (await client.match(await client.register(format_of()), keys_of(1))).count


@pytest.mark.parametrize("how", ["in good order", "killed"])
@aio
async def test_law_5_a_clock_set_back_while_it_is_down_makes_nothing_live_again(how: str, tmp_path: Path) -> None:
    clock = ManualClock(START_MS)
    async with house("embedded", tmp_path / "gw", clock=clock) as gateway:
        await put(gateway.client())
        clock.advance(FENCED_AFTER_SECONDS - 1)  # no heartbeat came through
        assert await matched(gateway) == 0
        shutil.copytree(tmp_path / "gw", tmp_path / "killed", ignore=shutil.ignore_patterns("*.sock"))
    folder = tmp_path / ("gw" if how == "in good order" else "killed")
    async with house("embedded", folder, clock=ManualClock(START_MS - HOUR_MS)) as gateway:
        assert await matched(gateway) == 0
        late_s = (gateway.opened.rooms.time.now_ms() - START_MS) / 1000
        expected_s = FENCED_AFTER_SECONDS - (how == "in good order")
        assert expected_s <= late_s < expected_s + 1, "and no more than that"


@aio
async def test_a_right_clock_is_followed_from_the_start(tmp_path: Path) -> None:
    for start_ms in (START_MS, START_MS + 5):
        async with house("embedded", tmp_path / "gw", clock=ManualClock(start_ms)) as gateway:
            assert gateway.opened.rooms.time.now_ms() == start_ms
