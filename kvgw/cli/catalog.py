"""``kvgw migrate``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import Connection

from kvgw.cli.options import Config, Data, Json, data_folder, settings_of
from kvgw.cli.output import console, print_json
from kvgw.datadir import DataFolder
from kvgw.runtime import ThreadWorkers
from kvgw.settings import CatalogSettings
from kvgw.wiring.secrets import read_secret
from tenancy import migrate as migrations
from tenancy.engine import Database, SqliteDatabase
from tenancy.postgres import PostgresDatabase, grant_to, parse_url


def migrate(
    data: Data = None,
    config: Config = None,
    down: Annotated[
        str | None, typer.Option(help="Move down to this revision (or base, or -1) instead of up to the newest.")
    ] = None,
    grant: Annotated[
        str | None,
        typer.Option(help="PostgreSQL: role that gateways use; it is given what they need (default: that of url)."),
    ] = None,
    json: Json = False,
) -> None:
    """Bring the catalog's schema to the newest revision.

    With SQLite, `kvgw serve` does so by itself, and this needs the data folder to itself: stop the gateway first. With
    PostgreSQL it is run once as the owner of the tables (catalog.owner_url); gateways of the release before go on.
    """
    folder = data_folder(data)
    settings = settings_of(folder, config).catalog

    def move(connection: Connection) -> tuple[str | None, str | None]:
        before = migrations.check_known(connection)
        if down is None:
            migrations.upgrade(connection)
        else:
            migrations.downgrade(connection, down)
        return before, migrations.current_revision(connection)

    async def body() -> tuple[str | None, str | None]:
        async with _owned(settings, folder) as database:
            moved = await database.write(move)
            role = grant or (parse_url(settings.url, None).username if settings.url else None)
            if settings.url and role and down is None:
                await database.write(lambda connection: grant_to(connection, role))
            return moved

    before, after = asyncio.run(body())
    where = parse_url(settings.url, None).render_as_string() if settings.url else str(_file(settings, folder))
    if json:
        print_json({"catalog": where, "before": before, "after": after})
    else:
        console().print(f"catalog {where}: revision {before or 'none'} → {after or 'none'}", highlight=False)


@asynccontextmanager
async def _owned(settings: CatalogSettings, folder: Path) -> AsyncIterator[Database]:
    async with AsyncExitStack() as stack:
        database: Database
        if settings.url:
            password_file = settings.owner_password_file if settings.owner_url else settings.password_file
            password = read_secret(password_file) if password_file else None
            database = PostgresDatabase(parse_url(settings.owner_url or settings.url, password), pool=1)
        else:
            stack.callback(DataFolder.open(folder).close)
            workers = ThreadWorkers(1, "kvgw-catalog")
            stack.callback(workers.close)
            database = SqliteDatabase(_file(settings, folder), workers)
        stack.push_async_callback(database.aclose)
        yield database


def _file(settings: CatalogSettings, folder: Path) -> Path:
    return Path(settings.file) if settings.file else folder / "catalog.db"
