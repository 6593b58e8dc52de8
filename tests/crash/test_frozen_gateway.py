"""Law 5 with real processes: gateways that are frozen or killed around a deletion; none answers what is gone."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvgw.breaker import BreakerOptions
from kvgw.client import Client, ClientOptions, connect
from kvgw.model import Durability
from kvgw.reports import Registered
from tests.crash.gateway_process import GatewayProcess
from tests.support.aio import run
from tests.support.gateways import format_of, payloads_of
from tests.support.postgres import Postgres
from tests.support.seaweed import S3Server
from tests.support.several import Footing
from tests.torture.three_gateways import settings_of

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.slow, pytest.mark.timeout(300)]

NAMES = ("a", "b", "c")
READ_S = 30.0
LEASE_S = 8.0
LONGER = f"from kvgw.gateway import coherence as c\nc.LEASE_SECONDS, c.SETTLED_SECONDS = {LEASE_S}, {1.1 * LEASE_S}"
"""So that a machine that is busy does not let leases lapse before they are put to the test."""


@dataclass
class Three:
    """Three gateway processes, with a client of each."""

    shared: Footing
    processes: dict[str, GatewayProcess]
    clients: dict[str, Client]
    registered: Registered
    serial: itertools.count[int]

    async def stored(self) -> list[bytes]:
        """New keys that all gateways have, and answer from memory as far as anybody can see from outside."""
        keys = [f"key-{next(self.serial)}".encode() for _ in range(3)]
        report = await self.clients["a"].put(
            self.registered,
            keys,
            payloads_of(self.registered, 3, seed=next(self.serial)),
            durability=Durability.S3,
            deadline_s=30,
        )
        assert report.stored == 3, report
        ends = time.monotonic() + 4.0
        while time.monotonic() < ends or not await self._all_remember():
            for client in self.clients.values():
                assert (await client.match(self.registered, keys)).count == 3
        return keys

    async def _all_remember(self) -> bool:
        """Whether every gateway that lives has said that it has seen the present version."""
        behind = await self.shared.rows(
            "SELECT 1 FROM gateway_process p CROSS JOIN tenant t LEFT JOIN tenant_version v USING (tenant_id) "
            "LEFT JOIN version_seen s ON s.boot_id = p.boot_id AND s.tenant_id = t.tenant_id "
            "WHERE s.version IS DISTINCT FROM coalesce(v.version, 0)"
        )
        return not behind

    async def delete(self, through: str, keys: list[bytes]) -> int:
        return await self.clients[through].delete(self.registered, keys, deadline_s=30)

    async def check_gone(self, keys: list[bytes]) -> None:
        for name, client in self.clients.items():
            report = await client.match(self.registered, keys)
            assert report.count == 0, f"law 5: {name}"

    async def committed(self, keys: list[bytes]) -> None:
        """Return when the catalog has no entry of these keys any more, acknowledged or not."""
        while await self.shared.rows("SELECT 1 FROM entry"):
            await asyncio.sleep(0.002)


@asynccontextmanager
async def three(shared: Footing) -> AsyncIterator[Three]:
    with ExitStack() as running:
        processes = {}
        for name in NAMES:
            (shared.folder / name).mkdir()
            process = GatewayProcess(shared.folder / name / "data", **settings_of(shared))
            process.prelude = LONGER
            processes[name] = running.enter_context(process)
        async with AsyncExitStack() as stack:
            options = ClientOptions(read_deadline_s=READ_S, breaker=BreakerOptions(failures=2**62))
            clients = {
                name: await stack.enter_async_context(connect(f"unix:{one.socket}", options=options))
                for name, one in processes.items()
            }
            registered = await clients["a"].register(format_of())
            yield Three(shared, processes, clients, registered, itertools.count())


def test_law_5_a_gateway_that_is_frozen_around_a_deletion(
    postgres: Postgres, seaweed: S3Server, tmp_path: Path
) -> None:
    """Frozen before it, while it waits to be acknowledged, and after it; its deleter killed before it acknowledged."""
    shared = Footing(postgres, seaweed, tmp_path)
    shared.prepare()

    async def body() -> None:
        async with three(shared) as site:
            for when in ("before", "while", "after", "killed"):
                keys = await site.stored()
                b = site.processes["b"]
                if when in ("before", "killed"):
                    b.pause()
                if when == "killed":
                    await killed(site, keys)
                else:
                    going = asyncio.create_task(site.delete("a", keys))
                    if when == "while":
                        await site.committed(keys)
                        b.pause()
                    assert await going == 3
                if when == "after":
                    b.pause()
                # Asked while it is frozen, it answers when it goes on: what it read before it froze is not younger.
                asked = asyncio.create_task(site.clients["b"].match(site.registered, keys))
                await asyncio.sleep(0.05)
                b.resume()
                assert (await asked).count == 0, f"law 5: frozen {when}"
                await site.check_gone(keys)

    run(body(), timeout=240)


async def killed(site: Three, keys: list[bytes]) -> None:
    """The deleter dies between commit and acknowledgement, and the deletion is asked for again elsewhere."""
    going = asyncio.create_task(site.delete("a", keys))
    await site.committed(keys)
    site.processes["a"].kill()
    again = await site.delete("c", keys)
    assert again == 0, "it had been committed"
    going.cancel()
    await asyncio.gather(going, return_exceptions=True)
    site.processes["a"].start()
