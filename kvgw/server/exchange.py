"""Payload of one exchange: frames over the connection, or places in the window that it lends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import Enum
from typing import Final

from kvgw import wire
from kvgw.channel import ConnectionEnded, Outgoing
from kvgw.errors import Code, KvgwError, Outage, RequestRefused
from kvgw.gateway.payloads import Chunk, Incoming, Part
from kvgw.gateway.turns import step_aside
from kvgw.model import Reply
from kvgw.server.limits import Limits
from kvgw.stream import FrameStream, data_frames, frame_bytes
from kvgw.wire import Frame, Kind, Opened, Places, Wanted
from storage.shared_window import SharedWindow

_DISCARD_BYTES: Final = 256 * 1024
PATIENCE_SECONDS: Final = 0.02
PATIENCE_BYTES_PER_SECOND: Final = 2e9
"""A worker thread waits so long in one exchange, plus a second for so many bytes, for a peer that reads: one that is
slower is left to the event loop, and holds no thread."""


class Inside(Enum):
    """Whether a frame is on its way: until it is whole, no other frame can follow it."""

    NOTHING = "nothing"
    RECEIVING = "receiving"
    DELIVERING = "delivering"


class Exchange:
    """Payload of one exchange: the source of a PUT and the sink of a GET."""

    def __init__(
        self,
        stream: FrameStream,
        request_id: int,
        limits: Limits,
        *,
        pushes: bool,
        window: SharedWindow | None = None,
        offsets: Sequence[int] = (),
    ) -> None:
        """`offsets`: where in the window the first chunks of a GET shall lie."""
        self.request_id = request_id
        self.pushes = pushes
        self._stream = stream
        self._limits = limits
        self._window = window
        self._offsets = offsets
        self._shared: Sequence[memoryview] = ()
        self._early: Frame | None = None
        """The prefix of a payload that was received where places might have come."""
        self._travelling = window is None
        """What is still wanted travels: there are no more places."""
        self._reads_places = False
        """Payloads of this PUT lie in the window."""
        self._outstanding = 0
        """Wanted payloads of which nothing was received yet."""
        self._begun = False
        """Of the chunk that comes in by parts, the frame was received."""
        self._part_s = 0.0
        """What the parts of a slow peer may still take, beside what their length gives them."""
        self._patience_s = PATIENCE_SECONDS
        self._inside = Inside.NOTHING

    @property
    def incoming(self) -> Incoming | None:
        """Where payloads that are pushed are pulled from."""
        return self if self.pushes else None

    async def wanted(self, indices: Sequence[int]) -> None:
        await self._stream.send(Kind.WANTED, self.request_id, Wanted(list(indices)))
        self._outstanding = len(indices)

    async def shared(self, most: int, nbytes: int) -> Sequence[memoryview]:
        if not self._shared and not self._travelling:
            async with self._in_time(most * nbytes):
                frame, header = await self._stream.receive()
            if frame.kind is Kind.PLACES:
                self._shared = self._places_of_wanted(frame, header, nbytes)
            else:
                self._early, self._travelling = frame, True
        shared, self._shared = self._shared[:most], self._shared[most:]
        return shared

    def _places_of_wanted(self, frame: Frame, header: bytes, nbytes: int) -> Sequence[memoryview]:
        self._inside = Inside.RECEIVING  # whatever is wrong with them is the last that this connection did
        if frame.request_id != self.request_id or frame.payload_bytes:
            raise RequestRefused("a PLACES frame has no payload, and belongs to the request before it")
        offsets = wire.decode(header, Places).offsets
        if len(offsets) > self._outstanding:
            raise RequestRefused(f"{len(offsets)} places came for {self._outstanding} wanted chunks")
        shared = self._claim(offsets, nbytes)
        self._reads_places = True
        self._outstanding -= len(offsets)
        self._inside = Inside.NOTHING
        return shared

    async def receive(self, chunks: Sequence[Chunk]) -> None:
        self._outstanding -= len(chunks)
        self._inside = Inside.RECEIVING
        async with self._in_time(sum(len(target) for _, target in chunks)):
            for index, target in chunks:
                await self._receive(index, target)
        self._inside = Inside.NOTHING

    async def begin(self) -> None:
        self._part_s = self._limits.hello_s
        if self._early is None:
            self._inside = Inside.RECEIVING
            async with self._in_time(0):
                self._early, _ = await self._stream.receive()
            self._inside = Inside.NOTHING

    def pull(self, part: Part) -> int:
        self._inside = Inside.RECEIVING
        self._patience_s += len(part.target) / PATIENCE_BYTES_PER_SECOND
        if not self._begun:
            frame, self._early = self._early, None
            if frame is None:
                frame, self._patience_s = self._stream.pull_frame(self._patience_s)
            if frame is None:
                return 0
            self._begin(frame, part.index, part.length)
        count, self._patience_s = self._stream.pull(part.target, self._patience_s)
        self._end(part, count)
        return count

    async def receive_part(self, part: Part) -> None:
        began = asyncio.get_running_loop().time()
        self._part_s += len(part.target) / self._limits.bytes_per_second_min
        self._inside = Inside.RECEIVING
        async with self._within(self._part_s):
            if not self._begun:
                self._begin(await self._next_payload(), part.index, part.length)
            await self._stream.receive_into(part.target)
        self._part_s -= asyncio.get_running_loop().time() - began
        self._end(part, len(part.target))

    def _begin(self, frame: Frame, index: int, length: int) -> None:
        self._check_payload(frame, index, length)
        self._outstanding -= 1
        self._begun = True

    def _end(self, part: Part, count: int) -> None:
        """So much of a part has come: whether that was the end of its chunk."""
        if part.start + count == part.length:
            self._begun = False
            self._inside = Inside.NOTHING

    def check(self) -> None:
        if self._reads_places and self._stream.over():
            raise ConnectionEnded("the client gave up, or spoke, while its memory was read")

    async def _receive(self, index: int, target: memoryview) -> None:
        self._check_payload(await self._next_payload(), index, len(target))
        await self._stream.receive_into(target)

    def _check_payload(self, frame: Frame, index: int, length: int) -> None:
        if frame.kind is not Kind.DATA or frame.request_id != self.request_id or frame.index != index:
            raise RequestRefused(f"chunk {index} was expected, not a {frame.kind.name} frame for {frame.index}")
        if frame.offset or frame.payload_bytes != length:
            raise RequestRefused(
                f"chunk {index} came with {frame.payload_bytes} bytes at offset {frame.offset}; this format has "
                f"{length} at 0",
                Code.LENGTH_MISMATCH,
            )

    async def _next_payload(self) -> Frame:
        early, self._early = self._early, None
        return early or (await self._stream.receive())[0]

    def places(self, count: int, nbytes: int) -> Sequence[memoryview]:
        if len(self._offsets) > count:
            raise RequestRefused(f"{len(self._offsets)} places came for {count} keys")
        self._shared = self._claim(self._offsets, nbytes)
        return self._shared

    def _claim(self, offsets: Sequence[int], nbytes: int) -> Sequence[memoryview]:
        if self._window is None:
            return ()
        try:
            return self._window.claim_all(offsets, nbytes)
        except ValueError as error:
            raise RequestRefused(f"a place in the window cannot be used: {error}") from error

    def in_place(self, chunks: Sequence[Chunk]) -> list[int]:
        """Which chunks of a GET were opened where the client wants them."""
        shared = self._shared
        return [index for index, payload in chunks if index < len(shared) and shared[index] is payload]

    def delivery(self, chunks: Sequence[Chunk]) -> _Frames:
        return _Frames(self, chunks)

    def push(self, outgoing: Outgoing, nbytes: int) -> bool:
        """In a worker thread: send what the peer takes; whether that was all."""
        if self.pushes and outgoing:
            self._inside = Inside.DELIVERING
            self._patience_s = self._stream.push(outgoing, self._patience_s + nbytes / PATIENCE_BYTES_PER_SECOND)
            self._inside = Inside.DELIVERING if outgoing else Inside.NOTHING
        return not outgoing

    async def send(self, outgoing: Outgoing, nbytes: int) -> None:
        """Send the rest of frames with so much payload."""
        self._inside = Inside.DELIVERING
        async with self._in_time(nbytes):
            await self._stream.send_all(outgoing)
        self._inside = Inside.NOTHING

    async def done(self, reply: Reply) -> None:
        """End the exchange with its answer."""
        self._inside = Inside.DELIVERING
        await self._stream.send(Kind.DONE, self.request_id, reply)

    def _in_time(self, nbytes: int) -> AbstractAsyncContextManager[None]:
        """A peer that trickles, or stops, gives up its window after the time that a slow network would need."""
        return self._within(self._limits.hello_s + nbytes / self._limits.bytes_per_second_min)

    @asynccontextmanager
    async def _within(self, seconds: float) -> AsyncIterator[None]:
        step_aside()
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise ConnectionEnded("the payload moved too slowly") from error

    async def turn_away(self, refusal: Outage) -> None:
        """End an exchange in which nothing was done or sent."""
        await self._stream.send(Kind.ERROR, self.request_id, wire.failure(refusal))

    async def fail(self, error: KvgwError) -> None:
        """End the exchange with an error; the connection survives if it is still in step."""
        if self._inside is Inside.DELIVERING:
            raise ConnectionEnded("the exchange broke off inside a frame")
        if self._inside is Inside.RECEIVING:
            raise RequestRefused(str(error), error.code)  # the last that this connection hears
        async with asyncio.timeout(self._limits.discard_s):
            await self._discard_outstanding()
            await self._stream.send(Kind.ERROR, self.request_id, wire.failure(error))

    async def _discard_outstanding(self) -> None:
        """The client is sending what it was asked for: it hears of the failure when all of that has come."""
        scratch = memoryview(bytearray(_DISCARD_BYTES if self._outstanding else 0))
        while self._outstanding > 0:
            frame, header = (self._early, b"") if self._early is not None else await self._stream.receive()
            self._early = None
            self._outstanding -= len(wire.decode(header, Places).offsets) if frame.kind is Kind.PLACES else 1
            left = frame.payload_bytes
            while left:
                piece = min(left, len(scratch))
                await self._stream.receive_into(scratch[:piece])
                left -= piece


class _Frames:
    """Chunks of a GET on their way: as DATA frames, or announced as opened in their places."""

    def __init__(self, exchange: Exchange, chunks: Sequence[Chunk]) -> None:
        self._exchange = exchange
        opened = exchange.in_place(chunks)
        there = set(opened)
        travelling = [chunk for chunk in chunks if chunk[0] not in there] if len(opened) < len(chunks) else []
        before = [frame_bytes(Kind.OPENED, exchange.request_id, Opened(opened))] if opened else []
        self._outgoing = data_frames(exchange.request_id, travelling, before)
        self._nbytes = sum(len(payload) for _, payload in travelling)

    def push(self) -> bool:
        return self._exchange.push(self._outgoing, self._nbytes)

    async def finish(self) -> None:
        await self._exchange.send(self._outgoing, self._nbytes)
