"""Migrations of the catalog with one fault at their N-th statement, on SQLite and on PostgreSQL.

A migration is one transaction. Whatever its N-th statement, or its commit, meets, the catalog must be exactly what it
was before or exactly what it is after.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, event, text
from sqlalchemy.exc import OperationalError

from kvgw.runtime import ThreadWorkers
from tenancy import migrate
from tenancy.engine import Database, SqliteDatabase
from tenancy.errors import CatalogUnavailable
from tenancy.postgres import PostgresDatabase, grant_to, parse_url
from tests.support.catalogs import APP_ROLE
from tests.torture.faults import EXIT_CODE, Kind, Nth

OLDEST: Final = "0001"
"""The first revision that had rows; between it and the newest each migration goes up and down."""

Move = Callable[[Connection], None]
MOVES: Final[dict[str, Move]] = {
    "up": migrate.upgrade,
    "down": lambda connection: migrate.downgrade(connection, OLDEST),
}


class Statements:
    """Puts a plan in front of every statement of a transaction, and of its commit."""

    def __init__(self, plan: Nth) -> None:
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        self._due: Kind | None = None
        """What becomes of the call under way when it has been done."""

    def watch(self, connection: Connection) -> None:
        event.listen(connection, "before_cursor_execute", lambda _c, _k, statement, *_: self._before(statement))
        event.listen(connection, "after_cursor_execute", lambda *_: self.after())
        event.listen(connection, "commit", lambda _: self._before("COMMIT"))

    def _before(self, statement: str) -> None:
        kind = self._plan.next(" ".join(statement.split())[:60])
        if kind is Kind.ERROR:
            raise OperationalError(statement, None, OSError("planned: the statement fails"))
        if kind is Kind.EXIT:
            os._exit(EXIT_CODE)
        if kind is Kind.CANCEL:
            self._loop.call_soon_threadsafe(self._plan.cancel)
        self._due = kind

    def after(self) -> None:
        """The call has been done; for a commit, which tells nobody, called by whoever waited for it."""
        due, self._due = self._due, None
        if due is Kind.LOST_ANSWER:
            raise OperationalError(self._plan.where, None, OSError("planned: its answer got lost"))
        if due is Kind.EXIT_AFTER:
            os._exit(EXIT_CODE)
        if due is Kind.CANCEL_AFTER:
            self._loop.call_soon_threadsafe(self._plan.cancel)


async def moved(database: Database, move: str, plan: Nth) -> bool:
    """Migrate over the plan: whether it came to its end."""

    async def body() -> None:
        statements = Statements(plan)

        def watched(connection: Connection) -> None:
            statements.watch(connection)
            MOVES[move](connection)

        plan.armed = True
        try:
            await database.write(watched)
            statements.after()
            await asyncio.sleep(0)
        finally:
            plan.armed = False

    plan.victim = asyncio.ensure_future(body())
    try:
        await plan.victim
    except (CatalogUnavailable, OperationalError, asyncio.CancelledError):
        assert plan.fired, "it failed, and no fault had been planned"
        return False
    finally:
        plan.victim = None
    return True


def shape(connection: Connection) -> tuple[Any, ...]:
    """The revision, everything that is defined, and how many rows each table has."""
    version = migrate.current_revision(connection)
    if connection.dialect.name == "sqlite":
        defined = connection.execute(text("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY 1, 2, 3")).all()
        tables = sorted(row.name for row in defined if row.type == "table")
    else:
        columns = (
            "SELECT table_name, column_name, data_type, is_nullable, column_default FROM information_schema.columns "
            "WHERE table_schema = 'public' ORDER BY 1, 2"
        )
        rest = (
            "SELECT tablename, policyname, qual, with_check FROM pg_policies UNION ALL "
            "SELECT tablename, indexname, indexdef, '' FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1, 2"
        )
        defined = [*connection.execute(text(columns)).all(), *connection.execute(text(rest)).all()]
        tables = sorted({row[0] for row in connection.execute(text(columns)).all()})
    rows = [(table, connection.scalar(text(f'SELECT count(*) FROM "{table}"'))) for table in tables]
    return version, [tuple(row) for row in defined], rows


class SqliteFile:
    """The catalog of a data folder, while no gateway runs on it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Database]:
        with closing(ThreadWorkers(1, "kvgw-catalog")) as workers:
            database = SqliteDatabase(self._folder / "data" / "catalog.db", workers)
            try:
                yield database
            finally:
                await database.aclose()


class PostgresCopy:
    """A database that is a copy of another one, as its owner sees it."""

    def __init__(self, url: str) -> None:
        self._url = url

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Database]:
        database = PostgresDatabase(parse_url(self._url, None), pool=1)
        try:
            yield database
        finally:
            await database.aclose()


Catalog = SqliteFile | PostgresCopy


def catalog_at(place: str) -> Catalog:
    """`place`: the URL of a PostgreSQL database, or the folder of a bench."""
    return PostgresCopy(place) if place.startswith("postgresql:") else SqliteFile(Path(place))


async def shape_of(catalog: Catalog) -> tuple[Any, ...]:
    async with catalog.open() as database:
        return await database.read(shape)


async def bring_up(catalog: Catalog) -> None:
    """What ``kvgw migrate`` does: the newest revision, and the rights of a gateway's role."""
    async with catalog.open() as database:
        await database.write(migrate.upgrade)
        if isinstance(catalog, PostgresCopy):
            await database.write(lambda connection: grant_to(connection, APP_ROLE))


async def bring_down(catalog: Catalog) -> None:
    async with catalog.open() as database:
        await database.write(MOVES["down"])


def end_at(place: str, move: str, number: int, kind: str) -> int:
    """In a process of its own: migrate until the fault ends it; 0 when none came."""

    async def body() -> None:
        async with catalog_at(place).open() as database:
            await moved(database, move, Nth(number, Kind(kind)))

    asyncio.run(body())
    return 0
