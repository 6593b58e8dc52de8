"""Migrations on PostgreSQL: both directions on filled tables, killed at any statement, two at once, and the command."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, Engine, event, text

from tenancy import migrate
from tenancy.errors import CatalogMisconfigured, CatalogUnavailable
from tenancy.postgres import PostgresDatabase, grant_to, parse_url
from tenancy.schema import metadata
from tests.support.aio import aio
from tests.support.catalogs import APP_ROLE, OWNER_ROLE, migrated_template
from tests.support.postgres import Postgres
from tests.support.served import answer, kvgw
from tests.tenancy.catalog_bench import HERE, NOW, Bench
from tests.tenancy.test_catalog_postgres import postgres_backend

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(120)]

_NUMBERS = itertools.count()
BEFORE = "0001"
ROWS = 80


class Killed(BaseException):
    """The process died here."""


class Database:
    """One database of a test: empty, or with the newest schema."""

    def __init__(self, server: Postgres, *, empty: bool = True) -> None:
        template = migrated_template(server)
        self.server = server
        self.name = server.database(f"migrations_{os.getpid()}_{next(_NUMBERS)}")
        server.sql(f'CREATE DATABASE "{self.name}" OWNER {OWNER_ROLE}' + ("" if empty else f' TEMPLATE "{template}"'))

    def url(self, role: str = OWNER_ROLE) -> str:
        return self.server.url(self.name, role)

    @asynccontextmanager
    async def opened(self, role: str = OWNER_ROLE) -> AsyncIterator[PostgresDatabase]:
        database = PostgresDatabase(parse_url(self.url(role), None), pool=1)
        try:
            yield database
        finally:
            await database.aclose()

    async def run(self, body: Callable[[Connection], Any], role: str = OWNER_ROLE) -> Any:
        async with self.opened(role) as database:
            return await database.write(body)

    def sql(self, statement: str) -> str:
        return self.server.sql(statement, self.name)

    def snapshot(self) -> list[str]:
        """The whole schema, its policies, and the rows of every table."""
        parts = [
            "SELECT table_name, column_name, data_type, is_nullable, column_default FROM information_schema.columns "
            "WHERE table_schema = 'public' ORDER BY table_name, column_name",
            "SELECT conrelid::regclass, conname, pg_get_constraintdef(oid) FROM pg_constraint "
            "WHERE connamespace = 'public'::regnamespace ORDER BY 1, 2",
            "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1, 2",
            "SELECT tablename, policyname, qual, with_check FROM pg_policies ORDER BY 1, 2",
            "SELECT relname, relrowsecurity, relforcerowsecurity FROM pg_class WHERE relkind = 'r' "
            "AND relnamespace = 'public'::regnamespace ORDER BY 1",
        ]
        tables = self.sql("SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1").splitlines()
        parts += [
            f"SELECT '{name}', md5(string_agg(r::text, '|' ORDER BY r::text)), count(*) FROM {name} r"
            for name in tables
        ]
        return [line for part in parts for line in self.sql(part).splitlines()]

    def columns(self) -> dict[str, list[str]]:
        """The names of each table's columns."""
        found: dict[str, list[str]] = {}
        for line in self.sql(
            "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public' ORDER BY 1, 2"
        ).splitlines():
            table, column = line.split("|")
            found.setdefault(table, []).append(f'"{column}"')
        return found

    def contents(self, columns: dict[str, list[str]]) -> dict[str, str]:
        """A digest of these columns of every row, by table."""
        return {
            table: self.sql(
                f"SELECT md5(string_agg(r::text, '|' ORDER BY r::text)) FROM (SELECT {', '.join(names)} FROM {table}) r"
            )
            for table, names in columns.items()
            if table != "alembic_version"
        }


def down(target: str) -> Callable[[Connection], None]:
    return lambda connection: migrate.downgrade(connection, target)


def up(target: str = "head") -> Callable[[Connection], None]:
    return lambda connection: migrate.upgrade(connection, target)


