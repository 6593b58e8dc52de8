"""A TCP proxy with faults, in the event loop of the test: what stands between a gateway and its database.

async with Proxy(5432) as proxy:
    proxy.port
    proxy.freeze()   # connections stay open and nothing passes, as behind a network that drops packets
    proxy.heal()     # new connections pass again; those that were frozen stay dead for ever
    proxy.thaw()     # the frozen ones go on, with what was sent meanwhile
    proxy.cut()      # all connections break, and new ones are refused until heal()
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self


class _Link:
    """One connection through the proxy."""

    def __init__(self) -> None:
        self.flowing = asyncio.Event()
        self.writers: list[asyncio.StreamWriter] = []

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                await self.flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


class Proxy:
    """Relays connections from a port of its own to `target` on loopback."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._links: set[_Link] = set()
        self._frozen = False
        self._down = False
        self._server: asyncio.Server | None = None
        self.port = 0
        self.accepted = 0
        """Connections so far."""

    def freeze(self) -> None:
        self._frozen = True
        for link in self._links:
            link.flowing.clear()

    def heal(self) -> None:
        self._frozen = self._down = False

    def thaw(self) -> None:
        self.heal()
        for link in self._links:
            link.flowing.set()

    def cut(self) -> None:
        self._down = True
        for link in self._links:
            for writer in link.writers:
                writer.transport.abort()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.thaw()
        self.cut()
        while self._links:
            await asyncio.sleep(0.001)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self._down:
            writer.transport.abort()
            return
        link = _Link()
        if not self._frozen:
            link.flowing.set()
        link.writers.append(writer)
        self._links.add(link)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            link.writers.append(far_writer)
            await asyncio.gather(link.pump(reader, far_writer), link.pump(far_reader, writer))
        except OSError:
            writer.transport.abort()
        finally:
            self._links.discard(link)
