"""One connection to a gateway, as the client sees it: hello, a window if one is lent, one exchange after the other."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from typing import Final, TypeVar

from kvgw import wire
from kvgw.channel import ConnectionEnded, Outgoing
from kvgw.copying import copy
from kvgw.dial import dial
from kvgw.endpoint import Endpoint
from kvgw.errors import RequestRefused
from kvgw.model import GetReply, GetRequest, PutReply, PutRequest, Question
from kvgw.sharedmemory import SharedWindow
from kvgw.stream import FrameStream, data_frames, frame_bytes
from kvgw.wire import Failure, Frame, Kind, Opened, Places, Wanted, Welcome, WindowAsked, WindowGiven

Answer = TypeVar("Answer")

COPIED_BYTES_MIN: Final = 256 * 1024
"""Payload of a call that is copied through a window; less goes through the socket as fast."""
COPIED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Largest window for it. What is beyond it in one call goes through the socket."""
_WINDOW_BYTES_MIN: Final = 1024 * 1024
_PIECE_BYTES: Final = 4 * 1024 * 1024
"""What is copied into a window before the gateway is told, and begins with it."""


class Connection:
    """A connection that was welcomed, and the window on it."""

    def __init__(self, stream: FrameStream, *, lends: bool) -> None:
        self.stream = stream
        self.window: SharedWindow | None = None
        self.copies = True
        """Payloads are copied to and from the window; otherwise they lie in it where callers put them."""
        self._grows = lends
        """A larger window may be had."""
        self.rested_at = 0.0
        """When its last exchange ended, in the event loop's time."""

    @classmethod
    async def open(cls, endpoint: Endpoint, token: str | None, tls: ssl.SSLContext | None) -> Connection:
        """Connect and say hello. Raises `Outage`, and `RequestRefused` when this client is not welcome."""
        stream = FrameStream(await dial(endpoint, tls))
        try:
            await stream.send(Kind.HELLO, 0, wire.Hello(wire.VERSIONS, "kvgw-python", token))
            frame, header = await _receive(stream)
            if frame.kind is Kind.ERROR:
                raise _decoded(header, Failure).error()
            if frame.kind is not Kind.WELCOME:
                raise wire.broken(f"began with a {frame.kind.name} frame in place of WELCOME")
            welcome = _decoded(header, Welcome)
        except ConnectionEnded as error:
            stream.close()
            raise wire.broken(f"{error} before the gateway said welcome") from error
        except BaseException:
            stream.close()
            raise
        return cls(stream, lends=welcome.lends)

    async def take_window(self, least: int, most: int) -> None:
        """Ask for a window in the place of the one that is there; afterwards there is one, or none.

        A failure leaves the connection out of step: close it. Raises `ConnectionEnded`, and as an exchange does.
        """
        self._drop_window()
        if not self._grows:
            return
        await self.stream.send(Kind.WINDOW, 0, WindowAsked(least, most))
        try:
            frame, header, descriptor = await self.stream.receive_passed()
        except RequestRefused as error:
            raise wire.broken(f"went out of step: {error}") from error
        if descriptor is None:
            if frame.kind is Kind.ERROR:
                raise _decoded(header, Failure).error()
            if frame.kind is not Kind.WINDOW or _decoded(header, WindowGiven).nbytes:
                raise wire.broken(f"went out of step: {frame.kind.name} frame without a descriptor for a window")
            self._grows = False
            return
        try:
            given = _decoded(header, WindowGiven).nbytes
            if given < least:
                raise wire.broken(f"lent a window of {given} bytes where at least {least} were asked for")
        except BaseException:
            os.close(descriptor)
            raise
        self.window = SharedWindow(descriptor, given)
        self._grows = given >= most

    async def make_room(self, nbytes: int) -> None:
        """Have a window through which a call of `nbytes` can be copied, if that is any use and one is lent."""
        most = min(COPIED_BYTES_MAX, 1 << (nbytes - 1).bit_length())
        there = 0 if self.window is None else self.window.nbytes
        if self._grows and nbytes >= COPIED_BYTES_MIN and there < most:
            await self.take_window(_WINDOW_BYTES_MIN, max(most, _WINDOW_BYTES_MIN))

    def close(self) -> None:
        """End it; a second call does nothing."""
        self.stream.close()
        self._drop_window()

    def abandon(self) -> None:
        """Give up what this process has of it without ending it: another process still owns it."""
        self.stream.abandon()
        self._drop_window()

    def _drop_window(self) -> None:
        window, self.window = self.window, None
        if window is not None and self.copies:
            window.close()  # otherwise it is its holder's


