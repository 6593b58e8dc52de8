"""A TCP proxy that does to connections what networks do, in the event loop of whoever makes it.

    async with ToxicProxy(9000) as proxy:
        proxy.port
        proxy.poison(Toxic.LATENCY)   # until heal()
        proxy.heal()

Usable in front of S3, PostgreSQL and a gateway. What comes from the server is what meets the toxic.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from typing import Final, Self

LATENCY_S, JITTER_S = 0.15, 0.15
BYTES_PER_SECOND: Final = 64 * 1024
SLICE_BYTES: Final = 7
KEPT_BYTES: Final = 600
"""What `TRUNCATE` lets through of a connection's next bytes."""
READ_BYTES: Final = 64 * 1024


class Toxic(StrEnum):
    """What happens to what the server says."""

    LATENCY = "latency"
    BANDWIDTH = "bandwidth"
    SLICE = "slice"
    RESET = "reset"
    """The connection is reset as soon as the server says something."""
    TRUNCATE = "truncate"
    """It ends in order after a few hundred bytes."""
    STALL = "stall"
    """After the first line feed that ends a block of headers, or after the first bytes, nothing comes any more."""
    DOWN = "down"
    """New connections are reset, those that are there too."""
    CORRUPT = "corrupt"
    """A bit of the last byte of each piece is flipped. Not for links without checks of their own."""
    DUPLICATE = "duplicate"
    """Each piece comes twice."""


class _Link:
    """One connection through the proxy."""

    def __init__(self, client: asyncio.StreamWriter) -> None:
        self.client = client
        self.server: asyncio.StreamWriter | None = None
        self.passed = 0
        """Bytes that came from the server while the present toxic was on."""

    def reset(self) -> None:
        for writer in (self.client, self.server):
            if writer is None or writer.is_closing():
                continue
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class ToxicProxy:
    """Relays connections from a port of its own to `target` on loopback."""

    def __init__(self, target: int, rng: random.Random | None = None) -> None:
        self._target = target
        self._rng = rng or random.Random(0)
        self._toxic: Toxic | None = None
        self._healed = asyncio.Event()
        self._healed.set()
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.met: Counter[str] = Counter()
        """How many pieces, or connections, met each toxic."""

    def poison(self, toxic: Toxic) -> None:
        """From now on, until `heal`."""
        self._toxic = toxic
        self._healed.clear()
        for link in self._links:
            link.passed = 0
            if toxic is Toxic.DOWN:
                self.met[toxic] += 1
                link.reset()

    def heal(self) -> None:
        """Pass everything again. Connections that a stall, a cut or a repetition has hurt stay hurt: they are reset."""
        hurt = self._toxic in (Toxic.STALL, Toxic.TRUNCATE, Toxic.DUPLICATE)
        self._toxic = None
        self._healed.set()
        if hurt:
            for link in set(self._links):
                link.reset()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.heal()
        while self._links:
            for link in set(self._links):
                link.reset()
            await asyncio.sleep(0.005)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(writer)
        if self._toxic is Toxic.DOWN:
            self.met[Toxic.DOWN] += 1
            link.reset()
            return
        self._links.add(link)
        try:
            far_reader, link.server = await asyncio.open_connection("127.0.0.1", self._target)
            up = asyncio.ensure_future(self._pass(reader, link.server))
            down = asyncio.ensure_future(self._poisoned(far_reader, link))
            try:
                await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
                # What the server still has to say after the client's last word is let through.
                await asyncio.wait((up, down), timeout=1.0)
            finally:
                for task in (up, down):
                    task.cancel()
                await asyncio.gather(up, down, return_exceptions=True)
        except OSError:
            link.reset()
        finally:
            self._links.discard(link)
            for end in (link.client, link.server):
                if end is not None:
                    end.close()

    @staticmethod
    async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                writer.write(data)
                await writer.drain()
            writer.write_eof()

    async def _poisoned(self, reader: asyncio.StreamReader, link: _Link) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                if not await self._meet(data, link):
                    return
            link.client.write_eof()

    async def _meet(self, data: bytes, link: _Link) -> bool:
        """Send a piece as the toxic has it; False when the connection is over."""
        toxic = self._toxic
        if toxic is None:
            return await self._send(link, data)
        self.met[toxic] += 1
        before, link.passed = link.passed, link.passed + len(data)
        match toxic:
            case Toxic.LATENCY:
                await self._wait(LATENCY_S + JITTER_S * self._rng.random())
            case Toxic.BANDWIDTH:
                await self._wait(len(data) / BYTES_PER_SECOND)
            case Toxic.RESET | Toxic.DOWN:
                link.reset()
                return False
            case Toxic.SLICE:
                for piece in _slices(data):
                    await self._send(link, piece)
                    await asyncio.sleep(0)
                return True
            case Toxic.TRUNCATE:
                await self._send(link, data[: max(0, KEPT_BYTES - before)])
                if link.passed > KEPT_BYTES:
                    link.client.write_eof()
                    return False
                return True
            case Toxic.STALL:
                if before == 0:
                    await self._send(link, _headers(data))
                await self._healed.wait()
                return False
            case Toxic.CORRUPT:
                data = data[:-1] + bytes([data[-1] ^ 1])
            case Toxic.DUPLICATE:
                data = 2 * data
        return await self._send(link, data)

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._healed.wait()

    @staticmethod
    async def _send(link: _Link, data: bytes) -> bool:
        link.client.write(data)
        await link.client.drain()
        return True


def _slices(data: bytes) -> Iterator[bytes]:
    """Little pieces of the beginning, where headers are, and the rest at once."""
    head = data[: 64 * SLICE_BYTES]
    for at in range(0, len(head), SLICE_BYTES):
        yield head[at : at + SLICE_BYTES]
    if data[len(head) :]:
        yield data[len(head) :]


def _headers(data: bytes) -> bytes:
    """Up to the end of HTTP headers, or half where there are none."""
    end = data.find(b"\r\n\r\n")
    return data[: end + 4] if end >= 0 else data[: len(data) // 2]
