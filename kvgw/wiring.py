"""Wiring: settings → opened rooms, in one exit stack. The only place where rooms are chosen."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

import kvgw
from kvgw.authenticate import Authenticator, token_row
from kvgw.datadir import DataFolder
from kvgw.gateway.admin import AdminVerbs
from kvgw.gateway.backlog import Backlog
from kvgw.gateway.core import Gateway
from kvgw.gateway.directory import Directory
from kvgw.gateway.rooms import Rooms
from kvgw.maintenance.crew import Crew, Pace
from kvgw.metrics import Metrics
from kvgw.runtime import Clock, Rng, SystemClock, SystemRng, ThreadWorkers, usable_cpus
from kvgw.settings import DefaultSettings, MaintenanceSettings, S3Settings, Settings, SettingsError
from storage.arena import Arena
from storage.limited import LimitedTier
from storage.nvme import NvmeOptions, NvmeTier
from storage.policy import SegmentedLru
from storage.s3 import S3Options, S3Tier
from storage.shares import Shares
from storage.staging import Staging
from storage.tier import Tier
from tenancy import migrate
from tenancy.access import DEFAULT_NAMESPACE, Permission, new_token
from tenancy.catalog import Catalog
from tenancy.engine import SqliteDatabase
from tenancy.keyring import Keyring
from tenancy.keystore import FileKeyStore
from tenancy.model import Node
from tenancy.provision import create_namespace
from tenancy.registry import Policy
from tenancy.rootkey import FileRootKey
from tenancy.timekeeping import CatalogTime

FIRST_TENANT: Final = "default"
FIRST_TOKEN_DAYS: Final = 365
FIRST_PERMISSIONS: Final = frozenset(Permission)

_NVME_OPERATIONS: Final = 16
_DAY_MS: Final = 86_400_000


@dataclass(frozen=True, slots=True)
class Opened:
    """A gateway ready to serve."""

    settings: Settings
    folder: Path
    rooms: Rooms
    gateway: Gateway
    crew: Crew
    authenticator: Authenticator
    arena: Arena
    s3: S3Tier | None
    first_token: str | None
    """The first tenant's token, in the start that made it; it is never shown again."""

    def refresh_gauges(self) -> None:
        """Set the gauges that are read off rather than counted."""
        now = self.rooms.staging.statistics()
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
    return World(SystemClock(), SystemRng())


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
        folder = await DataFolder.open_within(data, wait_s)
        stack.callback(folder.close)
        workers = ThreadWorkers()
        stack.callback(workers.close)
        file_workers = ThreadWorkers(max(4, 2 * usable_cpus()), "kvgw-file")
        stack.callback(file_workers.close)
        node = Node(folder.node_name(settings.node, world.rng), world.rng.token(8).hex())
        catalog = await _open_catalog(stack, settings, folder, node)
        time = CatalogTime(world.clock, await catalog.high_water_ms())
        await catalog.announce(kvgw.__version__, time.now_ms())
        stack.push_async_callback(catalog.leave)
        root = await FileRootKey.open_or_create(folder.keys, file_workers, world.rng.token)
        store = await FileKeyStore.open(folder.keys, file_workers)
        keyring = Keyring(root, store, catalog, world.clock, world.rng.token)
        pepper = _pepper(folder.keys, world.rng)
        tenant, first_token = await _first_start(settings.defaults, catalog, keyring, world, time, pepper)
        nvme = await _open_nvme(stack, settings, folder, file_workers, world)
        s3 = await _open_s3(stack, settings.s3, world.clock)
        tiers = _tiers(settings, nvme, s3)
        arena = Arena(settings.staging.bytes)
        stack.callback(arena.close)
        shares = Shares.of(settings.staging.bytes, tenants=settings.staging.tenants)
        rooms = Rooms(
            catalog=catalog,
            keyring=keyring,
            staging=Staging(arena, SegmentedLru(), world.clock, shares=shares),
            tiers=tiers,
            backlog=Backlog(),
            metrics=Metrics(),
            clock=world.clock,
            time=time,
            rng=world.rng,
            workers=workers,
        )
        stack.push_async_callback(rooms.staging.aclose)
        crew = Crew(rooms, nvme, world.pace or pace_of(settings.maintenance))
        await crew.prepare()
        directory = Directory(catalog, keyring, world.clock)
        admin = AdminVerbs(rooms, directory, arena, nvme, root, policy_of(settings.defaults))
        yield Opened(
            settings=settings,
            folder=folder.path,
            rooms=rooms,
            gateway=Gateway(rooms, directory, admin),
            crew=crew,
            authenticator=Authenticator(catalog, world.clock, time, pepper, tenant),
            arena=arena,
            s3=s3,
            first_token=first_token,
        )


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


async def _open_catalog(stack: AsyncExitStack, settings: Settings, folder: DataFolder, node: Node) -> Catalog:
    # Transactions are serial in SQLite, so one thread of its own serves them all.
    workers = ThreadWorkers(1, "kvgw-catalog")
    stack.callback(workers.close)
    file = Path(settings.catalog.file) if settings.catalog.file else folder.path / "catalog.db"
    database = SqliteDatabase(file, workers)
    stack.push_async_callback(database.aclose)
    await database.write(migrate.upgrade)
    return Catalog(database, node)


