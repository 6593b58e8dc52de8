"""N08: client, gateway, database and S3 lose each other, link by link and together; then everything comes back."""

from __future__ import annotations

import itertools
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvgw.breaker import BreakerOptions
from kvgw.client import Client, ClientOptions
from kvgw.endpoint import TcpEndpoint
from kvgw.errors import Outage
from kvgw.model import Durability, Outcome, PutOutcome
from kvgw.reports import Registered
from kvgw.settings import KeySettings
from kvgw.transport import SocketTransport
from tests.kvgw.test_cases_catalog import cool_down
from tests.support.aio import run
from tests.support.gateways import House, format_of, keys_of, payloads_of, read, take_up_backlog
from tests.support.postgres import Postgres
from tests.support.proxy import Proxy
from tests.support.seaweed import S3Server
from tests.support.several import Footing

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.timeout(300)]

LINKS = ("client", "database", "s3")
DEADLINE_S = 1.0
SUBSETS = [cut for size in (1, 2, 3) for cut in itertools.combinations(LINKS, size)]


@dataclass
class Site:
    """One gateway all of whose links can be cut."""

    gateway: House
    proxies: dict[str, Proxy]
    client: Client
    part: Registered
    payloads: list[bytes]

    async def ask(self, cut: tuple[str, ...], turn: int) -> dict[str, str]:
        """What became of each kind of call: "ok", or "outage" within the deadline."""
        found, keys = {}, keys_of(3)
        started = time.monotonic()
        match = await self.client.match(self.part, keys, deadline_s=DEADLINE_S)
        found["match"] = "ok" if (match.outcome, match.count) == (Outcome.OK, 3) else "outage"
        for name, key in (("hot", keys[0]), ("cold", keys[2])):
            report = await self._get(key, name)
            found[name] = report
        for durability in (Durability.NVME, Durability.S3):
            new = [f"{turn}-{durability}".encode()]
            payload = payloads_of(self.part, 1, seed=100 + 2 * turn + (durability is Durability.S3))
            put = await self.client.put(self.part, new, payload, durability=durability, deadline_s=DEADLINE_S)
            found[f"put {durability.value}"] = "ok" if put.outcomes == (PutOutcome.STORED,) else "outage"
        try:
            await self.client.delete(self.part, [b"nothing"], deadline_s=DEADLINE_S)
        except Outage:
            found["delete"] = "outage"
        else:
            found["delete"] = "ok"
        assert time.monotonic() - started < 6 * (DEADLINE_S + 1), f"law 9: {cut}"
        return found

    async def _get(self, key: bytes, name: str) -> str:
        buffer = bytearray(self.part.chunk_bytes)
        report = await self.client.get(self.part, [key], [buffer], deadline_s=DEADLINE_S)
        if report.hits:
            assert bytes(buffer) == self.payloads[0 if name == "hot" else 2], "law 3"
            return "ok"
        return "outage"


def expected(cut: tuple[str, ...]) -> dict[str, str]:
    """Without S3 what is here is read, and taken if it need not go there; without the catalog nothing is announced."""
    names = ("match", "hot", "cold", "put nvme", "put s3", "delete")
    lost = set(names) if {"client", "database"} & set(cut) else {"cold", "put s3"}
    return {name: "outage" if name in lost else "ok" for name in names}


@pytest.mark.parametrize(
    "cuts", [SUBSETS[:3], pytest.param(SUBSETS[3:], marks=pytest.mark.slow)], ids=["each", "together"]
)
def test_N08_links_are_cut(cuts: list[tuple[str, ...]], postgres: Postgres, seaweed: S3Server, tmp_path: Path) -> None:
    shared = Footing(postgres, seaweed, tmp_path)
    shared.prepare()
    run(partitions(shared, cuts), timeout=280)


async def partitions(shared: Footing, cuts: list[tuple[str, ...]]) -> None:
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(Proxy(shared.server.port))
        s3 = await stack.enter_async_context(Proxy(int(shared.s3.endpoint.rpartition(":")[2])))
        # Keys in a folder: those in S3 would be cut off with it.
        plain = shared.settings(port=database.port, keys=KeySettings(dir=str(shared.folder / "keys")))
        settings = replace(plain, s3=replace(plain.s3, endpoint=f"http://127.0.0.1:{s3.port}"))
        gateway = await stack.enter_async_context(shared.gateway("a", settings=settings, tcp=True))
        assert isinstance(gateway.endpoint, TcpEndpoint)
        link = await stack.enter_async_context(Proxy(gateway.endpoint.port))
        transport = SocketTransport(TcpEndpoint("127.0.0.1", link.port), gateway.token)
        # A client that never gives the gateway up, so that each call says for itself what became of it.
        client = Client(transport, ClientOptions(breaker=BreakerOptions(failures=2**62)))
        gateway._clients.append(client)  # which closes it
        await gateway.opened.crew.heartbeat()
        part = await client.register(format_of())
        site = Site(gateway, {"client": link, "database": database, "s3": s3}, client, part, payloads_of(part, 3))
        await cool(site)
        for turn, cut in enumerate(cuts):
            await gateway.opened.crew.heartbeat()
            for name in cut:
                site.proxies[name].freeze()
            assert await site.ask(cut, turn) == expected(cut), cut
            for name in cut:
                site.proxies[name].thaw()
            await back(site, cut)
        await shared.check_clean(gateway)


async def cool(site: Site) -> None:
    """Three chunks, of which the last is only in S3 and the others are also here."""
    keys, crew = keys_of(3), site.gateway.opened.crew
    put = await site.client.put(site.part, keys[2:], site.payloads[2:], durability=Durability.S3, deadline_s=20)
    assert put.stored == 1, put
    await take_up_backlog(crew)
    cool_down(site.gateway)
    put = await site.client.put(site.part, keys[:2], site.payloads[:2], durability=Durability.S3, deadline_s=20)
    assert put.stored == 2, put


async def back(site: Site, cut: tuple[str, ...]) -> None:
    """All is well again within ten seconds; then the cold one is cold again."""
    until = time.monotonic() + 10
    while True:
        await site.gateway.opened.crew.heartbeat()
        report, found = await read(site.client, site.part, keys_of(3))
        if report.outcome is Outcome.OK and found == site.payloads:
            break
        assert time.monotonic() < until, f"{cut}: {report.reason}"
    await take_up_backlog(site.gateway.opened.crew)
    (name,) = await site.gateway.rows(
        "SELECT object FROM placement WHERE tier = 's3' AND state = 'ok' AND blob_id IN "
        "(SELECT blob_id FROM chunk ORDER BY created_ms LIMIT 1)"
    )
    file = site.gateway.opened.folder / "nvme" / name[0]
    file.unlink(missing_ok=True)
    site.gateway.opened.rooms.staging.drop(name[0])
