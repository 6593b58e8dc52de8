"""Networks that fail: two gateways over one PostgreSQL and one S3, each behind a proxy, under the load of four tenants.

Every few seconds something happens: a toxic on a link, or a kill or a stop of a gateway, of PostgreSQL or of S3. What
was acknowledged as in S3 must be there, and what was deleted must not be, through either gateway.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil

from kvgw.client import Client, connect
from kvgw.errors import Outage
from kvgw.model import Durability
from kvgw.settings import DefaultSettings
from tests.support.gateways import MIB
from tests.support.postgres import Postgres
from tests.support.seaweed import Seaweed, free_ports
from tests.support.several import Footing
from tests.torture.figures import Figures
from tests.torture.ground import OPTIONS, embedded_clients, look_through, make_tenants, reopened, settle
from tests.torture.load import Load
from tests.torture.nursery import Nursery
from tests.torture.storm import Gateway, look_at_quiet
from tests.torture.three_gateways import END_LEASES, UNSETTLED
from tests.torture.toxics import Toxic, ToxicProxy

NAMES: Final = ("near", "far")
CALM_S: Final = (0.3, 1.2)
TOXIC_S: Final = (0.5, 2.0)
STOP_S: Final = (0.3, 2.0)
SETTLE_S: Final = 90.0
HARMLESS: Final = tuple(one for one in Toxic if one not in (Toxic.CORRUPT, Toxic.DUPLICATE))
"""What a link without checksums of its own must survive without a loss; the others stand for broken TLS."""
END_LEADS: Final = "UPDATE maintenance_lease SET until_ms = 0 RETURNING 1"
"""Jobs for all are free again: who did them has ended."""
CLAIMS_S: Final = 15.0
END_CLAIMS: Final = "UPDATE placement SET lease_ms = 0 WHERE state = 'writing' RETURNING 1"
"""A claim whose commit was done and whose answer got lost is nobody's until its two minutes are over: let them be."""

Event = Callable[[], Awaitable[None]]


