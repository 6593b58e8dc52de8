"""Migrated catalogs for tests on PostgreSQL: one template a server, copied for every test."""

from __future__ import annotations

import weakref

from tenancy import migrate
from tenancy.postgres import PostgresDatabase, grant_to, parse_url
from tests.support.aio import run
from tests.support.postgres import Postgres

APP_ROLE = "kvgw_test_app"
OWNER_ROLE = "kvgw_test_owner"

_READY: weakref.WeakSet[Postgres] = weakref.WeakSet()


def migrated_template(server: Postgres) -> str:
    """A database with the newest schema, owned by `OWNER_ROLE` and usable by `APP_ROLE`, to be copied."""
    template = server.database("template")
    if server not in _READY:
        server.create_role(OWNER_ROLE)
        server.create_role(APP_ROLE)
        server.sql(f"CREATE DATABASE {template} OWNER {OWNER_ROLE}")

        async def prepare() -> None:
            owner = PostgresDatabase(parse_url(server.url(template, OWNER_ROLE), None), pool=1)
            try:
                await owner.write(migrate.upgrade)
                await owner.write(lambda connection: grant_to(connection, APP_ROLE))
            finally:
                await owner.aclose()

        run(prepare())
        _READY.add(server)
    return template
