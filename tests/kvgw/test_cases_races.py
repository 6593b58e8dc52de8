"""Clients that race: leases against room (R01), a late end against a new beginning (R03), for one key (R21)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvgw.client import Client
from kvgw.errors import Code
from kvgw.gateway.leases import RENEWALS_MAX, REST_S
from kvgw.gateway.put import LEASE_MARGIN_MS
from kvgw.model import Durability, PutOutcome, PutRequest
from kvgw.reports import Registered
from kvgw.settings import DefaultSettings, NvmeSettings
from kvgw.wire import Failure, Kind, Wanted, decode
from tenancy.sealing import sealed_length
from tests.support.admin import Admin
from tests.support.aio import aio, run
from tests.support.gateways import MIB, SMALL, House, format_of, house, keys_of, payloads_of, read
from tests.support.manual_clock import ManualClock
from tests.support.raw_peer import RawPeer

STORED, HAVE, OVER_QUOTA = PutOutcome.STORED, PutOutcome.HAVE, PutOutcome.OVER_QUOTA
CHUNK = 64 * 1024
MINUTE_MS = 60_000
STAGED = replace(SMALL, defaults=DefaultSettings(durability="staged"))


class Matching:
    """Four clients that ask for the same keys, with the longest lease, every few milliseconds."""

    def __init__(self, gateway: House, registered: Registered, keys: list[bytes], namespace: str = "") -> None:
        self._clients = [gateway.client(namespace) for _ in range(4)]
        self._registered, self._keys = registered, keys
        self._done = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.asked = 0

    async def __aenter__(self) -> Matching:
        self._tasks = [asyncio.create_task(self._ask(client)) for client in self._clients]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._done.set()
        await asyncio.gather(*self._tasks)

    async def _ask(self, client: Client) -> None:
        while not self._done.is_set():
            await client.match(self._registered, self._keys, lease_ms=MINUTE_MS)
            self.asked += 1
            await asyncio.sleep(0.005)

    async def often(self) -> None:
        """Return when every lease was stretched as often as may be."""
        reached = self.asked + 4 * (RENEWALS_MAX + 2)
        async with asyncio.timeout(20):
            while self.asked < reached:
                await asyncio.sleep(0.005)


@pytest.mark.timeout(180)
@aio
async def test_R01_leases_of_clients_that_ask_without_end_hold_no_quota(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as gateway:
        limit = 64 * sealed_length(CHUNK)
        wanted = {"name": "full", "limit_bytes": limit, "over_quota": "make_room"}
        await Admin(gateway.opened).own("POST", "/tenants/-/namespaces", wanted)
        scope = (await gateway.place("full")).scope
        client = gateway.client("full")
        part = await client.register(format_of(CHUNK))
        keys = keys_of(64)
        assert (await client.put(part, keys, payloads_of(part, 64))).stored == 64
        async with Matching(gateway, part, keys, "full") as crowd:
            await crowd.often()
            gateway.opened.refresh_gauges()
            leased = gateway.opened.rooms.metrics.registry.get_sample_value("kvgw_match_leases")
            assert leased == 64, "R01: how many are leased can be seen"
            stored = 0
            for number in range(32):
                report = await client.put(
                    part, [b"new-%d" % number], payloads_of(part, 1, seed=number + 9), deadline_s=5
                )
                assert report.outcomes == (STORED,) or (report.outcomes == (OVER_QUOTA,) and "quota" in report.reason)
                stored += report.stored
                usage, *_ = await gateway.opened.rooms.catalog.usage(scope)
                assert usage.stored_bytes <= limit, "law 4: what is reserved counts"
            assert stored == 32, "a match lease is a shield on the disk, and no claim on quota"


@pytest.mark.timeout(180)
@aio
async def test_R01_leases_of_clients_that_ask_without_end_hold_the_disk_for_a_bounded_time(tmp_path: Path) -> None:
    """Law 9. A disk that is full of leased chunks refuses, and takes what is new when the leases had to end."""
    settings = replace(SMALL, nvme=NvmeSettings(capacity_bytes=4 * MIB, min_free_bytes=0))
    async with house("unix", tmp_path / "gw", clock=ManualClock(), settings=settings) as gateway:
        client = gateway.client()
        part = await client.register(format_of(CHUNK))
        old = 4 * MIB // sealed_length(CHUNK)
        for number in range(old):
            assert (await client.put(part, [b"old-%d" % number], payloads_of(part, 1, seed=number))).stored
        async with Matching(gateway, part, [b"old-%d" % number for number in range(old)]) as crowd:
            await crowd.often()
            seconds = 0
            while True:
                report = await client.put(part, [b"new"], payloads_of(part, 1, seed=999), durability=Durability.NVME)
                if report.stored:
                    break
                assert "NVMe" in report.reason, "and says what is full"
                seconds += 1
                assert seconds <= MINUTE_MS / 1000 + REST_S, "leases were stretched for ever"
                await gateway.wait(1.0)
                await gateway.opened.crew.evict()
                await gateway.opened.crew.sweep_everywhere()
            assert seconds >= MINUTE_MS / 1000 - 1, "a lease that was given holds"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("turns", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_R03_the_held_end_of_a_put_whose_time_was_over_changes_nothing_of_the_next(tmp_path: Path, turns: int) -> None:
    run(late_ends(tmp_path / "gw", turns), timeout=170)


async def late_end(
    gateway: House, request: PutRequest, content: list[bytes], early: int, then: Callable[[], Awaitable[None]]
) -> Failure:
    """Send `early` chunks of a PUT in time, let its time pass, do `then`, send the rest; how it ends."""
    assert gateway.endpoint is not None
    with closing(await RawPeer.connect(gateway.endpoint)) as peer:

        async def send(index: int) -> None:
            await peer.send(Kind.DATA, 1, index=index, payload_bytes=len(content[index]))
            await peer.send_bytes(content[index])

        assert await peer.hello(gateway.token)
        await peer.send(Kind.REQUEST, 1, request)
        asked = await peer.receive()
        assert asked is not None
        assert decode(asked[1], Wanted).indices == list(range(len(content)))
        for index in range(early):
            await send(index)
        await gateway.wait((MINUTE_MS + LEASE_MARGIN_MS) / 1000 + 1)
        await then()
        for index in range(early, len(content)):
            await send(index)
        return await peer.failure()


async def late_ends(folder: Path, turns: int) -> None:
    """Each turn: a PUT of X is held half way, its reservation ends, Y is put, and then the rest of X comes."""
    async with house("unix", folder, clock=ManualClock(), settings=STAGED) as gateway:
        client = gateway.client()
        part = await client.register(format_of())
        for turn in range(turns):
            keys = keys_of(2, f"turn-{turn}")
            old, new = payloads_of(part, 2, seed=2 * turn), payloads_of(part, 2, seed=2 * turn + 1)
            if turn % 3 == 0:
                new = old  # the content that the late one has too

            async def then(keys: list[bytes] = keys, new: list[bytes] = new) -> None:
                await gateway.opened.crew.sweep_everywhere()
                assert (await client.put(part, keys, new, durability=Durability.NVME)).outcomes == (STORED, STORED)

            request = PutRequest(part.fingerprint, keys, deadline_ms=MINUTE_MS)
            failure = await late_end(gateway, request, old, turn % 2, then)
            assert failure.code is Code.RESERVATION_EXPIRED, failure
            assert (await read(client, part, keys))[1] == new, "R03: never the late one's bytes, never a mixture"
            await gateway.check_clean()
        stat = await client.stat()
        assert stat.objects == stat.entries == stat.chunks == 2 * turns, "of the late ones nothing is left"
        tier = gateway.opened.rooms.tiers["nvme"]
        assert len([blob async for blob in tier.scan()]) == 2 * turns, "nor a blob"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("turns", [8, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "different"])
def test_R21_of_eight_clients_with_the_same_keys_one_wins_each(tmp_path: Path, turns: int, equal: bool) -> None:
    run(eight_writers(tmp_path / "gw", turns, equal), timeout=170)


async def eight_writers(folder: Path, turns: int, equal: bool) -> None:
    chance = random.Random(21)
    async with house("unix", folder) as gateway:
        clients = [gateway.client() for _ in range(8)]
        part = await clients[0].register(format_of())
        for turn in range(turns):
            keys = keys_of(32, f"turn-{turn}")
            told = [payloads_of(part, 32, seed=turn if equal else 100 * turn + writer) for writer in range(8)]

            async def put(writer: int, keys: list[bytes] = keys, told: list[list[bytes]] = told) -> list[PutOutcome]:
                for _ in range(chance.randrange(8)):
                    await asyncio.sleep(0)
                report = await clients[writer].put(part, keys, told[writer], durability=Durability.NVME)
                return list(report.outcomes)

            outcomes = await asyncio.gather(*(put(writer) for writer in range(8)))
            _, found = await read(clients[0], part, keys)
            for index in range(32):
                met = [each[index] for each in outcomes]
                assert met.count(STORED) == 1, f"one write wins: {met}"
                assert set(met) <= {STORED, HAVE} | (set() if equal else {PutOutcome.CONFLICT})
                assert found[index] == told[met.index(STORED)][index], "and its bytes are what is read"
        await gateway.check_clean()
        stat = await clients[0].stat()
        assert stat.objects == stat.entries == 32 * turns
        unfinished = folder / "nvme" / "tmp"
        assert not unfinished.is_dir() or not list(unfinished.iterdir()), "no temporary file is left"
