"""A socket that sends and receives frames without hidden copies.

Payloads are received straight into their destination, and sent from where they lie, with the event loop's socket calls
(asyncio's transports copy a large backlog several times on Python 3.11).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Final

from msgspec import Struct

from kvgw import wire
from kvgw.errors import RequestRefused
from kvgw.wire import Frame, Kind

_EMPTY: Final = memoryview(b"")


class ConnectionEnded(Exception):
    """The peer closed the connection, or the network did."""


class FrameStream:
    """Frames over a connected, non-blocking stream socket. One task sends and one receives at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._prefix = bytearray(wire.PREFIX.size)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            # Without it a small frame behind a large one waits for the peer's delayed acknowledgement.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    async def receive_into(self, target: memoryview) -> None:
        """Fill `target` from the connection. Raises `ConnectionEnded` when it ends before."""
        at = 0
        while at < len(target):
            try:
                count = await self._loop.sock_recv_into(self._socket, target[at:])
            except OSError as error:
                raise ConnectionEnded(str(error)) from error
            if count == 0:
                raise ConnectionEnded("ended in the middle of a frame" if at else "ended")
            at += count

    async def receive(self, header_bytes_max: int = wire.HEADER_BYTES_MAX) -> tuple[Frame, bytes]:
        """The next frame's prefix and header; its payload is still to be received.

        Raises `ConnectionEnded`, or `RequestRefused` for what is not a frame; the stream is of no use after either.
        """
        await self.receive_into(memoryview(self._prefix))
        frame = wire.decode_prefix(self._prefix)
        if frame.header_bytes > header_bytes_max:
            raise RequestRefused(f"frame header of {frame.header_bytes} bytes is over the limit of {header_bytes_max}")
        header = bytearray(frame.header_bytes)
        await self.receive_into(memoryview(header))
        return frame, bytes(header)

    async def send(
        self,
        kind: Kind,
        request_id: int,
        message: Struct | None = None,
        *,
        index: int = 0,
        offset: int = 0,
        payload: memoryview = _EMPTY,
    ) -> None:
        """Send one frame. Raises `ConnectionEnded`."""
        header = b"" if message is None else wire.encode(message)
        if len(header) > wire.HEADER_BYTES_MAX:
            raise RequestRefused(f"a header of {len(header)} bytes is over the limit of {wire.HEADER_BYTES_MAX}")
        frame = Frame(kind, request_id, len(header), index, offset, len(payload))
        head = wire.encode_prefix(frame) + header
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
        """Close the connection; a second call does nothing."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def abandon(self) -> None:
        """Give up the descriptor without ending the connection: another process still owns it."""
        self._socket.close()
