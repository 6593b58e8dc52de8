"""A peer of the gateway that speaks the wire by hand: half frames, wrong frames, and ends that nobody expects."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

from msgspec import Struct

from kvgw import wire
from kvgw.endpoint import Endpoint, UnixEndpoint
from kvgw.wire import Failure, Frame, Hello, Kind

RESET = struct.pack("ii", 1, 0)


class RawPeer:
    """One connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def connect(cls, endpoint: Endpoint) -> RawPeer:
        unix = isinstance(endpoint, UnixEndpoint)
        sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        address: Any = endpoint.path if isinstance(endpoint, UnixEndpoint) else (endpoint.host, endpoint.port)
        await asyncio.get_running_loop().sock_connect(sock, address)
        return cls(sock)

    async def hello(
        self, token: str | None = None, versions: tuple[int, int] = wire.VERSIONS
    ) -> tuple[Frame, bytes] | None:
        await self.send(Kind.HELLO, 0, Hello(versions, "raw", token))
        return await self.receive()

    async def send(self, kind: Kind, request_id: int, message: Struct | None = None, **prefix: int) -> None:
        """A frame without its payload."""
        await self.send_bytes(frame_bytes(kind, request_id, message, **prefix))

    async def send_bytes(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.sock, data)

    async def receive(self) -> tuple[Frame, bytes] | None:
        """The next frame's prefix and header; None when the gateway has ended the connection."""
        head = await self._exactly(wire.PREFIX.size)
        if head is None:
            return None
        frame = wire.decode_prefix(head)
        return frame, await self._exactly(frame.header_bytes) or b""

    async def failure(self) -> Failure:
        """The next frame, which must be an error."""
        received = await self.receive()
        assert received is not None, "the gateway ended the connection without a word"
        assert received[0].kind is Kind.ERROR, received
        return wire.decode(received[1], Failure)

    async def ended(self) -> bool:
        """Wait for the end of the connection; False if something else came."""
        try:
            return await self._loop.sock_recv(self.sock, 1) == b""
        except ConnectionError:
            return True

    def reset(self) -> None:
        """End the connection with a reset, where the kind of socket has one."""
        if self.sock.family != socket.AF_UNIX:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.sock.close()

    def close(self) -> None:
        self.sock.close()

    async def _exactly(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            try:
                piece = await self._loop.sock_recv(self.sock, count - len(data))
            except ConnectionError:
                return None
            if not piece:
                return None
            data += piece
        return data


def frame_bytes(kind: Kind, request_id: int, message: Struct | None = None, **prefix: int) -> bytes:
    header = b"" if message is None else wire.encode(message)
    return wire.encode_prefix(Frame(kind, request_id, len(header), **prefix)) + header
