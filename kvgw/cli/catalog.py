"""``kvgw migrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvgw.cli.options import Config, Data, Json, data_folder, settings_of
from kvgw.cli.output import console, print_json
from kvgw.datadir import DataFolder
from tenancy import migrate as migrations
from tenancy.engine import sqlite_engine


def migrate(
    data: Data = None,
    config: Config = None,
    down: Annotated[
        str | None, typer.Option(help="Move down to this revision (or base, or -1) instead of up to the newest.")
    ] = None,
    json: Json = False,
) -> None:
    """Bring the catalog's schema to the newest revision. `kvgw serve` does so by itself.

    Needs the data folder to itself: stop the gateway first.
    """
    folder = data_folder(data)
    settings = settings_of(folder, config)
    owned = DataFolder.open(folder)
    try:
        file = Path(settings.catalog.file) if settings.catalog.file else folder / "catalog.db"
        engine = sqlite_engine(file)
        try:
            with engine.begin() as connection:
                before = migrations.check_known(connection)
                if down is None:
                    migrations.upgrade(connection)
                else:
                    migrations.downgrade(connection, down)
                after = migrations.current_revision(connection)
        finally:
            engine.dispose()
    finally:
        owned.close()
    if json:
        print_json({"catalog": str(file), "before": before, "after": after})
    else:
        console().print(f"catalog {file}: revision {before or 'none'} → {after or 'none'}", highlight=False)
