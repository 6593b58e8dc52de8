"""Dialling: from an endpoint to a connected channel."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Final

from kvgw.channel import Channel, ConnectionEnded, PlainChannel
from kvgw.endpoint import Endpoint, TcpEndpoint, UnixEndpoint
from kvgw.errors import Outage
from kvgw.tlschannel import TlsChannel

UNIX_SEND_BYTES: Final = 2 * 1024 * 1024
"""What the kernel may hold of a PUT: as much as the gateway takes at once, and more while it is at work on that."""


async def dial(endpoint: Endpoint, tls: ssl.SSLContext | None) -> Channel:
    """Connect to `endpoint`; `tls` is needed for one that is encrypted. Raises `Outage`."""
    try:
        sock = await _connect(endpoint)
    except OSError as error:
        raise Outage(f"no gateway answers at {endpoint}: {error.strerror or error}") from error
    if not (isinstance(endpoint, TcpEndpoint) and endpoint.encrypted):
        return PlainChannel(sock, unix_send_bytes=UNIX_SEND_BYTES)
    assert tls is not None, "an encrypted endpoint needs a context"
    channel = TlsChannel(sock, tls, server_hostname=endpoint.host)
    try:
        await channel.handshake()
    except ConnectionEnded as error:
        channel.close()
        raise Outage(f"the connection to {endpoint} {error}") from error
    except BaseException:
        channel.close()
        raise
    return channel


async def _connect(endpoint: Endpoint) -> socket.socket:
    if isinstance(endpoint, UnixEndpoint):
        return await _connected(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), endpoint.path)
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    refusal: OSError | None = None
    for family, kind, protocol, _, address in found:  # a name may stand for addresses where no gateway listens
        try:
            return await _connected(socket.socket(family, kind, protocol), address)
        except OSError as error:
            refusal = refusal or error
    raise refusal or OSError(f"{endpoint.host} has no address")


async def _connected(sock: socket.socket, address: str | tuple[object, ...]) -> socket.socket:
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock
