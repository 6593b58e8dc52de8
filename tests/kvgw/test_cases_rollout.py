"""Fleets that start and change: releases without a common version (R23), ranks in any order (R79), zones (R53)."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import kvgw
from kvgw.breaker import BreakerOptions
from kvgw.client import ClientOptions
from kvgw.errors import FormatError
from kvgw.model import Outcome
from kvgw.reports import Registered
from tests.support.admin import Admin
from tests.support.aio import aio, run
from tests.support.gateways import House, format_of, house, keys_of, payloads_of, read
from tests.support.manual_clock import ManualClock
from tests.support.postgres import Postgres
from tests.support.seaweed import S3Server
from tests.support.served import SMALL_TOML, Served, environment
from tests.support.several import Footing, on_footing

NEWER = "import kvgw.wire as wire; wire.VERSIONS = (2, 3); from kvgw.cli import main; main()"
THIS = "from kvgw.cli import main; main()"


@asynccontextmanager
async def release(code: str, folder: Path) -> AsyncIterator[Served]:
    """A gateway of one release on the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--data", str(folder), "--wait", "10"],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        running = Served(process, folder)
        try:
            await asyncio.to_thread(running.wait_ready)
            yield running
        finally:
            assert await asyncio.to_thread(running.stop) == 0


@pytest.mark.timeout(180)
def test_R23_a_roll_out_to_a_release_without_a_common_version_is_an_outage_that_a_roll_back_heals(
    tmp_path: Path,
) -> None:
    run(rolled_out_and_back(tmp_path / "gw"), timeout=150)


async def rolled_out_and_back(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "kvgw.toml").write_text(SMALL_TOML)
    options = ClientOptions(breaker=BreakerOptions(failures=3))
    async with kvgw.connect(f"unix:{folder / 'kvgw.sock'}", options=options) as client:
        async with release(THIS, folder):
            part = await client.register(format_of())
            payloads = payloads_of(part, 2)
            assert (await client.put(part, keys_of(2), payloads)).stored == 2
        reasons = set()
        async with release(NEWER, folder):
            until = time.monotonic() + 2
            while time.monotonic() < until:  # the engine goes on, as it does
                match = await client.match(part, keys_of(2))
                assert (match.count, match.outcome) == (0, Outcome.OUTAGE), "a miss that is an outage, and no exception"
                report, found = await read(client, part, keys_of(2))
                assert (report.outcome, found) == (Outcome.OUTAGE, [None, None])
                reasons |= {match.reason}
                await asyncio.sleep(0.02)
        assert any("1 to 1" in reason and "2 to 3" in reason for reason in reasons), f"both ranges: {reasons}"
        async with release(THIS, folder):
            until = time.monotonic() + 20
            while (await client.match(part, keys_of(2))).count != 2:
                assert time.monotonic() < until, "all heals after the roll-back"
                await asyncio.sleep(0.05)
            assert (await read(client, part, keys_of(2)))[1] == payloads


