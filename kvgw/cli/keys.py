"""``kvgw keys``."""

from __future__ import annotations

import asyncio
import os

import typer

from kvgw.cli.options import Config, Data, Json, data_folder, settings_of
from kvgw.cli.output import console, print_json
from kvgw.runtime import SystemRng, ThreadWorkers
from kvgw.wiring.keys import keys_folder
from tenancy.rootkey import FileRootKey

keys = typer.Typer(help="The root key.", no_args_is_help=True)


@keys.callback()
def _keys() -> None:
    """The root key."""


@keys.command("init")
def init(data: Data = None, config: Config = None, json: Json = False) -> None:
    """Make the root key of several gateways, once; a key that is there stays.

    Copy the folder to every gateway (keys.dir), readable by its user alone, and keep a copy apart from all data:
    without it nothing that was stored can be read again.
    """
    data_dir = data_folder(data)
    folder = keys_folder(settings_of(data_dir, config), data_dir)
    os.makedirs(folder.parent, mode=0o700, exist_ok=True)

    async def body() -> str:
        workers = ThreadWorkers(1)
        try:
            return (await FileRootKey.open_or_create(folder, workers, SystemRng().token)).key_id
        finally:
            workers.close()

    key_id = asyncio.run(body())
    if json:
        print_json({"folder": str(folder), "key_id": key_id})
    else:
        console().print(f"root key {key_id} in {folder}", highlight=False, soft_wrap=True)
