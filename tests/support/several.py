"""Several gateways on the production footing: one PostgreSQL, one S3, one root key, a data folder each."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from sqlalchemy import Connection, text

from kvgw.endpoint import TcpEndpoint, UnixEndpoint
from kvgw.maintenance.crew import Pace
from kvgw.runtime import SystemClock, SystemRng, ThreadWorkers
from kvgw.server.serve import serving
from kvgw.settings import CatalogSettings, KeySettings, NvmeSettings, S3Settings, ServerSettings, Settings
from kvgw.wiring import World
from tenancy.keys.rootkey import FileRootKey
from tenancy.model import Scope
from tenancy.postgres import PostgresDatabase, parse_url
from tenancy.schema import TENANT_SCOPE
from tenancy.usage import counted_rows
from tests.support.aio import run
from tests.support.catalogs import APP_ROLE, migrated_template
from tests.support.gateways import MIB, SMALL, House
from tests.support.manual_clock import ManualClock
from tests.support.postgres import Postgres
from tests.support.seaweed import S3Server

_NUMBERS = itertools.count()

STILL = Pace(
    outbox=1e6, sweep=1e6, evict=1e6, orphans=1e6, heartbeat=1e6, reach=1e6, usage=1e6, audit=1e6, coherence=1e6
)
"""For gateways whose jobs the test runs itself. On the machine's clock they still take up their backlog at once."""


@dataclass
class Footing:
    """What the gateways of one test share."""

    server: Postgres
    s3: S3Server
    folder: Path
    database: str = field(init=False)

    def __post_init__(self) -> None:
        self.database = self.server.database(f"gateways_{os.getpid()}_{next(_NUMBERS)}")

    def prepare(self) -> None:
        self.server.sql(f'CREATE DATABASE "{self.database}" TEMPLATE "{migrated_template(self.server)}"')
        (self.folder / "secret").write_text(self.s3.secret_key)
        workers = ThreadWorkers(1)
        run(FileRootKey.open_or_create(self.folder / "keys", workers, SystemRng().token))
        workers.close()

    def url(self, *, port: int | None = None, user: str = APP_ROLE) -> str:
        """The catalog's URL, through a proxy at `port` if one is given."""
        if port is None:
            return self.server.url(self.database, user)
        return f"postgresql://{user}@127.0.0.1:{port}/{self.database}"

    def settings(self, *, port: int | None = None, **sections: Any) -> Settings:
        """Small and quick, but as in production: PostgreSQL, S3, keys in S3, durability nvme."""
        chosen: dict[str, Any] = {
            "server": ServerSettings(http="", listen="127.0.0.1:0"),
            "nvme": NvmeSettings(capacity_bytes=64 * MIB, min_free_bytes=0),
            "catalog": CatalogSettings(url=self.url(port=port), pool=4),
            "keys": KeySettings(dir=str(self.folder / "keys"), store="s3", s3_prefix=f"{self.database}/keys/"),
            "s3": S3Settings(
                bucket=self.s3.bucket,
                prefix=f"{self.database}/",
                endpoint=self.s3.endpoint,
                region=self.s3.region,
                addressing=self.s3.addressing,
                checksums=self.s3.checksums,
                access_key_id=self.s3.access_key,
                secret_access_key_file=str(self.folder / "secret"),
            ),
        }
        return replace(SMALL, **(chosen | sections))

    @asynccontextmanager
    async def gateway(
        self, name: str, *, settings: Settings | None = None, clock: ManualClock | None = None, tcp: bool = False
    ) -> AsyncIterator[House]:
        """A gateway that listens; with a manual clock its jobs, write-back too, run only when they are called."""
        world = World(clock or SystemClock(), SystemRng(), STILL)
        async with serving(settings or self.settings(), self.folder / name, world=world) as served:
            wanted = TcpEndpoint if tcp else UnixEndpoint
            endpoint = next(one for one in served.endpoints if isinstance(one, wanted))
            house = House(served.gateway, "unix", endpoint, served.gateway.first_token or "", clock)
            try:
                yield house
            finally:
                await house.aclose()

    async def check_clean(self, house: House, within_s: float = 10.0) -> None:
        """Laws 4 and 7 at one gateway whose requests are over; a task that is just ending gets `within_s` for it."""
        deadline = time.monotonic() + within_s
        while held := await house.held():
            assert time.monotonic() < deadline, f"law 7: still held after {within_s} s: {held}"
            await asyncio.sleep(0.01)
        assert await self.rows("SELECT count(*) FROM reservation") == [(0,)], "law 7"
        await self.check_quota()

    async def rows(self, statement: str) -> list[Any]:
        """A statement of one who sees every row."""
        found: list[Any] = await self.as_superuser(
            lambda connection: [tuple(row) for row in connection.execute(text(statement))]
        )
        return found

    async def as_superuser(self, body: Any) -> Any:
        database = PostgresDatabase(parse_url(self.server.url(self.database), None), pool=1)
        try:
            return await database.write(body)
        finally:
            await database.aclose()

    async def check_quota(self) -> None:
        """Law 4: every namespace's counters equal its rows, and the tenants' equal the sums of their namespaces'."""

        def compare(connection: Connection) -> None:
            for row in connection.execute(text("SELECT tenant_id, namespace_id FROM namespace")).all():
                scope = Scope(*row)
                counted = counted_rows(connection, scope)
                row = connection.execute(
                    text("SELECT stored_bytes, objects, s3_bytes FROM quota WHERE scope_id = :n"),
                    {"n": scope.namespace},
                ).one()
                assert tuple(row) == (counted.stored_bytes, counted.objects, counted.s3_bytes), "law 4"
            sums = text(
                "SELECT tenant_id, sum(stored_bytes), sum(objects), sum(s3_bytes) FROM quota "
                f"WHERE (scope_id = '{TENANT_SCOPE}') = :whole GROUP BY tenant_id ORDER BY tenant_id"
            )
            whole, parts = ([tuple(row) for row in connection.execute(sums, {"whole": one})] for one in (True, False))
            assert whole == parts, "law 4: tenant = sum of namespaces"

        await self.as_superuser(compare)


def on_footing(test: Callable[[Footing], Coroutine[Any, Any, None]]) -> Callable[[Postgres, S3Server, Path], None]:
    """Make a pytest test of a coroutine function of a `Footing`."""

    def synchronous(postgres: Postgres, seaweed: S3Server, tmp_path: Path) -> None:
        shared = Footing(postgres, seaweed, tmp_path)
        shared.prepare()
        run(test(shared))

    synchronous.__name__, synchronous.__doc__ = test.__name__, test.__doc__
    return synchronous


async def crash(gateway: House) -> None:
    """Let the catalog see no farewell when this gateway is closed: to others it looks killed."""

    async def nothing(now_ms: int) -> None: ...

    gateway.opened.rooms.catalog.leave = nothing  # type: ignore[method-assign]


async def pass_time(gateway: House, seconds: float) -> None:
    """Let the catalog's time go on for one gateway on a manual clock, which says afterwards that it lives.

    The database's clock did not go on; a gateway's time never runs backward, so that it keeps what it once told.
    """
    assert gateway.clock is not None
    gateway.clock.advance(seconds)
    gateway.opened.rooms.time.now_ms()
    await gateway.opened.crew.heartbeat()
