"""Admin verbs from the command line: asked of the running gateway, or of the data folder itself when none runs.

Each way the same application answers (`kvgw.admin.app`): over the gateway's own Unix socket, whose peer is known by
its user, over HTTP with a token (``$KVGW_ADMIN``, ``$KVGW_TOKEN``), or inside this process.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from kvgw.cli.options import data_folder
from kvgw.datadir import ADMIN_SOCKET
from kvgw.errors import Code, KvgwError, Outage, from_code

SECONDS_MAX = 120.0
_USUAL = httpx2.Timeout(SECONDS_MAX)
_PATIENT = httpx2.Timeout(SECONDS_MAX, read=None)
_BASE = "http://kvgw"


def ask_admin(
    data: Path | None,
    config: Path | None,
    method: str,
    path: str,
    *,
    body: object = None,
    query: Mapping[str, str | int] | None = None,
    patient: bool = False,
) -> Any:
    """The decoded answer to one admin request. Raises `KvgwError` with the gateway's sentence.

    `patient`: whatever time the answer takes.
    """

    folder = data_folder(data)
    if not os.environ.get("KVGW_ADMIN") and not folder.is_dir():
        raise Outage(f"no gateway runs on {folder}, and there is no such data folder; start one: kvgw serve")

    async def exchange() -> Any:
        async with _client(folder, config) as client:
            try:
                answer = await client.request(
                    method, f"/v1{path}", json=body, params=query, timeout=_PATIENT if patient else _USUAL
                )
            except httpx2.TransportError as error:
                raise Outage(f"the gateway's admin API does not answer: {error}", Code.UNAVAILABLE) from error
        return _decoded(answer)

    return asyncio.run(exchange())


def walk_admin(
    data: Path | None,
    config: Path | None,
    path: str,
    query: Mapping[str, str | int],
    turn: Callable[[Any], Mapping[str, str | int] | None],
) -> None:
    """Ask page by page over one connection: `turn` takes an answer and gives the next query, or None at the end."""

    async def exchange() -> None:
        async with _client(data_folder(data), config) as client:
            following: Mapping[str, str | int] | None = query
            while following is not None:
                try:
                    answer = await client.get(f"/v1{path}", params=following)
                except httpx2.TransportError as error:
                    raise Outage(f"the gateway's admin API does not answer: {error}", Code.UNAVAILABLE) from error
                following = turn(_decoded(answer))

    asyncio.run(exchange())


@asynccontextmanager
async def _client(folder: Path, config: Path | None) -> AsyncIterator[httpx2.AsyncClient]:
    remote = os.environ.get("KVGW_ADMIN")
    token = os.environ.get("KVGW_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if remote:
        async with httpx2.AsyncClient(base_url=remote, headers=headers, timeout=SECONDS_MAX) as client:
            yield client
    elif _listens(folder / ADMIN_SOCKET):
        transport = httpx2.AsyncHTTPTransport(uds=str(folder / ADMIN_SOCKET))
        async with httpx2.AsyncClient(
            transport=transport, base_url=_BASE, headers=headers, timeout=SECONDS_MAX
        ) as client:
            yield client
    else:
        from kvgw.cli.inprocess import admin_here  # the whole gateway, which most commands do without

        async with (
            admin_here(folder, config) as here,
            httpx2.AsyncClient(transport=here, base_url=_BASE, headers=headers, timeout=SECONDS_MAX) as client,
        ):
            yield client


def _listens(path: Path) -> bool:
    """Whether a gateway answers on this socket now."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _decoded(answer: httpx2.Response) -> Any:
    if answer.is_success:
        return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else answer.text
    try:
        told = answer.json()["error"]
        error: KvgwError = from_code(Code(told["code"]), told["message"])
    except (ValueError, KeyError, TypeError):
        error = Outage(f"the admin API answered {answer.status_code} without saying why", Code.INTERNAL)
    raise error