async def filled(server: Postgres) -> Database:
    """A catalog of revision 0001 with about `ROWS` rows in every table that has any."""
    made = await asyncio.to_thread(Database, server, empty=False)
    async with postgres_backend(server, made.name) as backend:
        bench = await Bench.make(backend)
        for start in range(0, ROWS, 20):
            keys = [f"key-{number}" for number in range(start, start + 20)]
            await backend.catalog(HERE).reserve(bench.batch([f"open-{start}"]), bench.unique(), NOW + 1, NOW)
            await bench.put(*keys, label_macs=(b"m" * 32,), durability="s3" if start % 40 else "nvme")
            await bench.delete(*keys[:3])
        await bench.claim("s3", limit=10)
        await backend.catalog(HERE).announce("1", NOW, 0)
        await backend.catalog(HERE).lead("sweep", NOW, NOW)
    await made.run(down(BEFORE))
    assert made.sql("SELECT version_num FROM alembic_version") == BEFORE
    for name in ("chunk", "entry", "entry_label", "placement"):
        assert int(made.sql(f"SELECT count(*) FROM {name}")) > 60
    return made


# Both directions


@aio
async def test_up_from_nothing_equals_the_metadata_and_goes_down_and_up_again(postgres: Postgres) -> None:
    made = await asyncio.to_thread(Database, postgres)
    await made.run(up())

    def compare(connection: Connection) -> list[Any]:
        options = {"compare_type": True, "compare_server_default": True}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))

    assert await made.run(compare) == []
    newest = made.snapshot()
    await made.run(up())
    assert made.snapshot() == newest, "what is newest already stays as it is"
    await made.run(down("base"))
    assert made.sql("SELECT tablename FROM pg_tables WHERE schemaname = 'public'") == "alembic_version"
    assert made.sql("SELECT count(*) FROM pg_policies") == "0"
    await made.run(up())
    assert made.snapshot() == newest


def test_R55_filled_tables_go_up_and_down_and_keep_every_row(postgres: Postgres) -> None:
    made = asyncio.run(filled(postgres))
    old, columns = made.snapshot(), made.columns()
    rows = made.contents(columns)
    assert len([digest for digest in rows.values() if digest]) >= 10, "enough tables have rows to say something"
    asyncio.run(made.run(up()))
    assert made.sql("SELECT version_num FROM alembic_version") == migrate.newest_revision()
    newest = made.snapshot()
    assert made.contents(columns) == rows, "whatever columns came after, what was in a row stays"
    asyncio.run(made.run(down(BEFORE)))
    assert made.snapshot() == old
    asyncio.run(made.run(up()))
    assert made.snapshot() == newest


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 6])
def test_R55_killed_at_any_statement_it_is_exactly_old_or_new(postgres: Postgres, every: int) -> None:
    """Up and down, with death before each statement in turn; the connection simply ends, as with a killed process."""

    async def body() -> None:
        made = await filled(postgres)
        for move in (up(), down(BEFORE)):
            old, deaths = made.snapshot(), 0
            async with made.opened() as database:
                whole = await database.read(shape)
                while await dies(database, move, every * deaths + 1):
                    deaths += 1
                    assert (deaths, await database.read(shape)) == (deaths, whole)
                    assert deaths % 9 or made.snapshot() == old
            assert every * deaths > 20
            assert made.snapshot() != old

    asyncio.run(body())


def shape(connection: Connection) -> tuple[Any, ...]:
    """The revision, and how many tables, columns and policies there are."""
    counted = text(
        "SELECT (SELECT string_agg(version_num, ',') FROM alembic_version), (SELECT count(*) FROM pg_policies), "
        "(SELECT count(*) FROM information_schema.columns WHERE table_schema = 'public')"
    )
    return tuple(connection.execute(counted).one())


