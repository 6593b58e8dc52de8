"""HTTP: health for whoever asks, metrics for those who may. Loopback unless configured."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Final

import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

import kvgw
from kvgw.endpoint import TcpEndpoint
from kvgw.errors import KvgwError
from kvgw.gateway.translate import translated
from kvgw.settings import SettingsError
from kvgw.wiring import Opened
from tenancy.access import Caller, Permission
from tenancy.errors import AccessDenied

CONNECTIONS_MAX: Final = 16
_BACKLOG: Final = 4
"""Connections that are accepted in one go; they hold descriptors before they are counted."""

OPEN_ROUTES = frozenset({"/livez", "/readyz"})
"""The only routes that need no credential: they tell a prober nothing but yes or no."""


async def _caller(request: Request, authorization: Annotated[str | None, Header()] = None) -> Caller:
    """The principal of a bearer token."""
    gateway: Opened = request.app.state.gateway
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise HTTPException(401, "a bearer token is needed", {"WWW-Authenticate": "Bearer"})
    try:
        with translated():
            return await gateway.authenticator.token(token.strip())
    except KvgwError as error:
        if error.retryable:
            raise HTTPException(503, str(error), {"Retry-After": "1"}) from error
        raise HTTPException(401, str(error), {"WWW-Authenticate": "Bearer"}) from error


async def _livez() -> PlainTextResponse:
    return PlainTextResponse("ok\n")


async def _readyz(request: Request) -> JSONResponse:
    ready = await request.app.state.gateway.gateway.ready()
    return JSONResponse({"ready": ready}, status_code=200 if ready else 503)


async def _metrics(request: Request, who: Annotated[Caller, Depends(_caller)]) -> Response:
    try:
        who.require(Permission.METRICS)
    except AccessDenied as error:
        raise HTTPException(403, str(error)) from error
    gateway: Opened = request.app.state.gateway
    gateway.refresh_gauges()
    return Response(gateway.rooms.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


def build_app(gateway: Opened) -> FastAPI:
    """The HTTP application of one gateway. Every route but `OPEN_ROUTES` needs a bearer token."""
    app = FastAPI(title="kvgw", version=kvgw.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.gateway = gateway
    for path, route in (("/livez", _livez), ("/readyz", _readyz), ("/metrics", _metrics)):
        app.add_api_route(path, route, methods=["GET"], response_model=None)
    return app


@asynccontextmanager
async def http_listening(gateway: Opened, endpoint: TcpEndpoint) -> AsyncIterator[TcpEndpoint]:
    """Serve the application while the block runs; yields the endpoint with its real port."""
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((endpoint.host, endpoint.port))
        sock.listen(_BACKLOG)  # from here on nobody is turned away, though the server is still starting
    except OSError as error:
        sock.close()
        raise SettingsError(
            f"cannot listen on {endpoint} (setting server.http): {error.strerror}; choose another port, or none"
        ) from error
    config = uvicorn.Config(
        build_app(gateway),
        http=_limited_protocol(CONNECTIONS_MAX),
        backlog=_BACKLOG,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield TcpEndpoint(endpoint.host, sock.getsockname()[1])
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        sock.close()


def _limited_protocol(most: int) -> type[H11Protocol]:
    """HTTP/1.1 over at most `most` connections: one too many costs the longest-lived that has no request in progress.

    Without a bound, idle peers take the process's last descriptors, and asyncio's accept loop fills the log.
    """
    alive: dict[H11Protocol, None] = {}

    class Limited(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
            super().connection_made(transport)
            alive[self] = None
            if len(alive) > most:
                idle = (one for one in alive if one.cycle is None or one.cycle.response_complete)
                victim = next(idle, self)
                del alive[victim]
                victim.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            alive.pop(self, None)
            super().connection_lost(exc)

    return Limited


class _Server(uvicorn.Server):
    """Leaves the process's signals to the gateway."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]  # overrides a method of uvicorn
        yield
