"""The catalog's database: one transaction at a time as a function over a SQLAlchemy connection.

A transaction body is a plain function ``body(connection) -> result``. On SQLite it runs in the catalog's own thread:
one hop for a whole transaction, whatever number of statements it has, and never half done when its caller is cancelled.

SQLite rules: one process, one connection for reads and writes (two connections that check-point one WAL can corrupt it
before SQLite 3.51.3), ``BEGIN IMMEDIATE``, WAL, ``synchronous=FULL``, ``secure_delete=ON``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Final, Protocol, TypeAlias, TypeVar
from urllib.parse import quote
from uuid import UUID

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from tenancy.errors import CatalogUnavailable
from tenancy.ports import Workers
from tenancy.sight import NO_TENANT, Sight

Result = TypeVar("Result")

_READ_ONLY: Final = "kvgw_read_only"
_BUSY_TIMEOUT_MS: Final = 2_000
_WAL_LIMIT_BYTES: Final = 64 * 1024 * 1024
_CHECKPOINT_PAGES: Final = 8_000
"""Half of the WAL's limit, in pages of 4 KiB. Keys are random, so each batch changes pages all over the indexes: the
more batches a check-point has, the more of them it writes once instead of once for each."""
_CACHE_KIB: Final = 32 * 1024
"""Pages kept in memory, so that an index of a few hundred thousand chunks is not read from the file for each batch."""


class Ending(Enum):
    """What a transaction may have done to what was visible."""

    NOTHING = "nothing"
    """All that was visible still is."""
    UNTOLD = "untold"
    """Something may have ended, but nobody is told so: other gateways may answer from memory a moment longer."""
    TOLD = "told"
    """Something may have ended, and somebody is told: no gateway may answer from memory what was before (law 5)."""


Ends: TypeAlias = Callable[[Result], Ending]
"""Tells it from the transaction's result."""


def anything(_: object) -> Ending:
    """Any write may have ended something that its caller acknowledges, unless it is known not to."""
    return Ending.TOLD


def ends_nothing(_: object) -> Ending:
    """What was visible stays visible, whatever the result."""
    return Ending.NOTHING


def ends_untold(_: object) -> Ending:
    """What ends here nobody asked to end."""
    return Ending.UNTOLD


def ends_what_it_names(result: object) -> Ending:
    """As `ends_untold`; an empty result, or one that begins with a count of 0, says that nothing did."""
    count = result[0] if isinstance(result, tuple) else result
    return Ending.UNTOLD if count else Ending.NOTHING


class Database(Protocol):
    """Where the catalog's rows are. Raises `CatalogUnavailable` when it cannot be reached."""

    async def write(
        self, body: Callable[[Connection], Result], sight: Sight = NO_TENANT, ends: Ends[Result] = anything
    ) -> Result:
        """Run `body` in one transaction that takes the write lock first; committed when this returns.

        `ends` tells from the result what may have ended of the tenant in `sight`; see `version`.
        """
        ...

    def version(self, tenant: UUID) -> int | None:
        """A number that changes whenever something of the tenant may have ceased to be visible; None: not known now.

        As long as it is the same, what was found visible by a read that began under it still is, but for its expiry.
        """
        ...

    async def read(self, body: Callable[[Connection], Result], sight: Sight = NO_TENANT) -> Result:
        """Run `body`, which only reads, in one transaction."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


class SqliteDatabase:
    """The catalog in one SQLite file, with this process as its only user."""

    def __init__(self, path: Path, workers: Workers, *, read_only: bool = False) -> None:
        """`workers` should own a single thread: transactions are serial anyway.

        `read_only`: beside the process that owns the file. Such a connection never writes or check-points.
        """
        self._engine = sqlite_reader(path) if read_only else sqlite_engine(path)
        self._workers = workers
        self._versions: defaultdict[UUID, int] = defaultdict(int)

    async def write(
        self, body: Callable[[Connection], Result], sight: Sight = NO_TENANT, ends: Ends[Result] = anything
    ) -> Result:
        return await self._workers.run(lambda: self._write(body, sight.tenant, ends))

    def version(self, tenant: UUID) -> int | None:
        return self._versions[tenant]

    def _write(self, body: Callable[[Connection], Result], tenant: UUID | None, ends: Ends[Result]) -> Result:
        """In the catalog's own thread: the version changes before any later transaction can see what this one did."""
        harmless = False
        try:
            result = self._transact(body, {})
            harmless = ends(result) is Ending.NOTHING
        finally:
            if tenant is not None and not harmless:
                self._versions[tenant] += 1
        return result

    async def read(self, body: Callable[[Connection], Result], sight: Sight = NO_TENANT) -> Result:
        return await self._workers.run(lambda: self._transact(body, {_READ_ONLY: True}))

    def _transact(self, body: Callable[[Connection], Result], options: dict[str, bool]) -> Result:
        with _mapped_errors(), self._engine.connect() as plain, (bound := plain.execution_options(**options)).begin():
            return body(bound)

    async def aclose(self) -> None:
        await self._workers.run(self._engine.dispose)


def sqlite_engine(path: Path) -> Engine:
    """An engine with exactly one connection to `path`, set up by the rules of this module."""
    engine = create_engine(
        f"sqlite+pysqlite:///{path}",
        poolclass=StaticPool,
        connect_args={"check_same_thread": False, "isolation_level": None},
    )

    @event.listens_for(engine, "connect")
    def _configure(connection, _record):  # type: ignore[no-untyped-def]  # the driver's own connection class
        cursor = connection.cursor()
        for pragma in (
            f"busy_timeout={_BUSY_TIMEOUT_MS}",
            "journal_mode=WAL",
            "synchronous=FULL",
            "secure_delete=ON",
            "foreign_keys=ON",
            f"journal_size_limit={_WAL_LIMIT_BYTES}",
            f"wal_autocheckpoint={_CHECKPOINT_PAGES}",
            f"cache_size={-_CACHE_KIB}",
            "temp_store=MEMORY",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # Nobody else uses this connection, so reads see one state without a transaction, and need no lock on the file.
        if not connection.get_execution_options().get(_READ_ONLY):
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def sqlite_reader(path: Path) -> Engine:
    """An engine that can only read the file at `path`, which must be there."""
    engine = create_engine(
        f"sqlite+pysqlite:///file:{quote(str(path))}?mode=ro&uri=true",
        poolclass=StaticPool,
        connect_args={"check_same_thread": False, "isolation_level": None, "timeout": _BUSY_TIMEOUT_MS / 1000},
    )

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


@contextmanager
def _mapped_errors() -> Iterator[None]:
    try:
        yield
    except IntegrityError:
        raise  # a broken rule of the schema is a bug of ours, not an outage
    except DBAPIError as error:
        # The driver's sentence ("database is locked", "disk is full") without the statement and its parameters.
        raise CatalogUnavailable(f"the catalog database failed: {error.orig}") from error
    except SQLAlchemyError as error:
        raise CatalogUnavailable(f"the catalog database failed: {type(error).__name__}") from error
