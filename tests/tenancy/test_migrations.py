"""Migrations: the schema they make, both directions, killed anywhere, and a catalog that is newer than the release."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, event, inspect, text

from kvgw.runtime import ThreadWorkers
from tenancy import migrate, registry
from tenancy.engine import SqliteDatabase, sqlite_engine
from tenancy.errors import CatalogTooNew, CatalogUnavailable
from tenancy.policy import Policy
from tenancy.registry import KeyRow
from tenancy.schema import metadata
from tests.support.aio import aio
from tests.tenancy.catalog_bench import NOW
from tests.tenancy.test_schema import SCOPE

FOREIGN = "9999_from_the_future"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = sqlite_engine(tmp_path / "catalog.db")
    yield engine
    engine.dispose()


def snapshot(engine: Engine) -> list[tuple[Any, ...]]:
    """Everything in the catalog's file: definitions and rows."""
    with engine.begin() as connection:
        tables = [
            str(row[0]) for row in connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'table'"))
        ]
        made = [tuple(row) for row in connection.execute(text("SELECT name, sql FROM sqlite_master ORDER BY name"))]
        rows = [
            (table, *row) for table in sorted(tables) for row in connection.execute(text(f'SELECT * FROM "{table}"'))
        ]
        return [*made, *rows]


def other_default(*given: Any) -> bool:
    """Whether two defaults differ. Alembic's own comparison takes the empty text, and true and 1, for differences."""
    _, _, _, there, _, declared = given
    one, other = (None if text is None else text.strip("()'").replace("true", "1") for text in (there, declared))
    return one != other


def fill(engine: Engine) -> None:
    with engine.begin() as connection:
        registry.create_tenant(connection, SCOPE.tenant, "t", NOW)
        registry.create_namespace(connection, SCOPE, "n", Policy(), [KeyRow("data", 1, b"k")], NOW)


def test_up_from_empty_equals_the_metadata(engine: Engine) -> None:
    with engine.begin() as connection:
        migrate.upgrade(connection)
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": other_default}
        )
        assert compare_metadata(context, metadata) == []
        catalog = inspect(connection)
        for table in metadata.tables.values():
            declared = {str(one.name) for one in table.constraints if type(one).__name__ == "CheckConstraint"}
            there = {str(one["name"]) for one in catalog.get_check_constraints(table.name)}
            assert there == declared, f"CHECK constraints of {table.name}"


def test_there_is_one_line_of_revisions() -> None:
    scripts = ScriptDirectory(str(migrate.find_scripts()))
    assert scripts.get_heads() == [migrate.newest_revision()]
    assert len(scripts.get_bases()) == 1
    assert migrate.known_revisions() == {one.revision for one in scripts.walk_revisions()}


def test_down_to_base_and_up_again(engine: Engine) -> None:
    with engine.begin() as connection:
        migrate.upgrade(connection)
    before = snapshot(engine)
    with engine.begin() as connection:
        migrate.downgrade(connection, "base")
        assert migrate.current_revision(connection) is None
        assert inspect(connection).get_table_names() == ["alembic_version"]
    with engine.begin() as connection:
        migrate.upgrade(connection)
        assert migrate.current_revision(connection) == migrate.newest_revision()
    assert snapshot(engine) == before


def test_an_upgrade_of_what_is_newest_already_changes_nothing(engine: Engine) -> None:
    with engine.begin() as connection:
        migrate.upgrade(connection)
    fill(engine)
    before = snapshot(engine)
    with engine.begin() as connection:
        migrate.upgrade(connection)
    assert snapshot(engine) == before


def pretend_newer(engine: Engine) -> None:
    with engine.begin() as connection:
        migrate.upgrade(connection)
        connection.execute(text(f"UPDATE alembic_version SET version_num = '{FOREIGN}'"))


@pytest.mark.parametrize("move", ["up", "down"])
def test_S18_a_catalog_of_a_newer_release_is_refused_and_left_alone(engine: Engine, move: str) -> None:
    pretend_newer(engine)
    before = snapshot(engine)
    with (
        pytest.raises(
            CatalogTooNew, match=f"revision {FOREIGN}.*newest is {migrate.newest_revision()}.*run a newer kvgw"
        ),
        engine.begin() as connection,
    ):
        if move == "up":
            migrate.upgrade(connection)
        else:
            migrate.downgrade(connection, "base")
    assert snapshot(engine) == before


@aio
async def test_the_gateways_database_passes_the_refusal_on(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path / "catalog.db")
    pretend_newer(engine)
    engine.dispose()
    workers = ThreadWorkers(1)
    database = SqliteDatabase(tmp_path / "catalog.db", workers)
    try:
        with pytest.raises(CatalogTooNew):
            await database.write(migrate.upgrade)
    finally:
        await database.aclose()
        workers.close()


@aio
async def test_a_file_that_is_no_catalog_is_named_so(tmp_path: Path) -> None:
    (tmp_path / "catalog.db").write_bytes(b"this is not a database at all, but it is long enough to look at" * 99)
    workers = ThreadWorkers(1)
    database = SqliteDatabase(tmp_path / "catalog.db", workers)
    try:
        with pytest.raises(CatalogUnavailable, match="not a database"):
            await database.write(migrate.upgrade)
    finally:
        await database.aclose()
        workers.close()


class Killed(BaseException):
    """The process died here."""


def killed_at_each_statement(engine: Engine, move: Any) -> int:
    """Run `move` with death before its first, second, … statement; each time the state must be the old one exactly.

    Returns how often it died; the last run goes through.
    """
    before = snapshot(engine)
    for number in range(1, 500):
        left = number

        def count(*_: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed

        event.listen(engine, "before_cursor_execute", count)
        try:
            with engine.begin() as connection:
                move(connection)
            died = False
        except Killed:
            died = True
        finally:
            event.remove(engine, "before_cursor_execute", count)
        if not died:
            return number - 1
        assert snapshot(engine) == before, f"death before statement {number} left something behind"
    raise AssertionError("more than 500 statements")


def test_S18_killed_at_any_statement_it_is_the_old_state_and_a_second_run_converges(engine: Engine) -> None:
    assert killed_at_each_statement(engine, migrate.upgrade) > 20
    fill(engine)
    with engine.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM alembic_version")).scalar() == 1
        assert connection.execute(text("PRAGMA foreign_key_check")).all() == []
    whole = snapshot(engine)

    def down(connection: Connection) -> None:
        migrate.downgrade(connection, "base")

    assert killed_at_each_statement(engine, down) > 20
    with engine.begin() as connection:
        migrate.upgrade(connection)
    fill(engine)
    assert snapshot(engine) == whole


def test_offline_sql_run_by_hand_makes_the_same_schema(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config()
    config.set_main_option("script_location", str(migrate.find_scripts()))
    config.set_main_option("sqlalchemy.url", "sqlite://")
    command.upgrade(config, "head", sql=True)
    script = capsys.readouterr().out
    assert re.search(r"\?|:\w+_\d", script) is None, "no bind parameters are left in the script"
    by_hand = sqlite3.connect(tmp_path / "by_hand.db")
    by_hand.executescript(script)
    by_hand.close()
    with engine.begin() as connection:
        migrate.upgrade(connection)
    other = sqlite_engine(tmp_path / "by_hand.db")
    try:
        with other.begin() as connection:
            assert compare_metadata(MigrationContext.configure(connection), metadata) == []
            assert migrate.current_revision(connection) == migrate.newest_revision()
        assert {row[0] for row in snapshot(other)} == {row[0] for row in snapshot(engine)}
    finally:
        other.dispose()