@pytest.mark.parametrize("seed", range(4))
@aio
async def test_R79_ranks_start_in_any_order_and_hit_once_all_are_there(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    formats = [format_of(parallel=(4, rank, 1, 0, 1, 0)) for rank in range(4)]
    async with house("unix", tmp_path / "gw") as gateway:
        clients = [gateway.client() for _ in range(4)]
        keys = keys_of(3)
        order = [*chance.sample(range(1, 4), 3), 0]  # rank 0 is late
        registered: dict[int, Registered] = {}
        for rank in order:
            early = await clients[rank].match([*registered.values(), unknown(formats[rank])], keys)
            assert (early.count, early.outcome) == (0, Outcome.OK)
            assert "not registered" in early.reason, "the early one hears why"
            registered[rank] = await clients[rank].register(formats[rank])
            payloads = payloads_of(registered[rank], 3, seed=rank)
            assert (await clients[rank].put(registered[rank], keys, payloads)).stored == 3
        everybody = [registered[rank] for rank in range(4)]
        assert {(await client.match(everybody, keys)).count for client in clients} == {3}
        odd = await clients[2].register(format_of(parallel=(2, 1, 1, 0, 1, 0)))
        match = await clients[2].match([*everybody, odd], keys)
        assert (match.count, match.outcome) == (0, Outcome.OK), "a rank of another size shares nobody's chunks"
        assert (await read(clients[2], odd, keys))[1] == [None] * 3
        with pytest.raises(FormatError, match="rank 4 is not below its size 4"):
            format_of(parallel=(4, 4, 1, 0, 1, 0))


@pytest.mark.postgres
@pytest.mark.s3
@pytest.mark.timeout(180)
def test_R53_no_zone_of_process_or_database_moves_an_expiry(
    postgres: Postgres, seaweed: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the millisecond the same on both databases, each in a zone of its own, and what is shown is UTC."""
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    lives = [1, 2.5, "90s", "5m", 86_400, "30d"]
    found: dict[str, list[int]] = {}

    async def expiries(gateway: House) -> list[int]:
        client, begun, ends = gateway.client(), gateway.now_ms(), []
        part = await client.register(format_of())
        for number, life in enumerate(lives):
            report = await client.put(part, [b"k%d" % number], payloads_of(part, 1, seed=number), ttl=life)
            ends.append(report.expires_ms - begun)
        rows = await gateway.rows("SELECT expires_ms FROM entry ORDER BY expires_ms")
        assert [row[0] - begun for row in rows] == sorted(ends)
        return ends

    async def on_sqlite() -> None:
        async with house("unix", tmp_path / "gw", clock=ManualClock()) as gateway:
            found["sqlite"] = await expiries(gateway)

    async def on_postgres(shared: Footing) -> None:
        postgres.sql(f"ALTER DATABASE \"{shared.database}\" SET timezone TO 'America/New_York'")
        async with shared.gateway("a", clock=ManualClock()) as gateway:
            found["postgresql"] = await expiries(gateway)
            (zone,) = (await gateway.rows("SELECT current_setting('timezone')"))[0]
            assert zone == "UTC", "each connection says its own"

    try:
        run(on_sqlite())
        on_footing(on_postgres)(postgres, seaweed, tmp_path)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert found["sqlite"] == found["postgresql"] == [1000, 2500, 90_000, 300_000, 86_400_000, 30 * 86_400_000]


class SteppedClock(ManualClock):
    """One whose wall clock somebody sets."""

    def step(self, milliseconds: int) -> None:
        self._start_ms += milliseconds


@aio
async def test_S15_no_step_of_the_clock_serves_what_has_expired_or_brings_it_back(tmp_path: Path) -> None:
    """To the last millisecond, an hour back, a year forward, and through a restart with a clock of yesterday."""
    clock = SteppedClock()
    async with house("unix", tmp_path / "gw", clock=clock) as gateway:
        await Admin(gateway.opened).own("POST", "/tenants/-/namespaces", {"name": "fixed", "sliding_ttl": False})
        client = gateway.client("fixed")
        part = await client.register(format_of())
        payloads = payloads_of(part, 2)
        await client.put(part, [b"short"], payloads[:1], ttl=60)
        await client.put(part, [b"long"], payloads[1:], ttl=25 * 86_400)
        clock.advance(59.999)
        assert (await client.match(part, [b"short"])).count == 1
        assert (await read(client, part, [b"short"]))[1] == payloads[:1]
        clock.advance(0.001)
        for moved_ms in (0, -3_600_000, -86_400_000, 7_200_000):
            clock.step(moved_ms)
            assert (await client.match(part, [b"short"])).count == 0, f"law 5: the clock went {moved_ms} ms"
            assert (await read(client, part, [b"short", b"long"]))[1] == [None, payloads[1]]
            clock.step(-moved_ms)
        end_ms = clock.now_ms()
    yesterday = SteppedClock(end_ms - 86_400_000)
    async with house("unix", tmp_path / "gw", clock=yesterday) as gateway:
        client = gateway.client("fixed")
        assert (await read(client, part, [b"short", b"long"]))[1] == [None, payloads[1]], "nor after a restart"
        await gateway.opened.crew.sweep_everywhere()
        yesterday.step(366 * 86_400_000)
        assert (await read(client, part, [b"short", b"long"]))[1] == [None, None]
        await gateway.opened.crew.sweep_everywhere()
        yesterday.step(-366 * 86_400_000)
        assert (await read(client, part, [b"short", b"long"]))[1] == [None, None], "what was swept stays away"


def unknown(one: kvgw.KVFormat) -> Registered:
    """A format that this namespace has not heard of yet."""
    return Registered(one, "", b"f" * 32)
