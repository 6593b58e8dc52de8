"""``kvgw serve``."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from kvgw.cli import logs
from kvgw.cli.options import Config, Data, data_folder, settings_of
from kvgw.cli.output import console
from kvgw.server.process import run, settle, stop_signals
from kvgw.server.serve import Serving, serving
from kvgw.settings import Settings

log = logging.getLogger("kvgw.server")


def serve(
    data: Data = None,
    config: Config = None,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for another gateway to let go of the data folder.", min=0.0)
    ] = 0.0,
) -> None:
    """Run a gateway until Ctrl-C or SIGTERM.

    With no configuration: a Unix socket and loopback only, SQLite, chunks on disk under one data folder. The first
    start makes a tenant and prints its token, once.
    """
    logs.set_up()
    folder = data_folder(data)
    settings = settings_of(folder, config)

    async def body() -> None:
        async with serving(settings, folder, wait_s=wait) as started:
            with stop_signals() as stopped:  # before it says that it is ready
                _announce(started, settings)
                settle()
                await stopped
            log.info("stopping %s", ", ".join(map(str, started.endpoints)))

    run(body())


def _announce(started: Serving, settings: Settings) -> None:
    out = console()
    for endpoint in started.endpoints:
        out.print(f"listening on {endpoint}", highlight=False, soft_wrap=True)
    if started.http is not None:
        out.print(f"health and metrics on http://{str(started.http).removeprefix('tcp:')}", highlight=False)
    tiers = " → ".join(["staging", *started.gateway.rooms.tiers])
    out.print(f"tiers {tiers}; data folder {started.gateway.folder}", highlight=False, soft_wrap=True)
    if started.gateway.first_token is not None:
        out.print("first token, shown this once (keep it safe):", highlight=False)
        out.print(f"  {started.gateway.first_token}", highlight=False, soft_wrap=True)
    if settings.s3.bucket and not settings.s3.endpoint.startswith("http://"):
        out.print(f"s3 bucket {settings.s3.bucket}", highlight=False)
    out.print("ready", highlight=False)
