"""A gateway whose maintenance runs only when the test says so, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kvgw.client import Client, ClientOptions
from kvgw.embedded import EmbeddedTransport
from kvgw.gateway.core import Gateway
from kvgw.gateway.directory import Directory
from kvgw.gateway.rooms import Rooms
from kvgw.maintenance.crew import Crew, Pace
from kvgw.model import Durability, PutOutcome
from kvgw.reports import Registered
from kvgw.runtime import SystemRng
from kvgw.settings import DefaultSettings, NvmeSettings, ServerSettings, Settings, StagingSettings
from kvgw.wiring import Opened, World, opened
from storage.errors import StorageError
from storage.memory import MemoryTier
from storage.nvme import NvmeTier
from storage.tier import Tier
from tenancy.model import Scope
from tests.support.gateways import format_of, keys_of, payloads_of, read
from tests.support.manual_clock import ManualClock

MIB = 1024 * 1024
CHUNK = 64 * 1024


def settings(*, capacity: int = 64 * MIB, durability: str = "nvme", nvme: Path | None = None) -> Settings:
    return Settings(
        server=ServerSettings(http=""),
        staging=StagingSettings(bytes=16 * MIB, tenants=1),
        nvme=NvmeSettings(capacity_bytes=capacity, min_free_bytes=0, dir=str(nvme or "")),
        defaults=DefaultSettings(durability=durability),  # type: ignore[arg-type]
    )


class FlakyTier(MemoryTier):
    """Memory as an S3 tier, which fails as it is told and notes in which order it was written."""

    def __init__(self) -> None:
        super().__init__("s3")
        self.failure: StorageError | None = None
        self.puts: list[str] = []

    async def put(self, name: str, sealed: memoryview) -> None:
        self.puts.append(name)
        if self.failure is not None:
            raise self.failure
        await super().put(name, sealed)

    async def delete(self, names: Sequence[str]) -> None:
        if self.failure is not None:
            raise self.failure
        await super().delete(names)

    @property
    def names(self) -> set[str]:
        return set(self._blobs)


@dataclass
class Works:
    """The gateway, its parts, and one registered format."""

    gateway: Opened
    rooms: Rooms
    nvme: NvmeTier
    s3: FlakyTier | None
    crew: Crew
    clock: ManualClock
    client: Client
    registered: Registered
    scope: Scope

    async def put(
        self, count: int, name: str = "key", *, durability: Durability | None = None, ttl: float | None = None
    ) -> list[PutOutcome]:
        """Put `count` chunks of different content under keys of `name`."""
        report = await self.client.put(
            self.registered,
            keys_of(count, name),
            payloads_of(self.registered, count, seed=hash(name) % 10**8),
            durability=durability,
            ttl=ttl,
            on_error="raise",
        )
        return list(report.outcomes)

    async def hits(self, count: int, name: str = "key") -> list[int]:
        """Indices that read back right; wrong bytes fail."""
        report, found = await read(self.client, self.registered, keys_of(count, name))
        expected = payloads_of(self.registered, count, seed=hash(name) % 10**8)
        assert all(got is None or got == want for got, want in zip(found, expected, strict=True)), "wrong bytes"
        return sorted(hit.index for hit in report.hits)

    async def wait(self, seconds: float) -> None:
        """Let time pass, with the heartbeat that a gateway has."""
        self.clock.advance(seconds)
        await self.crew.heartbeat()

    def blob_files(self) -> list[Path]:
        root = Path(self.gateway.settings.nvme.dir or self.gateway.folder / "nvme")
        return sorted((root / "v1").glob("*/??/*"))

    def forget_staging(self) -> None:
        """Empty staging of what is clean, as time would."""
        for path in self.blob_files():
            self.rooms.staging.drop("/".join(path.parts[-4:]))

    async def check(self) -> None:
        usage, *_ = await self.rooms.catalog.usage(self.scope)
        assert usage == await self.rooms.catalog.counted_rows(self.scope), "law 4"


@asynccontextmanager
async def works(
    folder: Path, *, chosen: Settings | None = None, s3: FlakyTier | None = None, chunk: int = CHUNK
) -> AsyncIterator[Works]:
    clock = ManualClock()
    pace = Pace(nvme_orphan_grace=100.0, s3_orphan_grace=1000.0)
    async with opened(chosen or settings(), folder, world=World(clock, SystemRng(), pace)) as gateway:
        nvme = gateway.crew._nvme
        assert nvme is not None
        tiers: dict[str, Tier] = dict(gateway.rooms.tiers)
        if s3 is not None:
            tiers["s3"] = s3
        rooms = replace(gateway.rooms, tiers=tiers)
        serving = Gateway(rooms, Directory(rooms.catalog, rooms.keyring, clock), gateway.gateway._admin)
        client = Client(EmbeddedTransport(serving, gateway.authenticator.owner()), ClientOptions())
        registered = await client.register(format_of(chunk))
        namespace = await rooms.catalog.namespace(gateway.authenticator.owner().tenant, "default")
        assert namespace is not None
        crew = Crew(rooms, nvme, pace)
        yield Works(gateway, rooms, nvme, s3, crew, clock, client, registered, namespace.scope)
        await client.aclose()
