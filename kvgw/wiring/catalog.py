"""Opening the catalog: SQLite in the data folder, or PostgreSQL by its URL."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from kvgw.fence import Fence
from kvgw.gateway.coherence import Coherence
from kvgw.metrics import Metrics
from kvgw.runtime import Clock, ThreadWorkers
from kvgw.settings import CatalogSettings
from kvgw.wiring.secrets import read_secret
from tenancy import migrate
from tenancy.engine import Database, SqliteDatabase
from tenancy.errors import CatalogMisconfigured
from tenancy.model import Node
from tenancy.postgres import PostgresDatabase, parse_url
from tenancy.sight import NO_TENANT
from tenancy.timekeeping import CatalogTime


async def open_database(stack: AsyncExitStack, settings: CatalogSettings, folder: Path) -> Database:
    """The catalog's database with the newest schema.

    SQLite is brought to it here. PostgreSQL is not: its tables belong to another role, and several gateways may be
    running; an old schema is refused with the remedy. Raises `CatalogMisconfigured`, `CatalogTooNew`,
    `CatalogUnavailable`.
    """
    if settings.url:
        return await _open_postgres(stack, settings)
    # Transactions are serial in SQLite, so one thread of its own serves them all.
    workers = ThreadWorkers(1, "kvgw-catalog")
    stack.callback(workers.close)
    database = SqliteDatabase(_file(settings, folder), workers)
    stack.push_async_callback(database.aclose)
    await database.write(migrate.upgrade, NO_TENANT)
    return database


def coherence_of(
    stack: AsyncExitStack,
    database: Database,
    node: Node,
    clock: Clock,
    time: CatalogTime,
    fence: Fence,
    metrics: Metrics,
) -> Coherence | None:
    """What keeps this gateway's memory in step with other gateways; None where there cannot be any."""
    if not isinstance(database, PostgresDatabase):
        return None
    coherence = Coherence(database, node.boot, clock, time, fence, metrics)
    database.memory = coherence
    stack.push_async_callback(coherence.leave)
    return coherence


async def open_to_read(stack: AsyncExitStack, settings: CatalogSettings, folder: Path) -> Database:
    """The catalog's database for reading, beside gateways that run. Raises as `open_database`."""
    if settings.url:
        return await _open_postgres(stack, settings)
    workers = ThreadWorkers(1, "kvgw-catalog")
    stack.callback(workers.close)
    database = SqliteDatabase(_file(settings, folder), workers, read_only=True)
    stack.push_async_callback(database.aclose)
    return database


def log_bytes(settings: CatalogSettings, folder: Path) -> int:
    """Bytes of SQLite's write-ahead log, which grows while somebody outside reads on; 0 on a database server."""
    if settings.url:
        return 0
    file = _file(settings, folder)
    try:
        return file.with_name(f"{file.name}-wal").stat().st_size
    except FileNotFoundError:
        return 0  # SQLite makes it with the first write


def _file(settings: CatalogSettings, folder: Path) -> Path:
    return Path(settings.file) if settings.file else folder / "catalog.db"


async def _open_postgres(stack: AsyncExitStack, settings: CatalogSettings) -> PostgresDatabase:
    password = read_secret(settings.password_file) if settings.password_file else None
    database = PostgresDatabase(parse_url(settings.url, password), settings.pool)
    stack.push_async_callback(database.aclose)
    await database.check_role()
    revision = await database.read(migrate.check_known, NO_TENANT)
    if revision != migrate.newest_revision():
        raise CatalogMisconfigured(
            f"the catalog has schema revision {revision or 'none'}, this release needs {migrate.newest_revision()}: "
            "run kvgw migrate once, with catalog.owner_url set to the role that owns the tables"
        )
    return database
