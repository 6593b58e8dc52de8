"""`kvgw serve`: a gateway that listens, from its settings."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvgw.endpoint import Endpoint, UnixEndpoint
from kvgw.server.connection import Connection
from kvgw.server.http import http_listening
from kvgw.server.limits import Limits
from kvgw.server.listeners import listening, tcp_endpoint
from kvgw.settings import ServerSettings, Settings, SettingsError
from kvgw.tls import ServerCertificate
from kvgw.wiring import Opened, World, opened

log = logging.getLogger("kvgw.server")

DESCRIPTORS_KEPT = 128
"""Descriptors that connections of clients never get: files, the database, S3."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A gateway that listens."""

    gateway: Opened
    endpoints: tuple[Endpoint, ...]
    http: Endpoint | None


@asynccontextmanager
async def serving(
    settings: Settings, data: Path, *, world: World | None = None, wait_s: float = 0.0
) -> AsyncIterator[Serving]:
    """Open a gateway and its listeners; leaving stops accepting, ends connections, and closes everything."""
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(opened(settings, data, world=world, wait_s=wait_s))
        crew = asyncio.create_task(gateway.crew.run())
        stack.push_async_callback(_cancel, crew)
        preparing = asyncio.create_task(_prepare_memory(gateway))
        stack.push_async_callback(_cancel, preparing)
        connections, windows = _limits_by_descriptors(settings.server.connections)
        limits = Limits(connections=connections)
        gateway.rooms.lending.windows_max = windows
        node = gateway.rooms.catalog.node.node
        certificate = _certificate(settings.server)

        async def serve(sock: socket.socket) -> None:
            await Connection(sock, gateway.gateway, gateway.authenticator, node, limits, certificate).serve()

        endpoints: list[Endpoint] = []
        wanted: list[Endpoint] = [UnixEndpoint(settings.server.socket or str(data / "kvgw.sock"))]
        if settings.server.listen:
            wanted.append(
                tcp_endpoint(
                    settings.server.listen,
                    allow_plaintext=settings.server.allow_plaintext,
                    encrypted=certificate is not None,
                )
            )
        for endpoint in wanted:
            listener = listening(endpoint, serve, limits.connections, gateway.rooms.metrics)
            endpoints.append(await stack.enter_async_context(listener))
        address = None
        if settings.server.http:
            address = tcp_endpoint(settings.server.http, allow_plaintext=settings.server.allow_plaintext)
        http = await stack.enter_async_context(http_listening(gateway, address))
        yield Serving(gateway, tuple(endpoints), http)


def _certificate(settings: ServerSettings) -> ServerCertificate | None:
    if not settings.tls_cert_file and not settings.tls_key_file:
        return None
    if not settings.tls_cert_file or not settings.tls_key_file:
        raise SettingsError("server.tls_cert_file and server.tls_key_file go together: set both, or neither")
    return ServerCertificate(Path(settings.tls_cert_file), Path(settings.tls_key_file))


async def _prepare_memory(gateway: Opened) -> None:
    """Touch, and if possible lock, the arena piece by piece while the gateway serves already."""
    more = True
    while more:
        more = await gateway.rooms.workers.run(gateway.arena.memory.prepare_next)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _limits_by_descriptors(wanted: int) -> tuple[int, int]:
    """Connections and shared windows that the process's descriptors allow: accepting more would only fail later."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2 * wanted + DESCRIPTORS_KEPT  # a connection is one, and so is the window that it may have
    if soft < most and soft < hard:
        soft = min(hard, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    limit = max(1, min(wanted, soft - DESCRIPTORS_KEPT)) if soft > DESCRIPTORS_KEPT else max(1, soft // 8)
    if limit < wanted:
        log.warning("at most %d connections instead of %d: the process may open only %d files", limit, wanted, soft)
    return limit, min(wanted, max(0, soft - DESCRIPTORS_KEPT - limit))
