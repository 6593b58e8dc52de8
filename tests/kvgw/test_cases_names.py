"""R69: thousands of tenants, and names that are hostile, make no series, and cost a scrape nothing."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from tests.kvgw.test_http import lint
from tests.support.admin import Admin
from tests.support.aio import run
from tests.support.gateways import House, format_of, house, payloads_of, read

NAMESPACES = ("default", "second", "third")
HOSTILE = ["a\nkvgw_up 1", 'a"} 1', "a\\", "{a}", "ä" * 1024, "x" * 1024, "", " ", "a\x00b"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tenants", [8, pytest.param(150, marks=pytest.mark.slow)])
def test_R69_series_and_scrapes_do_not_grow_with_tenants_and_their_names(tmp_path: Path, tenants: int) -> None:
    run(many(tmp_path / "gw", tenants), timeout=880)


async def many(folder: Path, tenants: int) -> None:
    async with house("tcp", folder) as gateway:
        admin = Admin(gateway.opened)
        for name in HOSTILE:
            assert (await admin.ask("POST", "/v1/tenants", {"name": name}, peer=_owner())).status_code in (400, 422)
            wanted = {"name": name}
            answer = await admin.ask("POST", "/v1/tenants/-/namespaces", wanted, peer=_owner())
            assert answer.status_code in (400, 422), f"{name!r:.20}"
        await traffic(gateway, admin, 0, 5)
        await delete(gateway, admin, [4])
        await turns(gateway)
        before, _ = scrape(gateway)
        await traffic(gateway, admin, 5, tenants)
        await turns(gateway)
        after, took = scrape(gateway)
        assert after == before, "the number of series does not grow with tenants"
        assert took < 1.0
        process, held = psutil.Process(), []
        for turn in range(2):
            await traffic(gateway, admin, 10_000 * (turn + 1), 10_000 * (turn + 1) + tenants // 4)
            gc.collect()
            held.append(process.memory_info().rss)
        assert held[1] - held[0] < 16 * 2**20, "what a tenant leaves in memory is bounded"
        await delete(gateway, admin, range(5, min(tenants, 60) * 9 // 10))
        await turns(gateway)
        gone, took = scrape(gateway)
        assert gone == before
        print(f"R69: {tenants} tenants, {len(before)} series, a scrape takes {took * 1e3:.1f} ms")


def _owner() -> int:
    return psutil.Process().uids().effective


async def traffic(gateway: House, admin: Admin, start: int, end: int) -> None:
    """New tenants, each with a put and a get in three namespaces."""
    for number in range(start, end):
        name = f"tenant-{number}"
        await admin.own("POST", "/tenants", {"name": name})
        for namespace in NAMESPACES[1:]:
            await admin.own("POST", f"/tenants/{name}/namespaces", {"name": namespace})
        wanted = {"name": "engine", "permissions": ["chunk:get", "chunk:put"]}
        token = (await admin.own("POST", f"/tenants/{name}/tokens", wanted))["token"]
        for namespace in NAMESPACES:
            client = gateway.client(namespace, token=token)
            part = await client.register(format_of(64))
            assert (await client.put(part, [b"k"], payloads_of(part, 1, seed=number))).stored == 1
            assert (await read(client, part, [b"k", b"miss"]))[1] == [payloads_of(part, 1, seed=number)[0], None]
            await client.aclose()


async def delete(gateway: House, admin: Admin, numbers: Iterable[int]) -> None:
    """Tenants with all they have; what is theirs is gone afterwards."""
    for number in numbers:
        name = f"tenant-{number}"
        await admin.own("POST", f"/tenants/{name}/deletions", query={"confirm": name})
    for _ in range(6):
        await gateway.opened.crew.go_on_deleting()
        await gateway.opened.crew.sweep_everywhere()
    left = {one["name"] for one in await admin.own("GET", "/tenants")}
    assert not left & {f"tenant-{number}" for number in numbers}


async def turns(gateway: House) -> None:
    """Every job's series are there from its first turn."""
    crew = gateway.opened.crew
    for job in (crew.heartbeat, crew.drain_everywhere, crew.sweep_everywhere, crew.evict, crew.look_for_orphans):
        await job()
    await crew.go_on_deleting()


def scrape(gateway: House) -> tuple[set[object], float]:
    """The names and labels of all series, and what it took to write them, in seconds."""
    started = time.monotonic()
    gateway.opened.refresh_gauges()
    text = gateway.opened.rooms.metrics.exposition().decode()
    return set(lint(text)), time.monotonic() - started
