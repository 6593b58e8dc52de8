"""HTTP listeners: the gateway's own Unix socket for its user, and a TCP port, loopback unless configured."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvgw.admin.app import build_app
from kvgw.admin.seat import PEER_UID
from kvgw.datadir import ADMIN_SOCKET
from kvgw.endpoint import TcpEndpoint, UnixEndpoint
from kvgw.server.listeners import bind_unix
from kvgw.server.peers import peer_uid
from kvgw.settings import SettingsError
from kvgw.wiring import Opened

CONNECTIONS_MAX: Final = 16
_BACKLOG: Final = 4
"""Connections that are accepted in one go; they hold descriptors before they are counted."""


@asynccontextmanager
async def http_listening(gateway: Opened, endpoint: TcpEndpoint | None) -> AsyncIterator[TcpEndpoint | None]:
    """Serve the application on its Unix socket and on `endpoint` while the block runs; yields it with its real port."""
    sockets = [_bind_own(gateway.folder / ADMIN_SOCKET)]
    try:
        if endpoint is not None:
            sockets.append(_bind_tcp(endpoint))
        config = uvicorn.Config(
            build_app(gateway),
            http=_limited_protocol(CONNECTIONS_MAX),
            backlog=_BACKLOG,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=2,
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=list(sockets)))
        try:
            yield None if endpoint is None else TcpEndpoint(endpoint.host, sockets[1].getsockname()[1])
        finally:
            server.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await serving
    finally:
        for sock in sockets:
            sock.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(gateway.folder / ADMIN_SOCKET)


def _bind_own(path: Path) -> socket.socket:
    try:
        return bind_unix(str(path))
    except OSError as error:
        raise SettingsError(f"cannot listen on {UnixEndpoint(str(path))}: {error.strerror or error}") from error


def _bind_tcp(endpoint: TcpEndpoint) -> socket.socket:
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
    return sock


def _limited_protocol(most: int) -> type[H11Protocol]:
    """HTTP/1.1 over at most `most` connections of each kind: one too many costs the longest-lived that sent no request
    to its end, or has its answer.

    Without a bound, idle peers take the process's last descriptors, and asyncio's accept loop fills the log. Peers on
    TCP, whom nobody knows yet, do not shut the gateway's own user out of its Unix socket.
    """
    over_tcp: dict[H11Protocol, None] = {}
    over_unix: dict[H11Protocol, None] = {}

    class Limited(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
            super().connection_made(transport)
            sock = transport.get_extra_info("socket")
            alive = over_tcp
            if sock is not None and sock.family == socket.AF_UNIX:
                self.app_state = {**self.app_state, PEER_UID: peer_uid(sock)}
                alive = over_unix
            alive[self] = None
            if len(alive) > most:
                victim = next((one for one in alive if _waits_for_peer(one)), self)
                del alive[victim]
                victim.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            over_tcp.pop(self, None)
            over_unix.pop(self, None)
            super().connection_lost(exc)

    return Limited


def _waits_for_peer(one: H11Protocol) -> bool:
    """Whether nothing is done for this peer now: the next thing to come is from it."""
    return one.cycle is None or one.cycle.response_complete or one.cycle.more_body


class _Server(uvicorn.Server):
    """Leaves the process's signals to the gateway."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]  # overrides a method of uvicorn
        yield
