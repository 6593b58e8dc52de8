"""S3 dies under a gateway and comes back: what NVMe has goes on, what is away is said to be away, and all recovers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from kvgw.client import Client, ClientOptions
from kvgw.embedded import EmbeddedTransport
from kvgw.model import Durability, Outcome, PutOutcome
from kvgw.reports import Registered
from kvgw.settings import MaintenanceSettings, NvmeSettings, S3Settings, ServerSettings, Settings, StagingSettings
from kvgw.wiring import Opened, opened
from storage.errors import TierFull
from storage.nvme import NvmeTier
from tests.support.aio import run
from tests.support.gateways import buffers_for, format_of, keys_of, payloads_of
from tests.support.seaweed import Seaweed, free_ports

pytestmark = [pytest.mark.s3, pytest.mark.timeout(240)]

CHUNK = 256 * 1024
DEADLINE_S = 5.0
MIB = 1024 * 1024


def settings(folder: Path, endpoint: str) -> Settings:
    secret = folder / "secret"
    secret.write_text(Seaweed.secret_key)
    return Settings(
        server=ServerSettings(http=""),
        staging=StagingSettings(bytes=16 * MIB, tenants=1),
        nvme=NvmeSettings(capacity_bytes=256 * MIB, min_free_bytes=0),
        s3=S3Settings(
            bucket="kvgw",
            endpoint=endpoint,
            addressing="path",
            access_key_id=Seaweed.access_key,
            secret_access_key_file=str(secret),
            request_seconds=2.0,
        ),
        maintenance=MaintenanceSettings(outbox_seconds=0.2, reach_seconds=0.2),
    )


@dataclass
class Running:
    gateway: Opened
    client: Client
    registered: Registered

    async def put(self, name: str, durability: Durability, count: int = 5) -> tuple[set[PutOutcome], Outcome, str]:
        report = await self.client.put(
            self.registered,
            keys_of(count, name),
            payloads_of(self.registered, count, seed=len(name)),
            durability=durability,
            deadline_s=DEADLINE_S,
        )
        return set(report.outcomes), report.outcome, report.reason

    async def get(self, name: str, count: int = 5) -> tuple[list[str], Outcome, str]:
        """Tiers of the hits, which are compared bit by bit."""
        buffers = buffers_for(self.registered, count)
        report = await self.client.get(self.registered, keys_of(count, name), buffers, deadline_s=DEADLINE_S)
        expected = payloads_of(self.registered, count, seed=len(name))
        for hit in report.hits:
            assert buffers[hit.index] == expected[hit.index], "wrong bytes"
        return [hit.tier for hit in report.hits], report.outcome, report.reason

    async def outbox(self) -> int:
        catalog, tenant = self.gateway.rooms.catalog, self.gateway.authenticator.owner().tenant
        lengths = [await catalog.outbox_length(one.scope) for one in await catalog.namespaces(tenant)]
        return sum(count for length in lengths for count, _, _ in length.values())

    async def drained(self, within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while await self.outbox():
            assert time.monotonic() < deadline, f"{await self.outbox()} writes are still due after {within_s} s"
            await asyncio.sleep(0.05)

    def blobs(self) -> set[Path]:
        return set((self.gateway.folder / "nvme" / "v1").glob("*/??/*"))


@asynccontextmanager
async def running(chosen: Settings, data: Path) -> AsyncIterator[Running]:
    async with opened(chosen, data) as gateway:
        crew = asyncio.create_task(gateway.crew.run())
        client = Client(EmbeddedTransport(gateway.gateway, gateway.authenticator.owner()), ClientOptions())
        try:
            yield Running(gateway, client, await client.register(format_of(CHUNK)))
        finally:
            await client.aclose()
            crew.cancel()
            with suppress(asyncio.CancelledError):
                await crew


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Seaweed]:
    """A server of this test's own, to be killed."""
    with Seaweed(tmp_path / "seaweed") as server:
        yield server


