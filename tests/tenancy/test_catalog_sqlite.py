"""The catalog's suite on SQLite."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from kvgw.runtime import ThreadWorkers
from tenancy import migrate
from tenancy.catalog import Catalog
from tenancy.engine import SqliteDatabase, sqlite_engine
from tenancy.model import Node
from tests.tenancy.catalog_bench import Backend
from tests.tenancy.catalog_contract import CatalogContract
from tests.tenancy.catalog_counts import CatalogCounts
from tests.tenancy.catalog_endings import CatalogEndings
from tests.tenancy.catalog_nodes import CatalogNodes
from tests.tenancy.catalog_renewal import CatalogRenewal
from tests.tenancy.catalog_room import CatalogRoom
from tests.tenancy.catalog_writes import CatalogWrites


class SqliteBackend:
    """A catalog in one file, with one thread for its transactions."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    def catalog(self, node: Node) -> Catalog:
        return Catalog(self._database, node)

    async def transact(self, body: Callable[[Connection], Any]) -> Any:
        return await self._database.write(body)

    async def gather_statistics(self) -> None:
        await self._database.write(lambda connection: connection.exec_driver_sql("ANALYZE"))


@asynccontextmanager
async def sqlite_backend(file: Path) -> AsyncIterator[Backend]:
    workers = ThreadWorkers(1)
    try:
        database = SqliteDatabase(file, workers)
        try:
            yield SqliteBackend(database)
        finally:
            await database.aclose()
    finally:
        workers.close()


@pytest.fixture(scope="module")
def empty_catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated catalog file, to be copied."""
    file = tmp_path_factory.mktemp("template") / "catalog.db"
    engine = sqlite_engine(file)
    with engine.begin() as connection:
        migrate.upgrade(connection)
    engine.dispose()
    return file


class OnSqlite:
    @pytest.fixture(autouse=True)
    def _a_folder(self, tmp_path: Path, empty_catalog: Path) -> None:
        self.file = Path(shutil.copy(empty_catalog, tmp_path))

    def backend(self) -> AbstractAsyncContextManager[Backend]:
        return sqlite_backend(self.file)


class TestCatalogOnSqlite(OnSqlite, CatalogContract):
    pass


class TestCatalogEndingsOnSqlite(OnSqlite, CatalogEndings):
    pass


class TestCatalogNodesOnSqlite(OnSqlite, CatalogNodes):
    pass


class TestCatalogRenewalOnSqlite(OnSqlite, CatalogRenewal):
    pass


class TestCatalogRoomOnSqlite(OnSqlite, CatalogRoom):
    pass


class TestCatalogCountsOnSqlite(OnSqlite, CatalogCounts):
    pass


class TestCatalogWritesOnSqlite(OnSqlite, CatalogWrites):
    pass