class Network:
    """The whole set-up."""

    def __init__(self, folder: Path, seed: str) -> None:
        self.figures = Figures()
        self._folder = folder
        self._rng = random.Random(f"{seed}/network")
        self._seed = seed
        self._gateways: dict[str, Gateway] = {}
        self._clients: dict[tuple[str, str], Client] = {}
        self._proxies: dict[str, ToxicProxy] = {}
        self._idle: dict[str, tuple[int, int]] = {}
        self._tokens: dict[str, str] = {}

    async def run(
        self, shared: Footing, postgres: Postgres, seaweed: Seaweed, nursery: Nursery, seconds: float
    ) -> None:
        async with AsyncExitStack() as stack:
            port = free_ports("gateway")["gateway"]
            targets = {"S3": int(seaweed.endpoint.rpartition(":")[2]), "PostgreSQL": postgres.port, "client": port}
            for name, target in targets.items():
                proxy = ToxicProxy(target, self._rng)
                self._proxies[name] = await stack.enter_async_context(proxy)
            await self._begin(shared, nursery, port)
            load = Load("n", self._seed, self.figures, self._client, durable=[Durability.S3], workers=2)
            working = asyncio.create_task(load.run())
            try:
                await self._weather(postgres, seaweed, time.monotonic() + seconds)
                await load.pause()
                await self._settle(shared)
                await self._forget_clients()
                for name, gateway in self._gateways.items():
                    await look_at_quiet(gateway, self.figures, self._idle[name], name)
                for name in NAMES:
                    load.client_of = lambda tenant, name=name: self._client_of(name, tenant)
                    await load.read_back()
            finally:
                load.end()
                await working
                await self._forget_clients()
            await self._end(shared, seaweed, load)

    async def _begin(self, shared: Footing, nursery: Nursery, port: int) -> None:
        async with reopened(self._settings(shared), self._folder / NAMES[0]) as gateway:
            self._tokens = await make_tenants(gateway)
        for name in NAMES:
            listen = f"127.0.0.1:{port}" if name == "far" else ""
            settings = self._environment(shared) | {"SERVER__LISTEN": listen}
            gateway = Gateway(self._folder / name, nursery, self._tokens, settings)
            self._gateways[name] = gateway
            await gateway.start()
        await asyncio.sleep(3.0)
        self._idle = {name: await gateway.holds() for name, gateway in self._gateways.items()}

    @staticmethod
    def _settings(shared: Footing) -> Any:
        return shared.settings(defaults=DefaultSettings(durability="staged"))

    def _environment(self, shared: Footing) -> dict[str, str]:
        """The gateways' settings as variables, everything behind its proxy."""
        settings = self._settings(shared)
        return {
            "SERVER__HTTP": "",
            "CATALOG__URL": shared.url(port=self._proxies["PostgreSQL"].port),
            "CATALOG__POOL": "4",
            "DEFAULTS__DURABILITY": "staged",
            "KEYS__DIR": settings.keys.dir,
            "KEYS__STORE": "s3",
            "KEYS__S3_PREFIX": settings.keys.s3_prefix,
            "S3__BUCKET": shared.s3.bucket,
            "S3__PREFIX": settings.s3.prefix,
            "S3__ENDPOINT": f"http://127.0.0.1:{self._proxies['S3'].port}",
            "S3__ADDRESSING": "path",
            "S3__ACCESS_KEY_ID": shared.s3.access_key,
            "S3__SECRET_ACCESS_KEY_FILE": str(shared.folder / "secret"),
            "S3__REQUEST_SECONDS": "2",
            "STAGING__BYTES": str(16 * MIB),
            "NVME__CAPACITY_BYTES": str(256 * MIB),
            "NVME__MIN_FREE_BYTES": "0",
            "MAINTENANCE__OUTBOX_SECONDS": "0.5",
            "MAINTENANCE__SWEEP_SECONDS": "1",
            "MAINTENANCE__HEARTBEAT_SECONDS": "1",
            "MAINTENANCE__ORPHANS_SECONDS": "10",
        }

    # Clients

    def _client(self, tenant: str) -> Client:
        return self._client_of(self._rng.choice(NAMES), tenant)

    def _client_of(self, name: str, tenant: str) -> Client:
        gateway = self._gateways[name]
        if not gateway.pid:
            raise Outage(f"{name} is not running")
        if (name, tenant) not in self._clients:
            proxied = f"tcp:127.0.0.1:{self._proxies['client'].port}"
            endpoint = proxied if name == "far" else gateway.endpoint
            self._clients[name, tenant] = connect(endpoint, token=self._tokens[tenant], options=OPTIONS)
        return self._clients[name, tenant]

    async def _forget_clients(self) -> None:
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()

    # What happens

    async def _weather(self, postgres: Postgres, seaweed: Seaweed, ends: float) -> None:
        events: list[tuple[float, Event]] = [
            (5.0, self._toxic),
            (3.0, self._kill_gateway),
            (1.0, self._stop_gateway),
            (1.0, lambda: self._kill_server("PostgreSQL", postgres)),
            (1.0, lambda: self._stop_server("PostgreSQL", postgres)),
            (0.7, lambda: self._kill_server("S3", seaweed)),
            (1.0, lambda: self._stop_server("S3", seaweed)),
        ]
        weights = [weight for weight, _ in events]
        while time.monotonic() < ends:
            await asyncio.sleep(self._rng.uniform(*CALM_S))
            ((_, event),) = self._rng.choices(events, weights)
            await event()

    async def _toxic(self) -> None:
        name = self._rng.choice(sorted(self._proxies))
        proxy, toxic = self._proxies[name], self._rng.choice(HARMLESS)
        proxy.poison(toxic)
        await asyncio.sleep(self._rng.uniform(*TOXIC_S))
        proxy.heal()
        for kind, count in proxy.met.items():
            self.figures.fault(f"{name} {kind}", count)
        proxy.met.clear()

    async def _kill_gateway(self) -> None:
        gateway = self._gateways[self._rng.choice(NAMES)]
        await gateway.kill()
        self._count("kills", "gateway SIGKILL")
        await gateway.start()

    async def _stop_gateway(self) -> None:
        await self._gateways[self._rng.choice(NAMES)].stop_for(self._rng.uniform(*STOP_S))
        self._count("stops", "gateway SIGSTOP")

    async def _kill_server(self, name: str, server: Postgres | Seaweed) -> None:
        await asyncio.to_thread(server.kill)
        self._count("kills", f"{name} SIGKILL")
        await asyncio.sleep(self._rng.uniform(0.0, 0.5))
        await asyncio.to_thread(server.start)

    async def _stop_server(self, name: str, server: Postgres | Seaweed) -> None:
        with frozen(server):
            await asyncio.sleep(self._rng.uniform(*STOP_S))
        self._count("stops", f"{name} SIGSTOP")

    def _count(self, what: str, kind: str) -> None:
        self.figures.counts[what] += 1
        self.figures.fault(kind)

    # The end

    async def _settle(self, shared: Footing) -> None:
        """Wait until nothing is left to be done."""
        deadline = time.monotonic() + SETTLE_S
        await asyncio.sleep(2.0)
        while True:
            for statement in END_LEASES:
                await shared.rows(statement)
            if time.monotonic() > deadline - SETTLE_S + CLAIMS_S:
                await shared.rows(END_CLAIMS)
            left = {what: count for what, count in await shared.rows(UNSETTLED) if count}
            if not left:
                return
            if time.monotonic() > deadline:
                self.figures.breach("unforeseen", f"not settled after {SETTLE_S:g} s: {left}")
                return
            await asyncio.sleep(0.5)

    async def _end(self, shared: Footing, seaweed: Seaweed, load: Load) -> None:
        for name, gateway in self._gateways.items():
            if (code := await gateway.end()) != 0:
                self.figures.breach("unforeseen", f"{name} ended with {code}: {gateway.words()[-300:]}")
            for bug in gateway.bugs()[:3]:
                self.figures.breach("unforeseen", f"{name}: {bug}")
        for name in NAMES:
            for statement in (*END_LEASES, END_LEADS):
                await shared.rows(statement)
            async with reopened(self._settings(shared), self._folder / name) as opened:
                await settle(opened)
                clients = await embedded_clients(opened, self._tokens)
                load.client_of = clients.__getitem__
                await load.read_back()
                await look_through(opened, self.figures, shared.rows, name)
        try:
            await shared.check_quota()
        except AssertionError as error:
            self.figures.breach("quota_drift", str(error))
        uploads = await asyncio.to_thread(_uploads, seaweed)
        self.figures.breach("leaked_uploads", f"{uploads} multipart uploads are open", uploads)