async def dies(database: PostgresDatabase, move: Callable[[Connection], None], number: int) -> bool:
    """Whether the move died before its `number`-th statement; if it has fewer, it went through."""
    left = number

    def count(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed

    def mortal(connection: Connection) -> None:
        event.listen(Engine, "before_cursor_execute", count)
        try:
            move(connection)
        finally:
            event.remove(Engine, "before_cursor_execute", count)

    try:
        await database.write(mortal)
    except Killed:
        return True
    return False


# Who else is there


@aio
async def test_two_migrations_at_once_take_turns(postgres: Postgres) -> None:
    made = await asyncio.to_thread(Database, postgres)
    results = await asyncio.gather(*(made.run(up()) for _ in range(4)), return_exceptions=True)
    assert results == [None] * 4
    assert made.sql("SELECT count(*) FROM alembic_version") == "1"
    newest = made.snapshot()
    results = await asyncio.gather(*(made.run(move) for move in (down(BEFORE), up())), return_exceptions=True)
    assert results == [None] * 2
    await made.run(up())
    assert made.snapshot() == newest


@aio
async def test_a_migration_that_cannot_get_its_tables_gives_up_and_changes_nothing(postgres: Postgres) -> None:
    made = await filled(postgres)
    old = made.snapshot()

    async def upgrade_in_a_hurry() -> None:
        async with made.opened() as database:

            def body(connection: Connection) -> None:
                connection.execute(text("SET LOCAL lock_timeout = '300ms'"))
                migrate.upgrade(connection)

            await database.write(body)

    async with made.opened(APP_ROLE) as reader:
        reading = asyncio.Event()

        def hold(connection: Connection) -> None:
            connection.execute(text("SELECT count(*) FROM chunk"))
            reading.set()
            connection.execute(text("SELECT pg_sleep(2)"))

        holding = asyncio.create_task(reader.read(hold))
        await reading.wait()
        with pytest.raises(CatalogUnavailable, match="lock timeout"):
            await upgrade_in_a_hurry()
        assert await asyncio.to_thread(made.snapshot) == old
        await holding
    await made.run(up())


@aio
async def test_a_role_that_owns_nothing_cannot_migrate(postgres: Postgres) -> None:
    empty = await asyncio.to_thread(Database, postgres)
    with pytest.raises(CatalogUnavailable, match="permission denied for schema public"):
        await empty.run(up(), APP_ROLE)
    made = await filled(postgres)
    old = made.snapshot()
    for move in (up(), down("base")):
        with pytest.raises(CatalogUnavailable, match=r"must be owner|permission denied"):
            await made.run(move, APP_ROLE)
        assert made.snapshot() == old
    with pytest.raises(CatalogMisconfigured, match="no database role 'nobody_at_all'"):
        await made.run(lambda connection: grant_to(connection, "nobody_at_all"))


# The command


def test_the_command_migrates_as_the_owner_and_gives_gateways_their_rows(postgres: Postgres, tmp_path: Path) -> None:
    made = Database(postgres)
    settings = {"KVGW__CATALOG__URL": made.url(APP_ROLE), "KVGW__CATALOG__OWNER_URL": made.url()}
    where = ("migrate", "--data", str(tmp_path / "data"))
    said = answer(*where, **settings)
    assert (said["before"], said["after"]) == (None, migrate.newest_revision())
    assert APP_ROLE in said["catalog"]
    assert postgres.sql("SELECT count(*) FROM chunk", made.name, APP_ROLE) == "0"
    assert answer(*where, **settings)["before"] == migrate.newest_revision(), "a second time it changes nothing"
    assert answer(*where, "--down", BEFORE, **settings)["after"] == BEFORE
    assert answer(*where, **settings)["after"] == migrate.newest_revision()
    assert not (tmp_path / "data").exists(), "it needs no data folder"


def test_the_command_refuses_with_a_sentence(postgres: Postgres, tmp_path: Path) -> None:
    made = Database(postgres)
    where = ("migrate", "--data", str(tmp_path / "data"))
    for settings, sentence in (
        ({"KVGW__CATALOG__URL": made.url(APP_ROLE)}, "permission denied for schema public"),
        ({"KVGW__CATALOG__URL": "postgresql://kvgw:secret@127.0.0.1/kvgw"}, "must not hold a password"),
        ({"KVGW__CATALOG__URL": "postgresql://kvgw_app@127.0.0.1:1/kvgw"}, "does not answer"),
        ({"KVGW__CATALOG__URL": made.url("nobody_at_all")}, '"nobody_at_all"'),
    ):
        run = kvgw(*where, **settings)
        assert run.returncode == 1
        assert sentence in run.stderr
        assert "Traceback" not in run.stdout + run.stderr
        assert "secret" not in run.stdout + run.stderr
    made.sql(
        "CREATE TABLE alembic_version (version_num varchar(32) PRIMARY KEY); INSERT INTO alembic_version VALUES ('9')"
    )
    made.sql(f"ALTER TABLE alembic_version OWNER TO {OWNER_ROLE}")
    run = kvgw(*where, KVGW__CATALOG__URL=made.url(APP_ROLE), KVGW__CATALOG__OWNER_URL=made.url())
    assert (run.returncode, "run a newer kvgw" in run.stderr) == (1, True)
