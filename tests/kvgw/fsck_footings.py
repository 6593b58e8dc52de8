"""Where the suites of fsck and scrub run: SQLite with NVMe, and PostgreSQL with S3."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvgw.maintenance.crew import Pace
from kvgw.model import Durability
from kvgw.runtime import SystemRng
from kvgw.wiring import World, opened
from tenancy.sight import Sight
from tests.kvgw.fsck_contract import Spot
from tests.support.gateways import SMALL, House, format_of
from tests.support.manual_clock import ManualClock
from tests.support.postgres import Postgres
from tests.support.seaweed import S3Server
from tests.support.several import Footing


def clock_now() -> ManualClock:
    """Stands still at what the machine, and so a tier, takes for now."""
    return ManualClock(time.time_ns() // 1_000_000)


async def spot_of(one: House, clock: ManualClock, label: str, transact: Any) -> Spot:
    """In a namespace that lets a PUT ask for as little durability as it likes."""
    scope = (await one.namespace("free", durability=Durability.STAGED)).scope
    client = one.client("free", on_error="raise")
    return Spot(one.opened, clock, client, await client.register(format_of()), scope, label, transact)


class OnSqliteAndNvme:
    @pytest.fixture(autouse=True)
    def _a_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    @asynccontextmanager
    async def spot(self) -> AsyncIterator[Spot]:
        clock = clock_now()
        async with opened(SMALL, self.folder / "gw", world=World(clock, SystemRng(), Pace())) as gateway:
            one = House(gateway, "embedded", None, gateway.first_token or "", clock)

            async def transact(body: Any) -> Any:
                return await gateway.rooms.catalog._database.write(body, Sight(one.owner.tenant))

            yield await spot_of(one, clock, "nvme", transact)
            await one.aclose()


@pytest.mark.s3
@pytest.mark.postgres
class OnPostgresAndS3:
    @pytest.fixture(autouse=True)
    def _a_footing(self, postgres: Postgres, seaweed: S3Server, tmp_path: Path) -> None:
        self.shared = Footing(postgres, seaweed, tmp_path)
        self.shared.prepare()

    @asynccontextmanager
    async def spot(self) -> AsyncIterator[Spot]:
        clock = clock_now()
        async with self.shared.gateway("a", clock=clock) as one:
            yield await spot_of(one, clock, "s3", self.shared.as_superuser)