def _uploads(seaweed: Seaweed) -> int:
    with seaweed.client() as client:
        return len(client.list_multipart_uploads(Bucket=seaweed.bucket).get("Uploads", []))


@contextmanager
def frozen(server: Postgres | Seaweed) -> Iterator[None]:
    """Stop a server with all its processes: its connections stay open and nothing answers."""
    assert server._process is not None
    first = psutil.Process(server._process.pid)
    everybody = [first, *first.children(recursive=True)]
    for process in everybody:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        yield
    finally:
        for process in everybody:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def run(folder: Path, seconds: float, seed: str, tell: Callable[[str], None]) -> Figures:
    """Start the servers, and let it happen; the figures."""
    with ExitStack() as stack:
        postgres = stack.enter_context(Postgres(fsync=True))
        seaweed = stack.enter_context(Seaweed(folder / "s3"))
        nursery = stack.enter_context(Nursery())
        shared = Footing(postgres, seaweed, folder)
        shared.prepare()
        network = Network(folder, seed)

        async def body() -> None:
            async def report() -> None:
                while True:
                    await asyncio.sleep(10.0)
                    tell(network.figures.line())

            reporting = asyncio.create_task(report())
            try:
                await network.run(shared, postgres, seaweed, nursery, seconds)
            finally:
                reporting.cancel()

        asyncio.run(body())
        return network.figures
