"""Migrated catalogs for tests on PostgreSQL: one template a server, copied for every test."""

from __future__ import annotations

import weakref

from tenancy import migrate
from tenancy.postgres import PostgresDatabase, grant_to, parse_url
from tests.support.aio import run
from tests.support.postgres import Postgres

APP_ROLE = "kvgw_app"
OWNER_ROLE = "kvgw_owner"
TEMPLATE = "kvgw_template"

_READY: weakref.WeakSet[Postgres] = weakref.WeakSet()


def migrated_template(server: Postgres) -> str:
    """A database with the newest schema, owned by `OWNER_ROLE` and usable by `APP_ROLE`, to be copied."""
    if server not in _READY:
        server.sql(f"CREATE ROLE {OWNER_ROLE} LOGIN; CREATE ROLE {APP_ROLE} LOGIN")
        server.sql(f"CREATE DATABASE {TEMPLATE} OWNER {OWNER_ROLE}")

        async def prepare() -> None:
            owner = PostgresDatabase(parse_url(server.url(TEMPLATE, OWNER_ROLE), None), pool=1)
            try:
                await owner.write(migrate.upgrade)
                await owner.write(lambda connection: grant_to(connection, APP_ROLE))
            finally:
                await owner.aclose()

        run(prepare())
        _READY.add(server)
    return TEMPLATE
