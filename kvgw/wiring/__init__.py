"""Wiring: settings → opened rooms, in one exit stack. The only place where rooms are chosen."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import kvgw
from kvgw.authenticate import Authenticator
from kvgw.chance import WatchedRng
from kvgw.datadir import DataFolder
from kvgw.fence import FENCED_AFTER_SECONDS, LEASE_SECONDS, Fence
from kvgw.gateway.admin import AdminVerbs
from kvgw.gateway.arrivals import Arrivals
from kvgw.gateway.backlog import Backlog
from kvgw.gateway.core import Gateway
from kvgw.gateway.directory import Directory
from kvgw.gateway.diskroom import DiskRoom
from kvgw.gateway.index import MatchIndex
from kvgw.gateway.leases import MatchLeases
from kvgw.gateway.limiter import Limiter
from kvgw.gateway.meter import Meter
from kvgw.gateway.outbox import Outbox
from kvgw.gateway.rooms import Rooms
from kvgw.gateway.turns import Turns
from kvgw.maintenance.crew import Crew, Pace
from kvgw.metrics import Metrics
from kvgw.runtime import Clock, Rng, SystemClock, SystemRng, ThreadWorkers, usable_cpus
from kvgw.settings import Settings, SettingsError, StagingSettings
from kvgw.wiring.catalog import coherence_of, log_bytes, open_database
from kvgw.wiring.keys import open_keys
from kvgw.wiring.start import (
    allowance_of,
    first_start,
    lending_of,
    outbox_limits_of,
    pace_of,
    places_of,
    policy_of,
    rates_of,
)
from kvgw.wiring.tiers import layered, open_audit_objects, open_nvme, open_s3, tracers_of
from kvgw.witness import Witness
from storage.arena import Arena
from storage.nvme import NvmeTier
from storage.policy import SegmentedLru
from storage.s3 import S3Tier
from storage.shares import Shares
from storage.staging import Staging
from tenancy.catalog import Catalog
from tenancy.deletion.deletions import Deletions
from tenancy.errors import CatalogUnavailable
from tenancy.keys.custody import Custodian
from tenancy.keys.keyring import Keyring
from tenancy.model import Node
from tenancy.policy import Policy
from tenancy.timekeeping import CatalogTime


@dataclass(frozen=True, slots=True)
class Opened:
    """A gateway ready to serve."""

    settings: Settings
    folder: Path
    rooms: Rooms
    gateway: Gateway
    directory: Directory
    custodian: Custodian
    crew: Crew
    authenticator: Authenticator
    default_policy: Policy
    """Of namespaces for which nothing else was said."""
    arena: Arena
    s3: S3Tier | None
    first_token: str | None
    """The first tenant's token, in the start that made it; it is never shown again."""

    def refresh_gauges(self) -> None:
        """Set the gauges that are read off rather than counted."""
        now = self.rooms.staging.statistics()
        self.rooms.metrics.shared_window_bytes.set(self.rooms.lending.lent_bytes)
        self.rooms.metrics.match_leases.set(self.rooms.leases.count())
        self.rooms.metrics.turns_waiting.set(self.rooms.turns.waiting)
        self.rooms.metrics.catalog_log_bytes.set(log_bytes(self.settings.catalog, self.folder))
        for kind, count in (
            ("window", now.windows.used_bytes),
            ("clean", now.clean_bytes),
            ("dirty", now.dirty_bytes),
            ("free", now.windows.free_bytes + now.residents.free_bytes),
        ):
            self.rooms.metrics.staging_bytes.labels(kind).set(count)


@dataclass(frozen=True, slots=True)
class World:
    """What enters from outside; a test brings its own."""

    clock: Clock
    rng: Rng
    pace: Pace | None = None
    """None: as the settings say."""


def system_world() -> World:
    """The machine's clock and chance."""
    return World(SystemClock(), WatchedRng(SystemRng()))


@asynccontextmanager
async def opened(
    settings: Settings, data: Path, *, world: World | None = None, wait_s: float = 0.0
) -> AsyncIterator[Opened]:
    """Open a gateway on a data folder; closing gives everything back in reverse order.

    Raises `SettingsError`, `FolderLocked`, and the rooms' errors that name what cannot work.
    """
    world = world or system_world()
    check_siblings()
    async with AsyncExitStack() as stack:
        folder = await _folder(stack, data, wait_s)
        workers = _threads(stack, ThreadWorkers())
        file_workers = _threads(stack, ThreadWorkers(max(4, 2 * usable_cpus()), "kvgw-file"))
        database = await open_database(stack, settings.catalog, folder.path)
        catalog = Catalog(database, _node(folder, settings, world.rng))
        time, fence = await _arrive(stack, catalog, world.clock, named=bool(settings.node))
        keys = await open_keys(stack, settings, folder.path, file_workers, world.rng)
        await catalog.admit_generation(await keys.store.generation())
        keyring = Keyring(keys.root, keys.store, catalog, world.clock, world.rng.token)
        policy = policy_of(settings.defaults)
        tenant, first_token = await first_start(catalog, keyring, world.rng, time.now_ms(), keys.pepper, policy)
        nvme = await open_nvme(stack, settings, folder.path, file_workers, world.clock)
        s3 = await open_s3(stack, settings.s3, world.clock)
        arena, staging = _staging(stack, settings.staging, world.clock)
        metrics, meter = Metrics(), Meter(time)
        rooms = Rooms(
            catalog=catalog,
            keyring=keyring,
            staging=staging,
            lending=lending_of(settings, workers),
            tiers=layered(settings, nvme, s3),
            tracers=tracers_of(settings, folder.path, file_workers, nvme, s3),
            deletions=Deletions(database),
            backlog=Backlog(),
            disk_room=DiskRoom(world.clock),
            arrivals=Arrivals(),
            index=MatchIndex(settings.catalog.match_index_bytes),
            coherence=coherence_of(stack, database, catalog.node, world.clock, time, fence, metrics),
            metrics=metrics,
            meter=meter,
            limiter=Limiter(world.clock, metrics, allowance_of(settings.limits), meter),
            turns=Turns(places_of(settings.catalog)),
            clock=world.clock,
            time=time,
            fence=fence,
            leases=MatchLeases(world.clock),
            outbox=Outbox(outbox_limits_of(settings.writeback), time, metrics),
            rng=world.rng,
            workers=workers,
            signer=keys.signer,
            witness=Witness(folder.path, open_audit_objects(stack, settings), file_workers, world.rng),
        )
        stack.push_async_callback(rooms.staging.aclose)
        crew = await _crew(stack, rooms, nvme, settings, world.pace)
        directory = Directory(catalog, keyring, world.clock)
        admin = AdminVerbs(rooms, directory, arena, nvme, keys.root, policy)
        yield Opened(
            settings=settings,
            folder=folder.path,
            rooms=rooms,
            gateway=Gateway(rooms, directory, admin),
            directory=directory,
            custodian=Custodian(catalog, keyring, keys.root, keys.store, world.rng.token, time.now_ms),
            crew=crew,
            default_policy=policy,
            authenticator=Authenticator(catalog, world.clock, time, keys.pepper.reveal(), tenant),
            arena=arena,
            s3=s3,
            first_token=first_token,
        )


