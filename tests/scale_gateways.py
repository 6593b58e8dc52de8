"""GET throughput through 1, 2 and 4 gateway processes over one PostgreSQL and one S3, an NVMe folder each.

    python -m tests.scale_gateways [--gateways 1,2,4] [--clients 4] [--rounds 3] [--chunk-bytes 4194304] [--json FILE]

The clients are processes too, always as many, spread over the gateways. Each stores content of its own and reads it
back: once with staging that holds all of it, once with staging so small that every chunk comes from NVMe. Before
anything is read, everything has been written to S3 as well, so that write-back takes no part in the figures. Prints
a table of medians and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from kvgw.bench import gateway as gateway_process
from kvgw.bench.gateway import START_SECONDS, GatewayAnnounced, GatewayOrder, GatewayUnderTest
from kvgw.bench.operator import operator_of
from kvgw.bench.plan import MIB
from kvgw.bench.processes import Child, child, cpu_seconds
from kvgw.bench.protocol import Check, Done, Forget, Measure, Measured, Open, Prepare
from kvgw.endpoint import parse_endpoint
from kvgw.model import Durability
from kvgw.settings import NvmeSettings, ServerSettings, Settings, StagingSettings
from tests import scale_worker
from tests.support.postgres import Postgres, given_postgres
from tests.support.seaweed import Seaweed, given_s3
from tests.support.several import Footing

ANSWER_S = 300.0
SETTLE_S = 120.0
SMALL_STAGING = 64 * MIB
"""Of it 48 MiB hold residents: less than one client's content."""

Source = Literal["staging", "nvme"]


@dataclass(frozen=True)
class Plan:
    """What one client stores and reads in one round."""

    chunk_bytes: int
    batch: int
    calls: int

    @property
    def call_bytes(self) -> int:
        return self.chunk_bytes * self.batch

    @property
    def stored_bytes(self) -> int:
        return self.call_bytes * self.calls


@dataclass(frozen=True)
class Row:
    """Medians over the rounds; a GB is 10**9 bytes of payload."""

    read_from: Source
    gateways: int
    gb_per_s: float
    gateway_cpu_s_per_gb: float
    client_cpu_s_per_gb: float


def settings_for(shared: Footing, plan: Plan, source: Source, clients: int) -> Settings:
    content = clients * plan.stored_bytes
    staging = SMALL_STAGING if source == "nvme" else 2 * content + 256 * MIB
    return shared.settings(
        server=ServerSettings(http=""),
        staging=StagingSettings(bytes=staging // (2 * MIB) * (2 * MIB), tenants=1),
        nvme=NvmeSettings(capacity_bytes=4 * content, min_free_bytes=0),
    )


async def measure(shared: Footing, plan: Plan, source: Source, gateways: int, clients: int, rounds: int) -> Row:
    """Start everything, measure `rounds` rounds after one that warms up, and end everything."""
    async with AsyncExitStack() as stack:
        started = [
            await stack.enter_async_context(child(f"gateway {at}", gateway_process.__name__)) for at in range(gateways)
        ]
        share = -(-clients // gateways)
        under_test = []
        for at, one in enumerate(started):
            folder = shared.folder / f"{source}-{gateways}-{at}"
            one.tell(GatewayOrder(settings_for(shared, plan, source, share), str(folder), "unix"))
            announced = await one.hear(GatewayAnnounced, START_SECONDS)
            under_test.append(GatewayUnderTest(parse_endpoint(announced.endpoint), announced.token, one.pid))
        operators = [await stack.enter_async_context(operator_of(one)) for one in under_test]
        (namespace,) = await operators[0].namespaces(1, Durability.NVME)
        workers = [
            await stack.enter_async_context(child(f"client {at}", scale_worker.__name__)) for at in range(clients)
        ]
        for at, client in enumerate(workers):
            where = str(under_test[at % gateways].endpoint)
            client.tell(Open(where, None, namespace, Durability.NVME, "", plan.stored_bytes, plan.call_bytes))
            await client.hear(Done, ANSWER_S)
        samples = []
        for number in range(rounds + 1):
            await tell(workers, Prepare(plan.chunk_bytes, plan.batch, plan.calls), Done)
            await tell(workers, Measure("kvgw", "put"), Measured)
            for operator in operators:
                left = await operator.settle(SETTLE_S)
                assert not left, left
            before = [sum(cpu_seconds(one.pid) for one in processes) for processes in (started, workers)]
            measured = await tell(workers, Measure("kvgw", "get"), Measured)
            after = [sum(cpu_seconds(one.pid) for one in processes) for processes in (started, workers)]
            await tell(workers, Check(), Done)
            await tell(workers, Forget("kvgw"), Done)
            gigabytes = clients * plan.stored_bytes / 1e9
            seconds = max(one.ended_s for one in measured) - min(one.started_s for one in measured)
            if number:
                cpu = [(now - then) / gigabytes for now, then in zip(after, before, strict=True)]
                samples.append((gigabytes / seconds, *cpu))
    return Row(source, gateways, *(statistics.median(column) for column in zip(*samples, strict=True)))


async def tell(workers: Sequence[Child], command: Prepare | Measure | Check | Forget, kind: type) -> list:
    """Give a command to all clients at once, and wait for all answers."""
    for one in workers:
        one.tell(command)
    return [await one.hear(kind, ANSWER_S) for one in workers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gateways", default="1,2,4", help="numbers of gateway processes, with commas")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunk-bytes", type=int, default=4 * MIB)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    plan = Plan(options.chunk_bytes, options.batch, options.calls)
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgw-scale-")))
        postgres = stack.enter_context(given_postgres() or Postgres())
        s3 = stack.enter_context(given_s3() or Seaweed(folder / "seaweed"))
        for source in ("staging", "nvme"):
            for gateways in map(int, options.gateways.split(",")):
                home = folder / f"{source}-{gateways}"
                home.mkdir()
                shared = Footing(postgres, s3, home)
                shared.prepare()
                row = asyncio.run(measure(shared, plan, source, gateways, options.clients, options.rounds))
                rows.append(row)
                print(
                    f"{row.read_from:8} {row.gateways} gateways  {row.gb_per_s:6.2f} GB/s  "
                    f"{row.gateway_cpu_s_per_gb:6.2f} gateway CPU-s/GB  {row.client_cpu_s_per_gb:6.2f} client CPU-s/GB",
                    flush=True,
                )
    result = json.dumps({"rows": [asdict(row) for row in rows], "plan": asdict(plan), "clients": options.clients,
                         "rounds": options.rounds, "cpus": os.cpu_count()})  # fmt: skip
    if options.json is not None:
        options.json.write_text(result + "\n")
    print(result)


if __name__ == "__main__":
    sys.exit(main())
