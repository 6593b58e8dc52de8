"""A bench whose gateway is reached over a socket, as engines reach it; its jobs still run only when they are called."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal
from unittest import mock

from kvgw.endpoint import TcpEndpoint, UnixEndpoint
from kvgw.server.connection import Connection
from kvgw.server.limits import Limits
from kvgw.server.listeners import listening
from kvgw.tls import ServerCertificate
from kvgw.wiring import Opened
from tests.support.encrypted import TlsHouse
from tests.support.gateways import House
from tests.support.tls import Authority
from tests.torture.bench import Bench

Way = Literal["embedded", "unix", "shm", "tls"]
WAYS: Final[tuple[Way, ...]] = ("embedded", "unix", "shm", "tls")


class ReachedBench(Bench):
    """Over a Unix socket, with windows that the gateway lends (``shm``), or over TLS on loopback."""

    def __init__(self, folder: Path, *given: Any, way: Way = "embedded", **more: Any) -> None:
        super().__init__(folder, *given, **more)
        self._folder = folder
        self._way = way
        self._authority: Authority | None = None
        self._token = ""
        """The first one, of which only the first start tells."""

    @asynccontextmanager
    async def reached(self, gateway: Opened) -> AsyncIterator[House]:
        self._token = self._token or gateway.first_token or ""
        if self._way == "embedded":
            async with super().reached(gateway) as house:
                yield house
            return
        certificate = self._certificate() if self._way == "tls" else None
        limits, node = Limits(connections=64), gateway.rooms.catalog.node.node

        async def serve(sock: socket.socket) -> None:
            await Connection(sock, gateway.gateway, gateway.authenticator, node, limits, certificate).serve()

        wanted = (
            UnixEndpoint(str(self.data / "kvgw.sock"))
            if certificate is None
            else TcpEndpoint("127.0.0.1", 0, encrypted=True)
        )
        async with AsyncExitStack() as stack:
            if self._way == "shm":  # otherwise only large payloads are
                stack.enter_context(mock.patch("kvgw.connection.COPIED_BYTES_MIN", 1))
            metrics = gateway.rooms.metrics
            endpoint = await stack.enter_async_context(listening(wanted, serve, limits.connections, metrics))
            if self._authority is not None:
                trusted = str(self._authority.file)
                yield TlsHouse(gateway, "tcp", endpoint, self._token, self.clock, authority=trusted)
            else:
                yield House(gateway, "shm" if self._way == "shm" else "unix", endpoint, self._token, self.clock)

    def _certificate(self) -> ServerCertificate:
        self._authority = self._authority or Authority(self._folder)
        return ServerCertificate(*self._authority.issue("gateway"))