class Exchange:
    """One request and its answers on one connection."""

    def __init__(self, connection: Connection, request_id: int) -> None:
        self._connection = connection
        self._stream = connection.stream
        self._request_id = request_id
        self.ended = False
        """The gateway's last frame of this exchange was received: the connection is ready for the next."""
        self.gateway_writes = False
        """The gateway may write to the window until this has ended."""

    async def ask(self, request: Question, answer: type[Answer]) -> Answer:
        await self._stream.send(Kind.REQUEST, self._request_id, request)
        return _decoded(await self._expect(Kind.DONE), answer)

    async def put(self, request: PutRequest, payloads: Sequence[memoryview]) -> PutReply:
        await self._stream.send(Kind.REQUEST, self._request_id, request)
        wanted = _decoded(await self._expect(Kind.WANTED), Wanted)
        for index in wanted.indices:
            if not 0 <= index < len(payloads):
                raise wire.broken(f"went out of step: it wants chunk {index} of {len(payloads)}")
        placed = await self._place([payloads[index] for index in wanted.indices])
        rest = [(index, payloads[index]) for index in wanted.indices[placed:]]
        await self._stream.send_all(data_frames(self._request_id, rest))
        return _decoded(await self._expect(Kind.DONE), PutReply)

    async def _place(self, payloads: Sequence[memoryview]) -> int:
        """Tell where in the window the leading payloads lie, copied there first if need be; how many these are."""
        window = self._connection.window
        if window is None:
            return 0
        if not self._connection.copies:
            offsets = window.places_of(payloads)
            await self._tell(offsets)
            return len(offsets)
        offsets = window.places_for([len(payload) for payload in payloads])
        told = piece = 0
        for at, offset in enumerate(offsets):
            copy(window.view[offset : offset + len(payloads[at])], payloads[at])
            piece += len(payloads[at])
            if piece >= _PIECE_BYTES:
                await self._tell(offsets[told : at + 1])
                told, piece = at + 1, 0
        await self._tell(offsets[told:])
        return len(offsets)

    async def _tell(self, offsets: list[int]) -> None:
        if offsets:
            await self._stream.send(Kind.PLACES, self._request_id, Places(offsets))

    async def get(self, request: GetRequest, into: Sequence[memoryview], filled: set[int]) -> GetReply:
        """Read into `into`, noting in `filled` which buffers were written to."""
        window, places = self._connection.window, list[int]()
        if window is not None:
            copies = self._connection.copies
            places = window.places_for([len(target) for target in into]) if copies else window.places_of(into)
        frames = [frame_bytes(Kind.PLACES, self._request_id, Places(places))] if places else []
        frames.append(frame_bytes(Kind.REQUEST, self._request_id, request))
        self.gateway_writes = bool(places)
        await self._stream.send_all(Outgoing(frames))
        return _decoded(await self._receive_chunks(into, filled, places), GetReply)

    async def _receive_chunks(self, into: Sequence[memoryview], filled: set[int], places: Sequence[int]) -> bytes:
        """Take chunks from the connection or the window to their buffers until DONE: its header."""
        reached = dict.fromkeys(range(len(into)), 0)
        while True:
            frame, header = await self._receive()
            if frame.kind is Kind.DONE:
                for index in filled:
                    if reached[index] != len(into[index]):
                        raise wire.broken(f"went out of step: chunk {index} ended at byte {reached[index]}")
                return header
            if frame.kind is Kind.OPENED and not frame.payload_bytes:
                for index in _decoded(header, Opened).indices:
                    if not 0 <= index < len(places) or reached[index]:
                        raise wire.broken(f"went out of step: it opened chunk {index}, which has no place or is there")
                    self._take_out(into[index], places[index])
                    filled.add(index)
                    reached[index] = len(into[index])
                continue
            if frame.kind is not Kind.DATA or frame.index not in reached:
                raise wire.broken(f"went out of step: {frame.kind.name} frame for chunk {frame.index}")
            target = into[frame.index]
            if frame.offset != reached[frame.index] or frame.offset + frame.payload_bytes > len(target):
                raise wire.broken(f"went out of step: chunk {frame.index} at byte {frame.offset}")
            filled.add(frame.index)
            await self._stream.receive_into(target[frame.offset : frame.offset + frame.payload_bytes])
            reached[frame.index] += frame.payload_bytes

    def _take_out(self, target: memoryview, offset: int) -> None:
        window = self._connection.window
        if self._connection.copies and window is not None:
            copy(target, window.view[offset : offset + len(target)])

    async def _expect(self, kind: Kind) -> bytes:
        """The header of the next frame, which must be of this kind."""
        frame, header = await self._receive()
        if frame.kind is not kind or frame.payload_bytes:
            raise wire.broken(f"went out of step: {frame.kind.name} frame in place of {kind.name}")
        return header

    async def _receive(self) -> tuple[Frame, bytes]:
        frame, header = await _receive(self._stream)
        if frame.kind is Kind.ERROR and frame.request_id == 0:
            raise wire.broken(f"was ended by it: {_decoded(header, Failure).message}")
        if frame.request_id != self._request_id:
            raise wire.broken(f"went out of step: answer to request {frame.request_id}")
        if frame.kind is Kind.ERROR:
            failure = _decoded(header, Failure)
            self.ended = not frame.payload_bytes
            raise failure.error()
        self.ended = frame.kind is Kind.DONE and not frame.payload_bytes
        return frame, header


async def _receive(stream: FrameStream) -> tuple[Frame, bytes]:
    """The gateway's next frame. What is no frame of this protocol is an outage: nothing that the caller asked."""
    try:
        return await stream.receive()
    except RequestRefused as error:
        raise wire.broken(f"went out of step: {error}") from error


def _decoded(header: bytes, kind: type[Answer]) -> Answer:
    """The gateway's header as it must be; anything else is an outage too."""
    try:
        return wire.decode(header, kind)
    except RequestRefused as error:
        raise wire.broken(f"went out of step: {error}") from error
