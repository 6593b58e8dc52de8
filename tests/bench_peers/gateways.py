"""The gateway as a contender: from staging over each of its transports, and from NVMe and S3 with little staging."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from kvgw.bench import gateway as gateway_process
from kvgw.bench import worker
from kvgw.bench.gateway import (
    START_SECONDS,
    GatewayAnnounced,
    GatewayOrder,
    GatewayUnderTest,
    gateway_under_test,
    shared_memory,
)
from kvgw.bench.operator import operator_of
from kvgw.bench.plan import MIB, BenchError, Options, TransportName
from kvgw.bench.run import Bench, System
from kvgw.endpoint import parse_endpoint
from kvgw.model import Durability
from kvgw.settings import DefaultSettings, NvmeSettings, S3Settings, ServerSettings, Settings, StagingSettings
from tests.bench_peers import tier_client
from tests.bench_peers.contenders import About, Contender, Ours
from tests.bench_peers.places import BucketPlace
from tests.bench_peers.plan import CASES, Tier
from tests.bench_peers.servers import client

STAGING_BYTES: Final = {"nvme": 128 * MIB, "s3": 256 * MIB}
"""Three quarters of it hold residents: what the last call stored and less than one call more, which the first GET of a
round pushes out before it is asked for.
"""


@asynccontextmanager
async def staged(transport: TransportName, folder: Path) -> AsyncIterator[Contender]:
    """As `kvgw bench` measures it."""
    stored = max(case.stored_bytes for case in CASES["memory"])
    lengths = tuple(case.chunk_bytes for case in CASES["memory"] if "get" in case.ops)
    options = Options(chunk_bytes=lengths, round_bytes=stored, transport=transport)
    async with (
        gateway_under_test(options, folder / "gateway") as gateway,
        driven(gateway, options, folder, "memory", worker.__name__) as contender,
    ):
        yield contender


@asynccontextmanager
async def in_tier(
    tier: Tier, bucket: BucketPlace | None, folder: Path, transport: TransportName = "unix"
) -> AsyncIterator[Contender]:
    """PUT returns when the tier has it; GET reads from there."""
    (case,) = CASES[tier]
    async with client(f"gateway over {tier}", gateway_process.__name__, log=folder / "gateway.log") as process:
        process.tell(GatewayOrder(_settings(tier, bucket, folder, transport), str(folder / "gateway"), transport))
        announced = await process.hear(GatewayAnnounced, START_SECONDS)
        gateway = GatewayUnderTest(parse_endpoint(announced.endpoint), announced.token, process.pid)
        options = Options(
            chunk_bytes=(case.chunk_bytes,),
            batch=case.batch,
            round_bytes=case.stored_bytes,
            transport=transport,
            durability=Durability(tier),
            endpoint=announced.endpoint,
        )
        async with driven(gateway, options, folder, tier, tier_client.__name__, tier) as contender:
            yield contender


@asynccontextmanager
async def driven(
    gateway: GatewayUnderTest, options: Options, folder: Path, tier: Tier, module: str, *arguments: str
) -> AsyncIterator[Contender]:
    """The gateway with a client in a process of its own, which runs `module`."""
    async with operator_of(gateway) as operator, client("kvgw's client", module, *arguments, log=folder / "log") as one:
        system = System("kvgw", await operator.version(), gateway.pid)
        if gateway.pid is None:
            raise BenchError("the gateway's process cannot be seen from here")
        await Bench(options, [system], [one], operator).open_clients(gateway, None)
        name = "kvgw" if tier == "memory" else f"kvgw {tier}"
        about = About(name, system.version, options.transport, tier)
        yield Ours(about, one, (gateway.pid,), operator, folder / "gateway" / "nvme" if tier == "nvme" else None)


def _settings(tier: Tier, bucket: BucketPlace | None, folder: Path, transport: TransportName) -> Settings:
    s3 = S3Settings()
    if bucket is not None:
        secret = folder / "secret"
        secret.write_text(bucket.secret_key)
        s3 = S3Settings(
            bucket=bucket.bucket,
            prefix="kvgw/",
            endpoint=bucket.endpoint,
            region=bucket.region,
            addressing="path",
            access_key_id=bucket.access_key,
            secret_access_key_file=str(secret),
            request_seconds=60.0,
        )
    return Settings(
        server=ServerSettings(http=""),
        staging=StagingSettings(bytes=STAGING_BYTES[tier], tenants=1),
        shared_memory=shared_memory(transport, CASES[tier], clients=1),
        nvme=NvmeSettings(enabled=tier == "nvme"),
        defaults=DefaultSettings(durability="nvme" if tier == "nvme" else "s3"),
        s3=s3,
    )
