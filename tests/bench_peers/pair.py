"""Two gateways over one PostgreSQL and one S3 as a contender: one is asked, the other has to be agreed with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvgw.bench import gateway as gateway_process
from kvgw.bench import worker
from kvgw.bench.gateway import START_SECONDS, GatewayAnnounced, GatewayOrder, GatewayUnderTest
from kvgw.bench.plan import MIB, Options
from kvgw.endpoint import parse_endpoint
from kvgw.model import Durability
from kvgw.settings import ServerSettings, StagingSettings
from tests.bench_peers.contenders import Contender
from tests.bench_peers.gateways import driven
from tests.bench_peers.plan import CASES
from tests.bench_peers.servers import client
from tests.support.postgres import Postgres
from tests.support.seaweed import S3Server
from tests.support.several import Footing


@asynccontextmanager
async def on_postgres(s3: S3Server, folder: Path) -> AsyncIterator[Contender]:
    """The first of them."""
    (case,) = CASES["postgres"]
    options = Options(
        chunk_bytes=(case.chunk_bytes,),
        batch=case.batch,
        round_bytes=case.stored_bytes,
        transport="unix",
        durability=Durability.NVME,
    )
    with Postgres() as server:
        footing = Footing(server, s3, folder)
        await asyncio.to_thread(footing.prepare)
        settings = footing.settings(server=ServerSettings(http=""), staging=StagingSettings(bytes=64 * MIB, tenants=1))
        module, log = gateway_process.__name__, folder / "gateway.log"
        async with client("gateway", module, log=log) as one, client("other gateway", module, log=log) as other:
            for process, name in ((one, "gateway"), (other, "other")):
                process.tell(GatewayOrder(settings, str(folder / name), "unix"))
            announced, _ = [await process.hear(GatewayAnnounced, START_SECONDS) for process in (one, other)]
            gateway = GatewayUnderTest(parse_endpoint(announced.endpoint), announced.token, one.pid)
            async with driven(gateway, options, folder, "postgres", worker.__name__) as contender:
                yield contender
