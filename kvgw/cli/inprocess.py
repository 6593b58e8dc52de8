"""The admin application inside this process, on a data folder whose gateway does not run. Imports the whole gateway."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
from starlette.types import Receive, Scope, Send

from kvgw.admin.app import build_app
from kvgw.admin.seat import PEER_UID
from kvgw.cli.options import settings_of
from kvgw.cli.output import error_console
from kvgw.wiring import opened


@asynccontextmanager
async def admin_here(folder: Path, config: Path | None) -> AsyncIterator[httpx2.ASGITransport]:
    """Open the gateway of a data folder, and let its owner ask."""
    async with opened(settings_of(folder, config), folder) as gateway:
        if gateway.first_token is not None:
            error_console().print(
                f"the first tenant's token, never shown again: {gateway.first_token}",
                highlight=False,
                soft_wrap=True,
            )
        application = build_app(gateway)

        async def as_owner(scope: Scope, receive: Receive, send: Send) -> None:
            await application({**scope, "state": {PEER_UID: os.geteuid()}}, receive, send)

        yield httpx2.ASGITransport(as_owner, raise_app_exceptions=False)