def test_an_outage_of_s3_is_survived_and_recovered_from(tmp_path: Path, server: Seaweed) -> None:
    chosen, data = settings(tmp_path, server.endpoint), tmp_path / "data"

    async def before() -> set[Path]:
        async with running(chosen, data) as one:
            assert await one.put("remote", Durability.S3) == ({PutOutcome.STORED}, Outcome.OK, "")
            await one.drained()
            remote = one.blobs()
            assert len(remote) == 5, "write-back brought them to NVMe too"
            assert await one.put("local", Durability.NVME) == ({PutOutcome.STORED}, Outcome.OK, "")
            await one.drained()
            return remote

    async def during_and_after() -> None:
        async with running(chosen, data) as one:
            stop = asyncio.Event()
            rounds = 0

            async def traffic() -> None:
                nonlocal rounds
                while not stop.is_set():
                    tiers, outcome, _ = await one.get("local")
                    assert (len(tiers), outcome) == (5, Outcome.OK), "NVMe hits go on"
                    rounds += 1

            reading = asyncio.create_task(traffic())
            await asyncio.to_thread(server.kill)
            at_the_outage = rounds

            started = time.monotonic()
            tiers, outcome, reason = await one.get("remote")
            assert (tiers, outcome) == ([], Outcome.OUTAGE), "an outage, and not just a miss"
            assert "s3" in reason
            assert time.monotonic() - started < DEADLINE_S + 2

            outcomes, outcome, reason = await one.put("refused", Durability.S3)
            assert (outcomes, outcome) == ({PutOutcome.FAILED}, Outcome.OUTAGE)
            assert reason
            assert await one.put("meanwhile", Durability.NVME) == ({PutOutcome.STORED}, Outcome.OK, "")
            assert await one.outbox() == 5
            assert rounds > at_the_outage

            await asyncio.to_thread(server.restart)
            await one.drained()
            stop.set()
            await reading
            assert await one.put("refused", Durability.S3) == ({PutOutcome.STORED}, Outcome.OK, "")

            tiers, outcome, _ = await one.get("remote")
            assert (tiers, outcome) == (["s3"] * 5, Outcome.OK)
            await one.drained()

    remote = run(before(), timeout=120)
    for blob in remote:
        blob.unlink()
    run(during_and_after(), timeout=180)


def test_chunks_come_up_again_from_s3_after_the_nvme_folder_was_wiped(tmp_path: Path, server: Seaweed) -> None:
    chosen, data = settings(tmp_path, server.endpoint), tmp_path / "data"

    async def fill() -> set[Path]:
        async with running(chosen, data) as one:
            await one.put("chunk", Durability.NVME)
            await one.drained()
            return one.blobs()

    def no_room() -> AbstractContextManager[object]:
        """So that nothing comes up before it was read from S3."""
        return mock.patch.object(NvmeTier, "put", side_effect=TierFull("there is no room on the disk yet"))

    async def read_up() -> None:
        with no_room():
            async with running(chosen, data) as one:
                assert (await one.get("chunk"))[0] == ["s3"] * 5

    async def promoted() -> None:
        async with AsyncExitStack() as stack:
            with no_room():
                one = await stack.enter_async_context(running(chosen, data))
                assert (await one.get("chunk"))[0] == ["s3"] * 5, "nothing is in the staging of a new process"
            deadline = time.monotonic() + 30
            while len(one.blobs()) < 5:
                assert time.monotonic() < deadline, "not promoted"
                await asyncio.sleep(0.05)
            await one.drained()

    async def at_home_again() -> None:
        async with running(chosen, data) as one:
            assert (await one.get("chunk"))[0] == ["nvme"] * 5

    blobs = run(fill(), timeout=60)
    assert len(blobs) == 5
    for blob in blobs:
        blob.unlink()
    for step in (read_up, promoted, at_home_again):
        run(step(), timeout=60)


def test_a_gateway_starts_without_s3_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nobody = f"http://127.0.0.1:{free_ports('nobody')['nobody']}"

    async def body() -> None:
        async with running(settings(tmp_path, nobody), tmp_path / "data") as one:
            assert await one.put("chunk", Durability.NVME) == ({PutOutcome.STORED}, Outcome.OK, "")
            assert (await one.get("chunk"))[1] is Outcome.OK
            deadline = time.monotonic() + 20
            while "the S3 tier cannot be used now" not in caplog.text:
                assert time.monotonic() < deadline, caplog.text
                await asyncio.sleep(0.02)
            up = one.gateway.rooms.metrics.registry.get_sample_value("kvgw_tier_up", {"tier": "s3"})
            assert up == 0
            assert nobody in caplog.text

    caplog.set_level(logging.WARNING)
    run(body(), timeout=60)