async def _first_start(
    defaults: DefaultSettings, catalog: Catalog, keyring: Keyring, world: World, time: CatalogTime, pepper: bytes
) -> tuple[UUID, str | None]:
    """Make sure that there is a first tenant with its namespace and token; the token's text if it was made now."""
    known = await catalog.tenant(FIRST_TENANT)
    if known is not None:
        if await catalog.namespace(known, DEFAULT_NAMESPACE) is None:
            await create_namespace(
                catalog, keyring, world.rng.token, time.now_ms(), known, DEFAULT_NAMESPACE, policy_of(defaults)
            )
        return known, None
    tenant = UUID(bytes=world.rng.token(16), version=4)
    await catalog.create_tenant(tenant, FIRST_TENANT, time.now_ms())
    await create_namespace(
        catalog, keyring, world.rng.token, time.now_ms(), tenant, DEFAULT_NAMESPACE, policy_of(defaults)
    )
    token = new_token(world.rng.token)
    expires_ms = time.now_ms() + FIRST_TOKEN_DAYS * _DAY_MS
    row = token_row(token, pepper, tenant, FIRST_PERMISSIONS, "*", expires_ms)
    await catalog.add_token(row, time.now_ms())
    return tenant, token.text


def policy_of(defaults: DefaultSettings) -> Policy:
    return Policy(
        durability=defaults.durability,
        default_ttl_ms=defaults.ttl_seconds * 1000,
        max_ttl_ms=defaults.max_ttl_seconds * 1000,
    )


def pace_of(maintenance: MaintenanceSettings) -> Pace:
    return Pace(
        outbox=maintenance.outbox_seconds,
        sweep=maintenance.sweep_seconds,
        evict=maintenance.evict_seconds,
        orphans=maintenance.orphans_seconds,
        heartbeat=maintenance.heartbeat_seconds,
        nvme_orphan_grace=maintenance.nvme_orphan_grace_seconds,
        s3_orphan_grace=maintenance.s3_orphan_grace_seconds,
    )


def _pepper(keys: Path, rng: Rng) -> bytes:
    """The secret that token digests are keyed with: beside the keys, never in the catalog."""
    file = keys / "token.pepper"
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        stored = file.read_bytes()
        if len(stored) != hashlib.sha256().digest_size:
            raise SettingsError(f"{file} has {len(stored)} bytes, not 32; restore the keys folder") from None
        return stored
    with os.fdopen(handle, "wb") as out:
        pepper = rng.token(32)
        out.write(pepper)
        out.flush()
        os.fsync(out.fileno())
    return pepper


async def _open_nvme(
    stack: AsyncExitStack, settings: Settings, folder: DataFolder, workers: ThreadWorkers, world: World
) -> NvmeTier | None:
    if not settings.nvme.enabled:
        return None
    root = Path(settings.nvme.dir) if settings.nvme.dir else folder.path / "nvme"
    options = NvmeOptions(
        root=root,
        capacity_bytes=settings.nvme.capacity_bytes,
        free_bytes_min=settings.nvme.min_free_bytes,
        owner=f"the gateway with data folder {folder.path}",
    )
    nvme = await NvmeTier.open(options, workers=workers, clock=world.clock)
    stack.push_async_callback(nvme.aclose)
    return nvme


def s3_options(settings: S3Settings) -> S3Options:
    """The S3 tier's options. Raises `SettingsError` or `TierMisconfigured`."""
    secret = _read_secret(settings.secret_access_key_file) if settings.secret_access_key_file else None
    return S3Options(
        bucket=settings.bucket,
        prefix=settings.prefix,
        endpoint_url=settings.endpoint or None,
        region=settings.region,
        addressing_style=settings.addressing,
        access_key_id=settings.access_key_id or os.environ.get("AWS_ACCESS_KEY_ID"),
        secret_access_key=secret or os.environ.get("AWS_SECRET_ACCESS_KEY"),
        session_token=os.environ.get("AWS_SESSION_TOKEN"),
        instance_credentials=settings.instance_credentials,
        use_proxy=settings.use_proxy,
        ca_file=Path(settings.ca_file) if settings.ca_file else None,
        allow_http=settings.allow_http,
        request_timeout_s=settings.request_seconds,
        connections_max=settings.connections,
        checksums=settings.checksums,
    )


async def _open_s3(stack: AsyncExitStack, settings: S3Settings, clock: Clock) -> S3Tier | None:
    if not settings.bucket:
        return None
    tier = await S3Tier.open(s3_options(settings), clock=clock)
    stack.push_async_callback(tier.aclose)
    return tier


def _read_secret(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the secret file {file} cannot be read: {error}") from error


def _tiers(settings: Settings, nvme: NvmeTier | None, s3: S3Tier | None) -> dict[str, Tier]:
    tiers: dict[str, Tier] = {}
    if nvme is not None:
        tiers["nvme"] = LimitedTier(nvme, _NVME_OPERATIONS)
    if s3 is not None:
        tiers["s3"] = LimitedTier(s3, settings.s3.connections)
    if not tiers:
        raise SettingsError(
            "a gateway needs at least one tier below its staging: set nvme.enabled = true, or name s3.bucket"
        )
    if settings.defaults.durability != "staged" and settings.defaults.durability not in tiers:
        raise SettingsError(f"defaults.durability is {settings.defaults.durability}, but that tier is not configured")
    return tiers
