"""Several gateways in one process bring their catalogs to the newest schema at once, each its own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sqlalchemy import inspect

from tenancy import migrate
from tenancy.engine import sqlite_engine
from tenancy.schema import metadata

CATALOGS = 4


def test_catalogs_that_are_migrated_at_once_each_get_their_tables(tmp_path: Path) -> None:
    """Alembic's context is one for the process: two threads in it made both catalogs' tables in one of them."""
    together = threading.Barrier(CATALOGS)

    def upgrade(number: int) -> set[str]:
        engine = sqlite_engine(tmp_path / f"catalog-{number}.db")
        try:
            with engine.begin() as connection:
                together.wait(20)
                migrate.upgrade(connection)
            with engine.begin() as connection:
                assert migrate.current_revision(connection) == migrate.newest_revision()
                return set(inspect(connection).get_table_names())
        finally:
            engine.dispose()

    with ThreadPoolExecutor(CATALOGS) as threads:
        tables = list(threads.map(upgrade, range(CATALOGS)))
    assert all(found >= set(metadata.tables) for found in tables)
