"""What a catalog's neighbours do to it: a shell that holds SQLite (R49), a slow S3 beside a small pool (R73)."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvgw.errors import KvgwError
from kvgw.model import Durability, Outcome, PutOutcome
from kvgw.settings import CatalogSettings, KeySettings
from kvgw.wiring.catalog import log_bytes
from tenancy import engine
from tests.support.aio import aio, run
from tests.support.catalogs import APP_ROLE
from tests.support.gateways import MIB, House, format_of, house, keys_of, payloads_of, read, take_up_backlog
from tests.support.proxy import Proxy
from tests.support.several import Footing, on_footing

WAL_LIMIT = MIB


def outside(folder: Path) -> sqlite3.Connection:
    """An operator's shell on the catalog."""
    return sqlite3.connect(folder / "catalog.db", isolation_level=None, timeout=10)


def wal_bytes(gateway: House, folder: Path) -> int:
    """The log's length, which the metric says too."""
    log = folder / "catalog.db-wal"
    while True:
        before = log.stat().st_size
        gateway.opened.refresh_gauges()
        told = gateway.opened.rooms.metrics.registry.get_sample_value("kvgw_catalog_log_bytes")
        if log.stat().st_size == before:  # maintenance wrote nothing meanwhile
            assert told == before, "R49: a metric"
            return before


async def churn(gateway: House, turns: int, name: str) -> None:
    """Puts and deletions that are all acknowledged."""
    client = gateway.client()
    part = await client.register(format_of(256))
    for turn in range(turns):
        keys = keys_of(16, f"{name}-{turn}")
        report = await client.put(part, keys, payloads_of(part, 16, seed=turn), durability=Durability.STAGED)
        assert report.stored == 16, report
        assert await client.delete(part, keys) == 16


@aio
async def test_R49_before_its_first_write_the_log_has_no_bytes(tmp_path: Path) -> None:
    assert log_bytes(CatalogSettings(), tmp_path) == 0
    assert log_bytes(CatalogSettings(url="postgresql://db/kvgw"), tmp_path) == 0
    (tmp_path / "other.db-wal").write_bytes(b"12345")
    assert log_bytes(CatalogSettings(file=str(tmp_path / "other.db")), tmp_path / "gw") == 5


@pytest.mark.timeout(180)
@aio
async def test_R49_an_outside_reader_stops_no_write_and_the_log_shrinks_when_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_WAL_LIMIT_BYTES", WAL_LIMIT)
    monkeypatch.setattr(engine, "_CHECKPOINT_PAGES", 1_000)
    folder = tmp_path / "gw"
    async with house("unix", folder) as gateway:
        await churn(gateway, 1, "before")
        shell = outside(folder)
        shell.execute("BEGIN")
        (before,) = shell.execute("SELECT count(*) FROM entry").fetchone()
        grown = 0
        while grown < 6 * WAL_LIMIT:  # SQLite tries to check-point each 4 MiB here
            await churn(gateway, 4, f"while-{grown}")
            assert wal_bytes(gateway, folder) > grown, "nothing can be check-pointed behind the reader"
            grown = wal_bytes(gateway, folder)
        assert shell.execute("SELECT count(*) FROM entry").fetchone() == (before,), "its view stood still"
        shell.close()
        await churn(gateway, 2, "after")
        assert wal_bytes(gateway, folder) <= WAL_LIMIT, "law 9: back under its limit with the next writes"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_R49_a_minute_of_an_outside_reader_costs_no_write_and_the_log_is_short_again_within_a_minute(
    tmp_path: Path,
) -> None:
    run(a_minute_of_a_reader(tmp_path / "gw"), timeout=390)


async def a_minute_of_a_reader(folder: Path) -> None:
    """With the limits of the product; at least 20,000 entries are put and deleted meanwhile."""
    async with house("unix", folder) as gateway:
        await churn(gateway, 1, "before")
        shell = outside(folder)
        shell.execute("BEGIN")
        shell.execute("SELECT count(*) FROM entry").fetchone()
        started, turns = time.monotonic(), 0
        while time.monotonic() - started < 60 or turns < 20_000 / 16:
            await churn(gateway, 10, f"while-{turns}")
            turns += 10
        grown = wal_bytes(gateway, folder)
        shell.close()
        until = time.monotonic() + 60
        while wal_bytes(gateway, folder) > engine._WAL_LIMIT_BYTES:
            assert time.monotonic() < until, "law 9: back under its limit within a minute"
            await churn(gateway, 1, f"after-{time.monotonic()}")
        print(f"R49: {16 * turns} entries put and deleted, the log grew to {grown / MIB:.0f} MiB and is short again")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("held_s", [3.0, pytest.param(20.0, marks=pytest.mark.slow)])
