"""Options that several commands share, and the connection to the running gateway."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from kvgw.cli.output import error_console
from kvgw.endpoint import parse_endpoint
from kvgw.errors import Code, Outage
from kvgw.settings import Settings, default_data_dir, load
from kvgw.transport import SocketTransport

Result = TypeVar("Result")

DEADLINE_SECONDS = 10.0

Data = Annotated[
    Path | None,
    typer.Option(help="Data folder (default: $KVGW_DATA, else kvgw in the user's data folder).", show_default=False),
]
Config = Annotated[
    Path | None,
    typer.Option(
        help="Settings file (default: $KVGW_CONFIG, else kvgw.toml in the data folder if it is there).",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
EndpointOption = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        help="Gateway to ask: unix:/path or tcp:host:port (default: $KVGW_ENDPOINT, else the "
        "socket in the data folder).",
        show_default=False,
    ),
]


def data_folder(given: Path | None) -> Path:
    """The data folder as an absolute path."""
    return Path(os.path.abspath(given)) if given is not None else default_data_dir()


def settings_of(data: Path, given: Path | None) -> Settings:
    """The settings; notes about the environment go to standard error."""
    config = given or (Path(os.environ["KVGW_CONFIG"]) if os.environ.get("KVGW_CONFIG") else None)
    if config is None and (data / "kvgw.toml").is_file():
        config = data / "kvgw.toml"
    settings, notes = load(config, os.environ)
    for note in notes:
        error_console().print(f"note: {note}", highlight=False, soft_wrap=True)
    return settings


def ask(data: Path | None, endpoint: str | None, question: Callable[[SocketTransport], Awaitable[Result]]) -> Result:
    """Ask the running gateway. Raises `Outage` when none answers."""
    folder = data_folder(data)
    where = endpoint or os.environ.get("KVGW_ENDPOINT") or f"unix:{folder / 'kvgw.sock'}"

    async def exchange() -> Result:
        transport = SocketTransport(parse_endpoint(where), os.environ.get("KVGW_TOKEN"), connections=1)
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                return await question(transport)
        except TimeoutError as error:
            raise Outage(
                f"the gateway at {where} did not answer within {DEADLINE_SECONDS:g} s", Code.UNAVAILABLE
            ) from error
        except Outage as error:
            raise Outage(f"{error}; is it running? Start it with: kvgw serve --data {folder}", error.code) from error
        finally:
            await transport.aclose()

    return asyncio.run(exchange())