async def _crew(
    stack: AsyncExitStack, rooms: Rooms, nvme: NvmeTier | None, settings: Settings, pace: Pace | None
) -> Crew:
    crew = Crew(rooms, nvme, pace or pace_of(settings.maintenance), rates_of(settings.writeback))
    stack.push_async_callback(crew.books.close)
    await crew.prepare()
    return crew


async def _folder(stack: AsyncExitStack, data: Path, wait_s: float) -> DataFolder:
    folder = await DataFolder.open_within(data, wait_s)
    stack.callback(folder.close)
    return folder


def _staging(stack: AsyncExitStack, settings: StagingSettings, clock: Clock) -> tuple[Arena, Staging]:
    arena = Arena(settings.bytes)
    stack.callback(arena.close)
    return arena, Staging(arena, SegmentedLru(), clock, shares=Shares.of(settings.bytes, tenants=settings.tenants))


def _threads(stack: AsyncExitStack, workers: ThreadWorkers) -> ThreadWorkers:
    stack.callback(workers.close)
    return workers


def _node(folder: DataFolder, settings: Settings, rng: Rng) -> Node:
    return Node(folder.node_name(settings.node, rng), rng.token(8).hex(), _why_alone(settings))


def _why_alone(settings: Settings) -> str:
    """What keeps this gateway from being one of several; a SQLite catalog has no other one anyway."""
    if settings.catalog.url and not settings.s3.bucket:
        return "it has no s3.bucket, so others could not read its chunks"
    if settings.catalog.url and settings.keys.store != "s3":
        return "its keys.store is file, which others cannot reach"
    return ""


async def _arrive(stack: AsyncExitStack, catalog: Catalog, clock: Clock, *, named: bool) -> tuple[CatalogTime, Fence]:
    """Say that this process is there; it says goodbye when the stack ends. `named`: its name is not its folder's."""
    time = await _open_time(catalog, clock)
    fence = Fence(clock)  # begins before the heartbeat that it stands for
    # The lock on the data folder proves that an earlier run is over, unless the node's name is not the folder's.
    await catalog.announce(kvgw.__version__, time.now_ms(), int(LEASE_SECONDS * 1000) if named else 0)
    stack.push_async_callback(_leave, catalog, time)
    return time, fence


async def _open_time(catalog: Catalog, clock: Clock) -> CatalogTime:
    high_water_ms, asked_at = await catalog.high_water_ms(), clock.monotonic()
    database_ms, answered_at = await catalog.database_now_ms(), clock.monotonic()
    if database_ms is None and clock.now_ms() < high_water_ms and not await _left_in_good_order(catalog):
        # The clock was set back. Whoever was killed may have told a later time than it had written down with its last
        # beat: what it said had expired stays so.
        high_water_ms += int(FENCED_AFTER_SECONDS * 1000)
    time = CatalogTime(clock, high_water_ms)
    if database_ms is not None:
        time.adopt(database_ms, asked_at, answered_at)
    return time


async def _left_in_good_order(catalog: Catalog) -> bool:
    """Whether all processes before have said how late it was when they ended."""
    return all(one.left_ms is not None for one in await catalog.processes())


async def _leave(catalog: Catalog, time: CatalogTime) -> None:
    """Say goodbye; a catalog that does not answer finds out by itself when the lease is over."""
    with contextlib.suppress(CatalogUnavailable):
        await catalog.leave(time.now_ms())


def check_siblings() -> None:
    """Refuse to run with a foreign ``storage`` or ``tenancy`` package that shadows this distribution's."""
    import storage
    import tenancy

    home = Path(kvgw.__file__).resolve().parent.parent
    for package in (storage, tenancy):
        found = Path(str(package.__file__)).resolve().parent
        if found.parent != home:
            raise SettingsError(
                f"the package {package.__name__!r} was found at {found}, not beside kvgw in {home}: another package or "
                "folder of that name is in the way; start kvgw from another folder, or uninstall it"
            )
