"""Connections whose bytes move in worker threads: blocking sockets that the event loop makes, keeps and shuts."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import SplitResult

from aiohttp.abc import AbstractResolver

from storage.ports import Workers

_IDLE_S: Final = 15.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Origin:
    """Whom a connection leads to; `tls` says how its certificate is judged, None where there is none."""

    host: str
    port: int
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, parts: SplitResult, tls: ssl.SSLContext | None) -> Origin:
        """The origin of a URL that names a host."""
        assert parts.hostname is not None, "the endpoint has a host"
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls)


class Link:
    """One connection. Its socket blocks without a time limit: whoever gives up shuts it, which ends what blocks."""

    def __init__(self, origin: Origin, sock: socket.socket) -> None:
        self.origin = origin
        self.sock = sock
        self.expiry: asyncio.TimerHandle | None = None
        """While it is idle: what closes it."""

    async def step(self, workers: Workers, work: Callable[[], Result]) -> Result:
        """Run `work`, which blocks on the socket, in a worker thread.

        Cancelled, this shuts the connection and waits for the thread, which ends soon then (law 7).
        """
        running = asyncio.ensure_future(workers.run(work))
        del work  # it closes over memory, and a traceback may keep this frame
        cancelled: asyncio.CancelledError | None = None
        try:
            while not running.done():
                try:
                    await asyncio.wait((running,))
                except asyncio.CancelledError as error:
                    cancelled = error
                    self.shut()
            if cancelled is None:
                return running.result()
            if not running.cancelled():
                running.exception()  # what the thread met then gives way to the cancellation
            raise cancelled
        finally:
            cancelled = None  # its traceback would keep every frame that it passes, and itself

    def shut(self) -> None:
        """End what blocks on the socket, now and later. From any thread."""
        with contextlib.suppress(OSError):  # the other side was first
            # Not SSLSocket's own, which forgets that there is TLS while a thread still writes.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it. No thread may be using it."""
        if self.expiry is not None:
            self.expiry.cancel()
        self.sock.close()

    def quiet(self) -> bool:
        """Whether nothing has come since the last answer: neither the end nor bytes that nobody asked for."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)


class Links:
    """Makes connections, and keeps idle ones for a while. For the event loop alone.

    There are as many as there are requests at once; whoever makes requests bounds them.
    """

    def __init__(self, resolver: AbstractResolver, workers: Workers, connect_timeout_s: float) -> None:
        self._resolver = resolver
        self._workers = workers
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[Origin, list[Link]] = {}
        self._closed = False

    def idle(self, origin: Origin) -> Link | None:
        """A kept connection, the last one used."""
        kept = self._idle.get(origin, [])
        while kept:
            link = kept.pop()
            if link.quiet():
                assert link.expiry is not None, "idle connections expire"
                link.expiry.cancel()
                return link
            link.close()
        return None

    async def open(self, origin: Origin) -> Link:
        """A new connection. Raises `OSError`, `TimeoutError` among them, if none can be made in time."""
        async with asyncio.timeout(self._connect_timeout_s):
            refused: OSError | None = None
            for found in await self._resolver.resolve(origin.host, origin.port, socket.AF_UNSPEC):
                try:
                    return await self._connect(origin, found["family"], found["host"], found["port"])
                except OSError as error:
                    refused = error
            raise refused or OSError(f"{origin.host} has no address")

    def keep(self, link: Link) -> None:
        """Take back a connection whose last answer was read to its end."""
        if self._closed:
            link.close()
            return
        kept = self._idle.setdefault(link.origin, [])
        kept.append(link)

        def expire() -> None:
            kept.remove(link)
            link.close()

        link.expiry = asyncio.get_running_loop().call_later(_IDLE_S, expire)

    def close(self) -> None:
        """Close what is idle now, and the rest when it is given back."""
        self._closed = True
        for kept in self._idle.values():
            for link in kept:
                link.close()
        self._idle.clear()

    async def _connect(self, origin: Origin, family: int, host: str, port: int) -> Link:
        sock = socket.socket(family, socket.SOCK_STREAM)
        link = Link(origin, sock)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, (host, port))
            sock.setblocking(True)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if origin.tls is not None:
                encrypted = origin.tls.wrap_socket(sock, server_hostname=origin.host, do_handshake_on_connect=False)
                link.sock = encrypted
                await link.step(self._workers, encrypted.do_handshake)
        except BaseException:
            link.close()
            raise
        return link
