"""Frames over a channel, without hidden copies: payloads go straight into their place, and from where they lie."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Final

from msgspec import Struct

from kvgw import wire
from kvgw.channel import Channel, Outgoing
from kvgw.errors import RequestRefused
from kvgw.wire import Frame, Kind

AHEAD_BYTES: Final = 4096
"""What is received beyond what was asked for: with the end of a payload comes the beginning of the next frame."""


AtOnce = Callable[[Frame, memoryview], bytes | None]
"""Answers a frame and its header at once, or leaves it to whoever receives (None). It does not raise."""


class FrameStream:
    """Sends and receives frames. One task sends and one receives at a time."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._prefix = memoryview(bytearray(wire.PREFIX.size))
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._unread = self._ahead[:0]
        """The part of `_ahead` that came early."""

    async def receive_into(self, target: memoryview) -> None:
        """Fill `target` from the connection. Raises `ConnectionEnded` when it ends before."""
        early = self._take_early(target)
        if early < len(target):
            self._unread = self._ahead[: await self._channel.receive(target[early:], self._ahead)]

    def pull(self, target: memoryview, patience_s: float) -> tuple[int, float]:
        """In a worker thread, while nothing else is received: fill `target` as far as the peer sends; see `Channel`.

        How much of it came, and what is left of the patience. What is missing is for `receive_into`.
        """
        early = self._take_early(target)
        if early == len(target):
            return early, patience_s
        count, patience_s = self._channel.pull(target[early:], self._ahead, patience_s)
        came = min(early + count, len(target))
        self._unread = self._ahead[: early + count - came]
        return came, patience_s

    def pull_frame(self, patience_s: float) -> tuple[Frame | None, float]:
        """In a worker thread, as `pull`: the next frame's prefix; the payload behind its header is what comes next.

        None when they do not come: then nothing of them is taken, and `receive` has them. Raises as `receive`.
        """
        there = len(self._unread)
        if there < wire.PREFIX.size:
            self._ahead[:there] = bytes(self._unread)
            prefix, spare = self._ahead[there : wire.PREFIX.size], self._ahead[wire.PREFIX.size :]
            count, patience_s = self._channel.pull(prefix, spare, patience_s)
            self._unread = self._ahead[: there + count]
        if len(self._unread) >= wire.PREFIX.size:
            frame = wire.decode_prefix(self._unread[: wire.PREFIX.size])
            if self._early(wire.PREFIX.size + frame.header_bytes) is not None:
                return frame, patience_s
        return None, patience_s

    def _take_early(self, target: memoryview) -> int:
        """Take what came early to its place; how much."""
        early = min(len(target), len(self._unread))
        if early:
            target[:early] = self._unread[:early]
            self._unread = self._unread[early:]
        return early

    async def receive(
        self, header_bytes_max: int = wire.HEADER_BYTES_MAX, at_once: AtOnce | None = None
    ) -> tuple[Frame, bytes]:
        """The next frame's prefix and header; its payload is still to be received.

        What `at_once` answers is sent, and the frame forgotten; not every frame is shown to it.
        Raises `ConnectionEnded`, or `RequestRefused` for what is not a frame; the stream is of no use after either.
        """
        frame = None
        prefix = self._early(wire.PREFIX.size)
        if prefix is None and at_once is not None and not self._unread:
            frame = await self._receive_sifted(at_once)
        elif prefix is None:
            await self.receive_into(self._prefix)
        frame = frame or wire.decode_prefix(prefix or self._prefix)
        if frame.header_bytes > header_bytes_max:
            raise RequestRefused(f"frame header of {frame.header_bytes} bytes is over the limit of {header_bytes_max}")
        header = self._early(frame.header_bytes)
        if header is None:
            received = bytearray(frame.header_bytes)
            await self.receive_into(memoryview(received))
            header = bytes(received)
        return frame, header

    async def _receive_sifted(self, at_once: AtOnce) -> Frame:
        """The next frame's prefix; a whole small frame that came in one piece is shown to `at_once` first."""
        frame: Frame | None = None

        def sift(early: int) -> bytes | None:
            nonlocal frame
            frame = wire.decode_prefix(self._prefix)
            return at_once(frame, self._ahead[:early]) if frame.header_bytes == early else None

        self._unread = self._ahead[: await self._channel.receive(self._prefix, self._ahead, sift)]
        return frame or wire.decode_prefix(self._prefix)

    def _early(self, nbytes: int) -> bytes | None:
        """The next `nbytes`, if all of them came early."""
        if len(self._unread) < nbytes:
            return None
        early = bytes(self._unread[:nbytes])
        self._unread = self._unread[nbytes:]
        return early

    async def send(self, kind: Kind, request_id: int, message: Struct) -> None:
        """Send a frame without a payload. Raises `ConnectionEnded`."""
        await self._channel.send_small(frame_bytes(kind, request_id, message))

    async def send_passing(self, kind: Kind, message: Struct, descriptor: int) -> None:
        """Send a frame and, with it, a descriptor: over a Unix socket alone. Raises `ConnectionEnded`."""
        await self._channel.send_passing(frame_bytes(kind, 0, message), descriptor)

    async def receive_passed(self) -> tuple[Frame, bytes, int | None]:
        """`receive`, and the descriptor that came with the frame, which is the caller's to close."""
        with self._channel.accepting() as passed:
            try:
                frame, header = await self.receive()
            except BaseException:
                for descriptor in passed:
                    os.close(descriptor)
                raise
        for descriptor in passed[1:]:
            os.close(descriptor)
        return frame, header, passed[0] if passed else None

    async def send_all(self, outgoing: Outgoing) -> None:
        """Send what `data_frames` made, or what `push` has left of it. Raises `ConnectionEnded`."""
        await self._channel.send(outgoing)

    def push(self, outgoing: Outgoing, patience_s: float) -> float:
        """In a worker thread, while nothing else is sent: as much of `outgoing` as the peer takes; see `Channel`."""
        return self._channel.push(outgoing, patience_s)

    def over(self) -> bool:
        """Whether it is of no more use, asked between two exchanges: see `Channel`."""
        return bool(self._unread) or self._channel.over()

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        self._channel.close()

    def abandon(self) -> None:
        """Give up the descriptor without ending the connection: another process still owns it."""
        self._channel.abandon()


def frame_bytes(kind: Kind, request_id: int, message: Struct) -> bytes:
    """A frame without a payload."""
    header = _encoded(message)
    return wire.encode_prefix(Frame(kind, request_id, len(header))) + header


def _encoded(message: Struct) -> bytes:
    header = wire.encode(message)
    if len(header) > wire.HEADER_BYTES_MAX:
        raise RequestRefused(f"a header of {len(header)} bytes is over the limit of {wire.HEADER_BYTES_MAX}")
    return header


def data_frames(request_id: int, chunks: Iterable[tuple[int, memoryview]], before: Iterable[bytes] = ()) -> Outgoing:
    """A DATA frame for each chunk, by its index in the batch: many small ones leave in one system call.

    `before`: whole frames that leave before them.
    """
    buffers: list[bytes | memoryview] = list(before)
    for index, payload in chunks:
        buffers.append(wire.encode_prefix(Frame(Kind.DATA, request_id, 0, index, 0, len(payload))))
        buffers.append(payload)
    return Outgoing(buffers)
