"""Frames over a channel, without hidden copies: payloads go straight into their place, and from where they lie."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from kvgw import wire
from kvgw.channel import Channel, ConnectionEnded
from kvgw.errors import RequestRefused
from kvgw.wire import Frame, Kind

_EMPTY: Final = memoryview(b"")


class FrameStream:
    """Sends and receives frames. One task sends and one receives at a time."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._prefix = bytearray(wire.PREFIX.size)

    async def receive_into(self, target: memoryview) -> None:
        """Fill `target` from the connection. Raises `ConnectionEnded` when it ends before."""
        at = 0
        while at < len(target):
            count = await self._channel.receive_some(target[at:])
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
        await self._channel.send(wire.encode_prefix(frame) + header, payload)

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        self._channel.close()

    def abandon(self) -> None:
        """Give up the descriptor without ending the connection: another process still owns it."""
        self._channel.abandon()