def test_R49_while_an_outside_writer_holds_the_lock_calls_end_in_time_and_deletions_say_so(
    tmp_path: Path, held_s: float
) -> None:
    run(locked_out(tmp_path / "gw", held_s), timeout=170)


async def locked_out(folder: Path, held_s: float) -> None:
    async with house("unix", folder) as gateway:
        client = gateway.client()
        part = await client.register(format_of(256))
        keys, payloads = keys_of(8), payloads_of(part, 8)
        await client.put(part, keys[:4], payloads[:4])
        shell = outside(folder)
        shell.execute("BEGIN IMMEDIATE")
        until = time.monotonic() + held_s
        while time.monotonic() < until:
            started = time.monotonic()
            report = await client.put(part, keys[4:], payloads[4:], deadline_s=0.5)
            assert report.stored == 0
            assert report.reason
            match = await client.match(part, keys, deadline_s=0.5)
            assert match.outcome is Outcome.OUTAGE or match.count == 4
            with pytest.raises(KvgwError):
                await client.delete(part, keys[:1], deadline_s=0.5)  # law 2: a deletion never pretends
            assert time.monotonic() - started < 3 * 0.5 + 2, "law 9"
        shell.execute("ROLLBACK")
        shell.close()
        # The deletion that was refused may still have been carried out: its answer was only late.
        until = time.monotonic() + 60
        while (await client.put(part, keys, payloads)).outcomes.count(PutOutcome.HAVE) < 8:
            assert time.monotonic() < until, "the client's breaker and the gateway's fence let go by themselves"
            await asyncio.sleep(0.05)
        assert (await read(client, part, keys))[1] == payloads, "all works again without a restart"
        assert await client.delete(part, keys) == 8


BUSY = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    f"AND usename = '{APP_ROLE}' AND state <> 'idle'"
)


def cool_down(gateway: House) -> None:
    """Leave the chunks in S3 alone."""
    for file in (gateway.opened.folder / "nvme" / "v1").glob("*/??/*"):
        file.unlink()
        gateway.opened.rooms.staging.drop("/".join(file.parts[-4:]))


@pytest.mark.postgres
@pytest.mark.s3
@pytest.mark.timeout(180)
@on_footing
async def test_R73_no_connection_to_the_database_is_held_while_s3_is_waited_for(shared: Footing) -> None:
    async with Proxy(int(shared.s3.endpoint.rpartition(":")[2])) as slow:
        # Keys in a folder: those in S3 would be waited for too.
        plain = shared.settings(keys=KeySettings(dir=str(shared.folder / "keys")))
        settings = replace(plain, s3=replace(plain.s3, endpoint=f"http://127.0.0.1:{slow.port}"))
        async with shared.gateway("a", settings=settings) as gateway:
            await gateway.opened.crew.heartbeat()
            readers = [gateway.client() for _ in range(20)]
            part = await readers[0].register(format_of())
            keys, payloads = keys_of(40), payloads_of(part, 40)
            assert (await readers[0].put(part, keys, payloads, durability=Durability.S3)).stored == 40
            await take_up_backlog(gateway.opened.crew)
            cool_down(gateway)
            slow.freeze()
            gets = [
                asyncio.create_task(read(reader, part, keys[2 * at : 2 * at + 2])) for at, reader in enumerate(readers)
            ]
            asks = gateway.client()
            took, busy, until = [], [], time.monotonic() + 2
            while time.monotonic() < until:
                started = time.monotonic()
                match = await asks.match(part, keys[:10])
                took.append(time.monotonic() - started)
                assert (match.outcome, match.count) == (Outcome.OK, 10), match.reason
                busy.append((await shared.rows(BUSY))[0][0])
                await asyncio.sleep(0.02)
            assert not any(task.done() for task in gets), "they wait for S3"
            assert await asks.delete(part, keys[39:]) == 1, "deletions go on"
            assert sorted(took)[len(took) // 2] < 0.5, f"matches are not held up: {took}"
            assert sorted(busy)[len(busy) // 2] == 0, f"no connection is held through the wait: {busy}"
            slow.thaw()
            for at, task in enumerate(gets):
                _, found = await task
                assert all(one in (None, payloads[2 * at + index]) for index, one in enumerate(found))
                assert at == 19 or None not in found
