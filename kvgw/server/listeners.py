"""Listeners of the data plane: a Unix socket, and a TCP port if one is configured."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvgw.endpoint import Endpoint, TcpEndpoint, UnixEndpoint, check_socket_path
from kvgw.metrics import Metrics
from kvgw.settings import SettingsError

log = logging.getLogger("kvgw.server")

ACCEPT_PAUSE_SECONDS: Final = 0.5
"""How long to wait when the process has no descriptor left for another connection."""

Serve = Callable[[socket.socket], Coroutine[None, None, None]]


@asynccontextmanager
async def listening(endpoint: Endpoint, serve: Serve, connections: int, metrics: Metrics) -> AsyncIterator[Endpoint]:
    """Accept connections and serve each in a task of its own; yields the endpoint with its real port.

    At most `connections` at once; more wait in the kernel's queue. Leaving ends all of them.
    """
    sock = _bind(endpoint)
    room = asyncio.Semaphore(connections)
    tasks: set[asyncio.Task[None]] = set()

    async def serve_one(peer: socket.socket) -> None:
        metrics.connections.inc()
        try:
            await serve(peer)
        finally:
            peer.close()
            metrics.connections.dec()
            room.release()

    async def accept() -> None:
        loop = asyncio.get_running_loop()
        told: str | None = None  # a state is logged once, not at every try
        while True:
            await room.acquire()
            try:
                peer, _ = await loop.sock_accept(sock)
            except OSError as error:  # no descriptors left, or that one peer's network: never the end of accepting
                room.release()
                if told != error.strerror:
                    told = error.strerror
                    log.warning("no connection accepted on %s: %s", endpoint, error.strerror)
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            told = None
            peer.setblocking(False)
            task = asyncio.create_task(serve_one(peer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    accepting = asyncio.create_task(accept())
    try:
        yield _bound(endpoint, sock)
    finally:
        accepting.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(accepting, *tasks, return_exceptions=True)
        sock.close()
        if isinstance(endpoint, UnixEndpoint):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(endpoint.path)


def tcp_endpoint(address: str, *, allow_plaintext: bool, encrypted: bool = False) -> TcpEndpoint:
    """Read ``host:port``. Raises `SettingsError` for a plaintext address beyond this host that was not allowed."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise SettingsError(f"{address!r} is not an address: write host:port")
    if not (encrypted or allow_plaintext or _is_loopback(host)):
        raise SettingsError(
            f"{address} is beyond this host and would carry tokens and KV bytes in the clear; set server.tls_cert_file "
            "and server.tls_key_file, listen on 127.0.0.1, or set server.allow_plaintext = true inside a network that "
            "you trust"
        )
    return TcpEndpoint(host, int(port), encrypted=encrypted)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bind(endpoint: Endpoint) -> socket.socket:
    try:
        return bind_unix(endpoint.path) if isinstance(endpoint, UnixEndpoint) else _bind_tcp(endpoint)
    except OSError as error:
        raise SettingsError(f"cannot listen on {endpoint}: {error.strerror or error}") from error


def bind_unix(path: str) -> socket.socket:
    """A listening Unix socket that only its owner may connect to. Raises `OSError`, and `SettingsError` when taken."""
    check_socket_path(path)
    _remove_stale(Path(path))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The mask is the process's own; nothing else is created between these two lines.
    mask = os.umask(0o177)
    try:
        sock.bind(path)
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(mask)
    sock.setblocking(False)
    return sock


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens on any more; never anything else."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SettingsError(f"{path} is there and is not a socket; remove it, or choose another server.socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise SettingsError(f"another process listens on {path}; stop it, or choose another server.socket")


def _bind_tcp(endpoint: TcpEndpoint) -> socket.socket:
    found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _bound(endpoint: Endpoint, sock: socket.socket) -> Endpoint:
    return endpoint if isinstance(endpoint, UnixEndpoint) else replace(endpoint, port=sock.getsockname()[1])
