"""The catalog's suite on PostgreSQL, as a role under row-level security."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import Connection

from tenancy.catalog import Catalog
from tenancy.model import Node
from tenancy.postgres import PostgresDatabase, parse_url
from tests.support.catalogs import APP_ROLE, migrated_template
from tests.support.postgres import Postgres
from tests.tenancy.catalog_bench import Backend
from tests.tenancy.catalog_contract import CatalogContract
from tests.tenancy.catalog_counts import CatalogCounts
from tests.tenancy.catalog_endings import CatalogEndings
from tests.tenancy.catalog_nodes import CatalogNodes
from tests.tenancy.catalog_renewal import CatalogRenewal
from tests.tenancy.catalog_room import CatalogRoom
from tests.tenancy.catalog_writes import CatalogWrites

_NUMBERS = itertools.count()


class PostgresBackend:
    """A catalog reached as the gateways' role; a test's raw statements go as the superuser, who sees all."""

    def __init__(self, database: PostgresDatabase, superuser: PostgresDatabase) -> None:
        self._database = database
        self._superuser = superuser

    def catalog(self, node: Node) -> Catalog:
        return Catalog(self._database, node)

    async def transact(self, body: Callable[[Connection], Any]) -> Any:
        return await self._superuser.write(body)

    async def gather_statistics(self) -> None:
        await self._superuser.write(lambda connection: connection.exec_driver_sql("ANALYZE"))


@asynccontextmanager
async def postgres_backend(server: Postgres, database: str) -> AsyncIterator[Backend]:
    gateway = PostgresDatabase(parse_url(server.url(database, APP_ROLE), None), pool=8)
    superuser = PostgresDatabase(parse_url(server.url(database), None), pool=1)
    try:
        yield PostgresBackend(gateway, superuser)
    finally:
        await gateway.aclose()
        await superuser.aclose()


class OnPostgres:
    @pytest.fixture(autouse=True)
    def _a_database(self, postgres: Postgres) -> None:
        self.server = postgres
        self.database = postgres.database(f"catalog_{next(_NUMBERS)}")
        postgres.sql(f'CREATE DATABASE "{self.database}" TEMPLATE "{migrated_template(postgres)}"')

    def backend(self) -> AbstractAsyncContextManager[Backend]:
        return postgres_backend(self.server, self.database)


@pytest.mark.postgres
class TestCatalogOnPostgres(OnPostgres, CatalogContract):
    pass


@pytest.mark.postgres
class TestCatalogEndingsOnPostgres(OnPostgres, CatalogEndings):
    pass


@pytest.mark.postgres
class TestCatalogNodesOnPostgres(OnPostgres, CatalogNodes):
    pass


@pytest.mark.postgres
class TestCatalogRenewalOnPostgres(OnPostgres, CatalogRenewal):
    pass


@pytest.mark.postgres
class TestCatalogRoomOnPostgres(OnPostgres, CatalogRoom):
    pass


@pytest.mark.postgres
class TestCatalogCountsOnPostgres(OnPostgres, CatalogCounts):
    pass


@pytest.mark.postgres
class TestCatalogWritesOnPostgres(OnPostgres, CatalogWrites):
    pass
