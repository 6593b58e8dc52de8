"""R47, S08: the disk under the data folder fills up, first as far as NVMe may go, then to its last byte."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from kvgw.breaker import BreakerOptions
from kvgw.client import Client, ClientOptions
from kvgw.embedded import EmbeddedTransport
from kvgw.errors import Outage, RequestRefused
from kvgw.model import Outcome, PutOutcome
from kvgw.reports import Registered
from kvgw.settings import NvmeSettings, ServerSettings, Settings, StagingSettings
from kvgw.wiring import Opened, opened
from tenancy.errors import CatalogUnavailable
from tests.support.admin import Admin
from tests.support.aio import aio
from tests.support.gateways import format_of, keys_of, payloads_of, read, world_of
from tests.support.manual_clock import ManualClock

MIB = 1024 * 1024
CHUNK = 256 * 1024
DISK_MIB = 48


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A data folder on a file system of 48 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=0700", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a tmpfs here: {error}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


class Filling:
    """A gateway without maintenance, whose disk the test fills."""

    def __init__(self, gateway: Opened, client: Client, registered: Registered) -> None:
        self.gateway = gateway
        self.client = client
        self.registered = registered
        self.stored: list[str] = []

    async def put(self, name: str) -> tuple[PutOutcome, Outcome, str]:
        chunk = payloads_of(self.registered, 1, seed=int(name))
        report = await self.client.put(self.registered, keys_of(1, name), chunk)
        if report.outcomes[0] is PutOutcome.STORED:
            self.stored.append(name)
        return report.outcomes[0], report.outcome, report.reason

    async def check_reads(self) -> None:
        """Every acknowledged chunk reads back right from the disk, without help from staging."""
        for blob in (self.gateway.folder / "nvme" / "v1").glob("*/??/*"):
            self.gateway.rooms.staging.drop("/".join(blob.parts[-4:]))
        for name in self.stored:
            report, found = await read(self.client, self.registered, keys_of(1, name))
            assert found == payloads_of(self.registered, 1, seed=int(name)), (name, report)

    async def check_counters(self) -> None:
        """Law 4, and nothing is left reserved."""
        rooms = self.gateway.rooms
        for one in await rooms.catalog.namespaces(self.gateway.authenticator.owner().tenant):
            usage, _, chunks, _ = await rooms.catalog.usage(one.scope)
            assert usage == await rooms.catalog.counted_rows(one.scope)
            assert usage.objects == chunks == len(self.stored)

    async def delete(self, name: str) -> None:
        assert await self.client.delete(self.registered, keys_of(1, name)) == 1
        self.stored.remove(name)


@asynccontextmanager
async def filling(data: Path, clock: ManualClock | None = None) -> AsyncIterator[Filling]:
    settings = Settings(
        server=ServerSettings(http=""),
        staging=StagingSettings(bytes=16 * MIB, tenants=1),
        nvme=NvmeSettings(capacity_bytes=1024 * MIB, min_free_bytes=4 * MIB),
    )
    async with opened(settings, data, world=world_of(clock)) as gateway:
        patient = ClientOptions(breaker=BreakerOptions(failures=2**62))
        client = Client(EmbeddedTransport(gateway.gateway, gateway.authenticator.owner()), patient)
        yield Filling(gateway, client, await client.register(format_of(CHUNK)))
        await client.aclose()


async def fill_nvme(one: Filling) -> None:
    for number in range(1000):
        outcome, _, _ = await one.put(str(number))
        if outcome is not PutOutcome.STORED:
            return
    raise AssertionError("the disk never filled up")


def fill_to_the_last_byte(file: Path) -> None:
    with file.open("wb", buffering=0) as ballast, pytest.raises(OSError, match="No space"):
        while True:
            assert ballast.write(bytes(4096)) == 4096


@aio
async def test_S08_a_full_disk_refuses_puts_and_nothing_else(small_disk: Path) -> None:
    async with filling(small_disk / "data") as one:
        await fill_nvme(one)
        assert len(one.stored) > 100
        outcome, how, reason = await one.put("2000")
        assert (outcome, how) == (PutOutcome.FAILED, Outcome.OUTAGE)
        assert "NVMe" in reason
        assert "free" in reason
        await one.check_reads()
        await one.check_counters()
        for name in list(one.stored[:20]):
            await one.delete(name)
        await one.gateway.crew.sweep_everywhere()
        await one.check_counters()
        assert (await one.put("2001"))[0] is PutOutcome.STORED
        await one.check_reads()


@aio
async def test_R47_a_disk_without_a_byte_free_is_survived_and_recovered_from(small_disk: Path) -> None:
    async with filling(small_disk / "data") as one:
        for number in range(20):
            assert (await one.put(str(number)))[0] is PutOutcome.STORED
        fill_to_the_last_byte(small_disk / "ballast")
        outcome, how, reason = await one.put("1000")
        assert (outcome, how) == (PutOutcome.FAILED, Outcome.OUTAGE)
        assert "full" in reason or "free" in reason
        await one.check_reads()
        # SQLite may find room in its log, or not: a deletion then says so and has not happened.
        deleted: set[str] = set()
        for name in list(one.stored[:10]):
            try:
                await one.delete(name)
                deleted.add(name)
            except Outage as error:
                assert "full" in str(error)
        await one.check_reads()
        for name in deleted:
            _, found = await read(one.client, one.registered, keys_of(1, name))
            assert found == [None], "an acknowledged deletion holds"
        (small_disk / "ballast").unlink()
        for name in list(one.stored[:5]):
            await one.delete(name)
        assert (await one.put("1001"))[0] is PutOutcome.STORED
        await one.gateway.crew.sweep_everywhere()
        await one.check_counters()
        await one.check_reads()
    async with filling(small_disk / "data") as again:
        again.stored = one.stored
        await again.check_reads()
        await again.check_counters()


@pytest.mark.parametrize("how", ["shred", "expiry", "fsck"])
@aio
async def test_R47_what_frees_space_works_without_a_byte_free_or_says_so_and_happens_afterwards(
    small_disk: Path, how: str
) -> None:
    clock = ManualClock()
    async with filling(small_disk / "data", clock) as one:
        admin, gateway = Admin(one.gateway), one.gateway
        await admin.own("POST", "/tenants/-/namespaces", {"name": "work"})
        transport = EmbeddedTransport(gateway.gateway, gateway.authenticator.owner())
        client = Client(transport, ClientOptions(namespace="work"))
        part = await client.register(format_of(CHUNK))
        payloads = payloads_of(part, 8)
        ttl = 1.0 if how == "expiry" else None
        assert (await client.put(part, keys_of(8), payloads, ttl=ttl)).stored == 8
        for number in range(8):
            assert (await one.put(str(number)))[0] is PutOutcome.STORED
        fill_to_the_last_byte(small_disk / "ballast")

        async def act() -> bool:
            """Whether it was acknowledged."""
            if how == "expiry":
                with suppress(CatalogUnavailable):
                    await gateway.crew.sweep_everywhere()
                    return True
                return False
            path = "/v1/tenants/-/namespaces/work/shred" if how == "shred" else "/v1/fsck"
            query = {"confirm": "work"} if how == "shred" else {}
            answer = await admin.ask("POST", path, {}, query=query, peer=os.geteuid())
            assert answer.is_success or (answer.status_code == 503 and "full" in answer.text), answer.text
            return answer.is_success

        async def seen() -> list[bytes | None]:
            try:
                return (await read(client, part, keys_of(8)))[1]
            except RequestRefused as refusal:
                assert "destroyed" in str(refusal) or "does not exist" in str(refusal)
                return [None] * 8

        if how == "expiry":
            clock.advance(1.1)
        told = await act()
        after = [payloads, [None] * 8] if how == "shred" and not told else [[None] * 8 if how != "fsck" else payloads]
        assert await seen() in after, "never half done"
        await one.check_reads()
        (small_disk / "ballast").unlink()
        assert told or await act(), "and with room again it is done, without a restart"
        await gateway.crew.sweep_everywhere()
        assert await seen() == (payloads if how == "fsck" else [None] * 8)
        assert (await one.put("1000"))[0] is PutOutcome.STORED
        await one.check_reads()
        await client.aclose()
