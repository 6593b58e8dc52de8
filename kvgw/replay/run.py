"""A gateway on a temporary folder, tenants in it, and their traffic."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from kvgw.bench.gateway import START_SECONDS, GatewayAnnounced, GatewayOrder
from kvgw.bench.processes import child
from kvgw.client import Client, connect
from kvgw.datadir import ADMIN_SOCKET
from kvgw.replay.drive import Traffic
from kvgw.replay.ideal import infinite
from kvgw.replay.outcome import ReplayReport, report_of
from kvgw.replay.plan import ReplayOptions
from kvgw.replay.trace import Request, TraceError, divide
from kvgw.runtime import SystemClock
from kvgw.settings import NvmeSettings, ServerSettings, Settings, StagingSettings

ADMIN_SECONDS: Final = 60.0
PERMISSIONS: Final = ["chunk:get", "chunk:put", "ns:read"]


async def replay(requests: Sequence[Request], options: ReplayOptions, step: Callable[[], None]) -> ReplayReport:
    """Replay all requests; `step` is called after each. Raises `KvgwError`."""
    clock = SystemClock()
    parts = divide(requests, options.tenants)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgw-replay-")))
        endpoint = await stack.enter_async_context(_gateway(options, folder))
        operator = await stack.enter_async_context(_operator(folder))
        clients = [await stack.enter_async_context(one) for one in await _tenants(operator, endpoint, options.tenants)]
        traffic = [Traffic(client, options, clock) for client in clients]
        started = clock.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for one, part in zip(traffic, parts, strict=True):
                tasks.create_task(one.replay(part, started, step))
        seconds = clock.monotonic() - started
        evicted = await _evicted(operator)
    return report_of(
        [one.tally for one in traffic],
        [infinite(part) for part in parts],
        evicted=evicted,
        seconds=seconds,
        chunk_bytes=options.chunk_bytes,
        prefill_tokens_per_s=options.prefill_tokens_per_s,
    )


@asynccontextmanager
async def _gateway(options: ReplayOptions, folder: Path) -> AsyncIterator[str]:
    settings = Settings(
        server=ServerSettings(http=""),
        staging=StagingSettings(bytes=options.staging_bytes, tenants=options.tenants),
        nvme=NvmeSettings(capacity_bytes=options.nvme_bytes),
    )
    async with child("gateway", "kvgw.bench.gateway") as process:
        process.tell(GatewayOrder(settings, str(folder), "unix"))
        yield (await process.hear(GatewayAnnounced, START_SECONDS)).endpoint


@asynccontextmanager
async def _operator(folder: Path) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.AsyncHTTPTransport(uds=str(folder / ADMIN_SOCKET))
    async with httpx2.AsyncClient(transport=transport, base_url="http://kvgw", timeout=ADMIN_SECONDS) as client:
        yield client


async def _tenants(operator: httpx2.AsyncClient, endpoint: str, count: int) -> list[Client]:
    clients = []
    for number in range(1, count + 1):
        name = f"replay-{number}"
        await _ask(operator, "/v1/tenants", {"name": name})
        body = {"name": "replay", "permissions": PERMISSIONS, "namespaces": ["*"], "expires_in": "1d"}
        made = await _ask(operator, f"/v1/tenants/{name}/tokens", body)
        clients.append(connect(endpoint, token=made["token"]))
    return clients


async def _ask(operator: httpx2.AsyncClient, path: str, body: Mapping[str, object]) -> dict[str, str]:
    answer = await operator.post(path, json=body)
    if not answer.is_success:
        raise TraceError(f"the gateway made no tenant for the replay: {answer.text}")
    made: dict[str, str] = answer.json()
    return made


async def _evicted(operator: httpx2.AsyncClient) -> int:
    text = (await operator.get("/metrics")).text
    samples = (one for family in text_string_to_metric_families(text) for one in family.samples)
    return int(
        sum(
            one.value
            for one in samples
            if one.name == "kvgw_ended_entries_total" and one.labels.get("reason") == "evicted"
        )
    )
