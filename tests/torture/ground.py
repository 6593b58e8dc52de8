"""A gateway's data folder with several tenants, and the look through it when nothing runs any more."""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from kvgw.breaker import BreakerOptions
from kvgw.client import Client, ClientOptions
from kvgw.embedded import EmbeddedTransport
from kvgw.maintenance.crew import Pace
from kvgw.runtime import Clock, SystemClock, SystemRng
from kvgw.settings import DefaultSettings, NvmeSettings, Settings
from kvgw.verify import verify_catalog
from kvgw.wiring import Opened, World, opened
from tenancy.audit.verifying import Finding
from tests.support.admin import Admin
from tests.support.gateways import MIB, SMALL, take_up_backlog
from tests.torture.figures import Figures
from tests.torture.load import TENANTS, Load

OPTIONS: Final = ClientOptions(breaker=BreakerOptions(failures=2**62))
SETTINGS: Final = replace(
    SMALL,
    defaults=DefaultSettings(durability="staged"),
    nvme=NvmeSettings(capacity_bytes=512 * MIB, min_free_bytes=0),
)
AT_ONCE: Final = Pace(nvme_orphan_grace=0.0, s3_orphan_grace=0.0)
"""For when nobody writes any more: an orphan is one when it was seen twice."""
AHEAD_MS: Final = 3_600_000

Found = Callable[[str], Awaitable[list[Any]]]
"""What a statement finds among all rows."""


class LaterClock(SystemClock):
    """The machine's clock, an hour on: every lease is over."""

    def now_ms(self) -> int:
        return super().now_ms() + AHEAD_MS


@asynccontextmanager
async def reopened(settings: Settings, folder: Path, clock: Clock | None = None) -> AsyncIterator[Opened]:
    """A gateway in this process on a folder whose process has ended."""
    async with opened(settings, folder, world=World(clock or SystemClock(), SystemRng(), AT_ONCE)) as gateway:
        yield gateway


async def make_tenants(gateway: Opened) -> dict[str, str]:
    """A token of each tenant."""
    admin, tokens = Admin(gateway), {}
    wanted = {"name": "load", "permissions": ["chunk:get", "chunk:put", "chunk:delete", "ns:read"]}
    for tenant in TENANTS:
        await admin.own("POST", "/tenants", {"name": tenant})
        tokens[tenant] = (await admin.own("POST", f"/tenants/{tenant}/tokens", wanted))["token"]
    return tokens


async def embedded_clients(gateway: Opened, tokens: dict[str, str]) -> dict[str, Client]:
    """A client of each tenant in a gateway's own process."""
    callers = {tenant: await gateway.authenticator.token(token) for tenant, token in tokens.items()}
    return {tenant: Client(EmbeddedTransport(gateway.gateway, caller), OPTIONS) for tenant, caller in callers.items()}


async def settle(gateway: Opened) -> None:
    """Let every job have its turns, until nothing is left to be done."""
    crew = gateway.crew
    for _ in range(3):
        await crew.heartbeat()
        await crew.sweep_everywhere()
        await crew.drain_everywhere()
        await take_up_backlog(crew)
        await crew.tend_keys()
        await crew.go_on_deleting()
        await crew.look_for_orphans()
    await crew.write_down_hits()


def rows_of(gateway: Opened) -> Found:
    """Statements on the one SQLite file of a gateway, which knows no row-level security."""

    async def rows(statement: str) -> list[Any]:
        return await gateway.rooms.catalog._database.read(
            lambda connection: [tuple(row) for row in connection.exec_driver_sql(statement)]
        )

    return rows


async def look_through(gateway: Opened, figures: Figures, rows: Found, where: str) -> None:
    """Every law that can be looked at on a gateway that has settled; what does not hold goes into `figures`."""
    figures.counts["inspections"] += 1
    ((reservations,),) = await rows("SELECT count(*) FROM reservation")
    figures.breach("leaked_reservations", f"{where}: {reservations} outlived their lease", reservations)
    now = gateway.rooms.staging.statistics()
    held = {
        "windows": now.windows.used_bytes,
        "drafts": now.draft_bytes,
        "being filled": now.filling_bytes,
        "gone but in use": now.gone_bytes,
        "lingering": now.lingering,
        "waiters": now.waiters,
    }
    figures.breach("leaked_slots", f"{where}: {held}", sum(1 for count in held.values() if count))
    report = await gateway.crew.fsck.run()
    for finding in report.findings[:5]:
        kind = "quota_drift" if finding.kind == "counter" else "fsck_findings"
        figures.breach(kind, f"{where}: fsck {finding.kind}: {finding.sentence}")
    if report.verdict != "clean" and not report.findings:
        figures.breach("fsck_findings", f"{where}: fsck {report.verdict}: {report.refused} {report.unseen}")
    left = list((gateway.folder / "nvme" / "tmp").iterdir())
    files = sum(1 for _ in (gateway.folder / "nvme" / "v1").glob("*/??/*"))
    node = gateway.rooms.catalog.node.node
    ((placed,),) = await rows(f"SELECT count(*) FROM placement WHERE tier = 'nvme' AND node = '{node}'")
    figures.breach(
        "leaked_files", f"{where}: {left[:3]}, {files} blobs for {placed} rows", len(left) + abs(files - placed)
    )
    public = gateway.rooms.signer.public_key
    verdict = await verify_catalog(gateway.rooms.catalog._database, public, {})
    if verdict.finding is not Finding.WHOLE:
        figures.breach("audit_broken", f"{where}: {verdict.sentence}")


async def close_down(settings: Settings, folder: Path, tokens: dict[str, str], load: Load, where: str) -> None:
    """When its processes are over: open the folder here, an hour later, and look at everything."""
    async with reopened(settings, folder, LaterClock()) as gateway:
        await settle(gateway)
        clients = await embedded_clients(gateway, tokens)
        load.client_of = clients.__getitem__
        await load.read_back()
        await look_through(gateway, load.figures, rows_of(gateway), where)


def room() -> Path | None:
    """Where a torture's folders go: memory where there is enough of it, since no power is lost here."""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 4 * 1024 * MIB:
        return memory
    return None


def seconds_left(ends: float) -> float:
    return max(0.0, ends - time.monotonic())
