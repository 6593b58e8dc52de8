"""S05, Q04: a gateway killed again and again in a storm of PUTs loses nothing it has acknowledged and leaks nothing."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import func, select

from kvgw.client import Client
from kvgw.model import StatReply
from kvgw.reports import Registered
from tenancy import registry
from tenancy.engine import sqlite_engine
from tenancy.schema import placement, reservation
from tests.crash.gateway_process import GatewayProcess
from tests.crash.storm import DEADLINE_S, FORMAT, NAMESPACES, client_of, content_of, make_namespaces
from tests.support.aio import run
from tests.tenancy.catalog_bench import check_laws

KILLS = 20
KEYS_MIN = 100
SETTINGS = {
    "MAINTENANCE__SWEEP_SECONDS": 0.5,
    "MAINTENANCE__ORPHANS_SECONDS": 0.5,
    "MAINTENANCE__NVME_ORPHAN_GRACE_SECONDS": DEADLINE_S + 1,
    "NVME__MIN_FREE_BYTES": 0,
}
SETTLE_S = 40.0
"""A reservation lives for its deadline and 5 s; an orphan for its grace after it was seen."""


class Diary:
    """What the storm was told, read as it is written."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.touch()

    def lines(self) -> list[list[str]]:
        whole, _, _ = self.file.read_text().rpartition("\n")
        return [line.split() for line in whole.splitlines()]

    def wait_for(self, more: int, storm: subprocess.Popen[bytes]) -> None:
        """Return when `more` lines have been added."""
        before, deadline = self.file.read_bytes().count(b"\n"), time.monotonic() + 60
        while self.file.read_bytes().count(b"\n") < before + more:
            assert storm.poll() is None, "the storm ended"
            assert time.monotonic() < deadline, "the storm gets no acknowledgement"
            time.sleep(0.001)

    def wait_for_keys(self, least: int, storm: subprocess.Popen[bytes]) -> None:
        """Return when something new has been said, and of that many keys in all: fewer prove nothing."""
        self.wait_for(1, storm)
        while len({(namespace, key) for _, namespace, key in self.lines()}) < least:
            self.wait_for(10, storm)


@contextmanager
def storming(gateway: GatewayProcess, diary: Diary, seed: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.crash.storm", str(gateway.socket), str(diary.file), seed]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kills", [3, pytest.param(KILLS, marks=pytest.mark.slow)])
def test_S05_Q04_nothing_acknowledged_is_lost_in_a_storm_of_kills(tmp_path: Path, kills: int) -> None:
    seed = os.environ.get("KVGW_TEST_SEED") or str(random.SystemRandom().randrange(10**9))
    print(f"seed {seed}; again with KVGW_TEST_SEED={seed}")
    chance = random.Random(seed)
    diary = Diary(tmp_path / "diary")
    gateway = GatewayProcess(tmp_path / "data", **SETTINGS)
    try:
        gateway.start()
        run(make_namespaces(str(gateway.socket)))
        with storming(gateway, diary, seed) as storm:
            for _ in range(kills):
                diary.wait_for(chance.randint(1, 80), storm)
                gateway.kill()
                gateway.start()
            diary.wait_for_keys(KEYS_MIN, storm)
            gateway.kill()  # once more, so that the last acknowledgements meet a crash too
        gateway.start()
        print(f"{len(diary.lines())} acknowledgements")
        run(check_contents(gateway, diary), timeout=120)
        run(settled(gateway), timeout=SETTLE_S + 20)
        assert gateway.stop() == 0
    except BaseException:
        print(gateway.text())
        raise
    finally:
        gateway.kill()
    check_catalog(gateway.data / "catalog.db")


async def check_contents(gateway: GatewayProcess, diary: Diary) -> None:
    """Acknowledged chunks read back bit by bit, acknowledged deletions stay deleted."""
    expected: dict[tuple[str, str], str] = {}
    for what, namespace, key in diary.lines():
        expected[namespace, key] = what
    for namespace in NAMESPACES:
        keys = {key: what for (where, key), what in expected.items() if where == namespace}
        client = client_of(str(gateway.socket), namespace)
        try:
            registered = await client.register(FORMAT)
            wrong = [key for key in keys if not await as_told(client, registered, namespace, key, keys[key])]
        finally:
            await client.aclose()
        assert wrong == [], f"in {namespace}: {[(key, keys[key]) for key in wrong]}"


async def as_told(client: Client, registered: Registered, namespace: str, key: str, told: str) -> bool:
    buffer = bytearray(registered.chunk_bytes)
    report = await client.get(registered, [key.encode()], [buffer], on_error="raise")
    hit = bool(report.hits)
    if hit and buffer != content_of(namespace, key):
        raise AssertionError(f"wrong bytes under {namespace}/{key}")
    return {"stored": hit, "deleted": not hit, "ending": True}[told]


async def settled(gateway: GatewayProcess) -> None:
    """Return when no reservation and no orphan is left: every object is a chunk, and every blob on disk is one."""
    clients = [client_of(str(gateway.socket), namespace) for namespace in NAMESPACES]
    deadline = time.monotonic() + SETTLE_S
    try:
        while True:
            stats = [await client.stat() for client in clients]
            blobs = sum(1 for _ in (gateway.data / "nvme" / "v1").glob("*/??/*"))
            if is_settled(stats, blobs):
                print(f"settled with {blobs} blobs")
                return
            assert time.monotonic() < deadline, f"not settled after {SETTLE_S} s: {stats}, {blobs} blobs on disk"
            await asyncio.sleep(0.1)
    finally:
        for client in clients:
            await client.aclose()


def is_settled(stats: list[StatReply], blobs: int) -> bool:
    return all(one.objects == one.chunks for one in stats) and blobs == sum(one.chunks for one in stats)


def check_catalog(file: Path) -> None:
    """Counters equal rows; nothing is reserved, nothing is half-way."""
    engine = sqlite_engine(file)
    try:
        with engine.begin() as connection:
            ((tenant, _),) = registry.tenants(connection)
            check_laws(connection, [one.scope for one in registry.namespaces(connection, tenant)])
            assert connection.scalar(select(func.count()).select_from(reservation)) == 0
            states = connection.execute(select(placement.c.tier, placement.c.state).distinct()).all()
            assert [tuple(row) for row in states] == [("nvme", "ok")]
    finally:
        engine.dispose()
