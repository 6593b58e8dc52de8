"""Channels: bytes over a connected, non-blocking stream socket, in the clear or inside TLS.

The event loop's socket calls are used directly: payloads are received straight into their destination and sent from
where they lie. TLS runs over memory buffers, one copy in each direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Final, Protocol, cast

TLS_PIECE_BYTES: Final = 256 * 1024
"""Bytes encrypted, or received, between two turns of the event loop."""


class ConnectionEnded(Exception):
    """The peer closed the connection, or the network did."""


class Channel(Protocol):
    """A two-way stream of bytes. One task sends and one receives at a time."""

    async def receive_some(self, target: memoryview) -> int:
        """Receive at least one byte into `target`; 0 when the peer has ended. Raises `ConnectionEnded`."""
        ...

    async def send(self, head: bytes, payload: memoryview) -> None:
        """Send `head`, then `payload`. Raises `ConnectionEnded`."""
        ...

    def close(self) -> None:
        """End the connection; a second call does nothing."""
        ...

    def abandon(self) -> None:
        """Give up the descriptor without ending the connection: another process still owns it."""
        ...


class PlainChannel:
    """A socket as it is: a Unix socket, or TCP on loopback."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            # Without it a small frame behind a large one waits for the peer's delayed acknowledgement.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    async def receive_some(self, target: memoryview) -> int:
        try:
            return await self._loop.sock_recv_into(self._socket, target)
        except OSError as error:
            raise ConnectionEnded(str(error)) from error

    async def send(self, head: bytes, payload: memoryview) -> None:
        try:
            sent = self._send_now(head, payload)
            if sent < len(head):
                await self._loop.sock_sendall(self._socket, head[sent:])
                sent = len(head)
            if sent < len(head) + len(payload):
                await self._loop.sock_sendall(self._socket, payload[sent - len(head) :])
        except OSError as error:
            raise ConnectionEnded(str(error)) from error

    def _send_now(self, head: bytes, payload: memoryview) -> int:
        """Send what the socket takes at once: for small frames that is all, in one system call."""
        try:
            return self._socket.sendmsg([head, payload])
        except (BlockingIOError, InterruptedError):
            return 0

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def abandon(self) -> None:
        self._socket.close()


class TlsChannel:
    """TLS over a socket. Use `handshake` first; nothing else is sent or received before it has succeeded."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_hostname: str | None = None) -> None:
        """Without `server_hostname` this is the server's end."""
        self._plain = PlainChannel(sock)
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
        )
        self._scratch = memoryview(bytearray(TLS_PIECE_BYTES))
        self._flushing = asyncio.Lock()

    async def handshake(self) -> None:
        """Agree on keys and check the peer's certificate. Raises `ConnectionEnded` with TLS's own reason."""
        try:
            while True:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    await self._flush()
                    if not await self._fill():
                        raise ConnectionEnded("ended in the TLS handshake") from None
                else:
                    await self._flush()
                    return
        except ssl.SSLError as error:
            with contextlib.suppress(ConnectionEnded):
                await self._flush()  # the alert that tells the peer
            reason = getattr(error, "verify_message", "") or error.reason or str(error)
            raise ConnectionEnded(f"failed in the TLS handshake: {reason}") from error

    async def receive_some(self, target: memoryview) -> int:
        while True:
            try:
                # With a buffer to fill it answers how much it filled, and takes any writable one.
                return cast("int", self._tls.read(len(target), cast("bytearray", target)))
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._fill():
                    raise ConnectionEnded("ended without saying so inside TLS") from None
            except ssl.SSLZeroReturnError:
                return 0
            except ssl.SSLError as error:
                raise ConnectionEnded(f"broke TLS: {error.reason or error}") from error

    async def send(self, head: bytes, payload: memoryview) -> None:
        try:
            self._tls.write(head)
            if not payload:
                await self._flush()
            for start in range(0, len(payload), TLS_PIECE_BYTES):
                self._tls.write(payload[start : start + TLS_PIECE_BYTES])
                await self._flush()
        except ssl.SSLError as error:
            raise ConnectionEnded(f"broke TLS: {error.reason or error}") from error

    async def _fill(self) -> bool:
        """Receive some of what the peer sent; False when it has ended."""
        count = await self._plain.receive_some(self._scratch)
        self._incoming.write(self._scratch[:count])
        return count > 0

    async def _flush(self) -> None:
        """Send what TLS has to say."""
        async with self._flushing:
            data = self._outgoing.read()
            if data:
                await self._plain.send(data, memoryview(b""))

    def close(self) -> None:
        self._plain.close()

    def abandon(self) -> None:
        self._plain.abandon()
