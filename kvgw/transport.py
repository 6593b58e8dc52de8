"""Transports: how the client reaches a gateway. One protocol, one contract suite over all of them.

`SocketTransport` keeps a few connections; each carries one exchange at a time. An exchange that fails or is cancelled
costs its connection, so that an answer can never be taken for another request's.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol, TypeVar

from kvgw import wire
from kvgw.channel import ConnectionEnded
from kvgw.dial import dial
from kvgw.endpoint import Endpoint, TcpEndpoint
from kvgw.errors import Outage, RequestRefused
from kvgw.model import GetReply, GetRequest, PutReply, PutRequest, Question
from kvgw.stream import FrameStream, data_frames
from kvgw.tls import client_context
from kvgw.wire import Failure, Frame, Kind, Wanted, Welcome

Answer = TypeVar("Answer")

CONNECTIONS_DEFAULT: Final = 4


class Transport(Protocol):
    """Carries requests to a gateway and answers back.

    Every method raises `RequestRefused` when the gateway refuses and `Outage` when there is no answer. The caller
    bounds the time; a method that is cancelled leaves the transport usable.
    """

    async def ask(self, request: Question, answer: type[Answer]) -> Answer:
        """Send a request that is answered by one reply."""
        ...

    async def put(self, request: PutRequest, payloads: Sequence[memoryview]) -> PutReply:
        """Store chunks; `payloads` go with the request's keys, and only those that are wanted are read."""
        ...

    async def get(self, request: GetRequest, into: Sequence[memoryview]) -> GetReply:
        """Read chunks into the buffers that go with the request's keys; those of misses are left zero or untouched."""
        ...

    async def aclose(self) -> None:
        """Close what the transport holds; a second call does nothing."""
        ...


class SocketTransport:
    """Reaches a gateway over its Unix socket or TCP port. Connects on first use, and again whenever it has to."""

    def __init__(
        self,
        endpoint: Endpoint,
        token: str | None,
        *,
        tls: ssl.SSLContext | None = None,
        connections: int = CONNECTIONS_DEFAULT,
    ) -> None:
        """`tls`: how an encrypted endpoint is checked; None: against the system's authorities."""
        self._endpoint = endpoint
        self._token = token
        self._tls = tls
        if tls is None and isinstance(endpoint, TcpEndpoint) and endpoint.encrypted:
            self._tls = client_context(None)
        self._free: deque[FrameStream] = deque()
        self._limit = asyncio.Semaphore(connections)
        self._process = os.getpid()
        self._closed = False
        self._next_request = 0

    async def ask(self, request: Question, answer: type[Answer]) -> Answer:
        async with self._exchange() as exchange:
            await exchange.send_request(request)
            return _decoded(await exchange.expect(Kind.DONE), answer)

    async def put(self, request: PutRequest, payloads: Sequence[memoryview]) -> PutReply:
        async with self._exchange() as exchange:
            await exchange.send_request(request)
            wanted = _decoded(await exchange.expect(Kind.WANTED), Wanted)
            for index in wanted.indices:
                if not 0 <= index < len(payloads):
                    raise wire.broken(f"went out of step: it wants chunk {index} of {len(payloads)}")
            await exchange.send_data([(index, payloads[index]) for index in wanted.indices])
            return _decoded(await exchange.expect(Kind.DONE), PutReply)

    async def get(self, request: GetRequest, into: Sequence[memoryview]) -> GetReply:
        filled: set[int] = set()
        try:
            async with self._exchange() as exchange:
                await exchange.send_request(request)
                reply = _decoded(await exchange.receive_data(into, filled), GetReply)
        except BaseException:
            _zero(into, filled)
            raise
        hits = {hit.index for hit in reply.hits}
        if not hits <= filled:
            _zero(into, filled)
            raise wire.broken("went out of step: it announced chunks that it did not send")
        _zero(into, filled - hits)
        return reply

    async def aclose(self) -> None:
        self._closed = True
        self._leave_to_parent()
        while self._free:
            self._free.pop().close()

    @asynccontextmanager
    async def _exchange(self) -> AsyncIterator[_Exchange]:
        async with self._limit:
            stream = self._take_free() or await self._connect()
            self._next_request = (self._next_request + 1) % 2**32
            exchange = _Exchange(stream, self._next_request)
            try:
                yield exchange
            except ConnectionEnded as error:
                raise wire.broken(str(error)) from error
            finally:
                if exchange.ended:
                    self._give_back(stream)
                else:
                    stream.close()

    def _take_free(self) -> FrameStream | None:
        if self._closed:
            raise Outage("the client is closed")
        self._leave_to_parent()
        return self._free.pop() if self._free else None

    def _leave_to_parent(self) -> None:
        """A forked child shares its parent's connections; using or ending one would break the parent's exchanges."""
        if self._process != os.getpid():
            while self._free:
                self._free.pop().abandon()
            self._process = os.getpid()

    def _give_back(self, stream: FrameStream) -> None:
        if self._closed or self._process != os.getpid():
            stream.close()
        else:
            self._free.append(stream)

    async def _connect(self) -> FrameStream:
        stream = FrameStream(await dial(self._endpoint, self._tls))
        try:
            await stream.send(Kind.HELLO, 0, wire.Hello(wire.VERSIONS, "kvgw-python", self._token))
            frame, header = await _receive(stream)
            if frame.kind is Kind.ERROR:
                raise _decoded(header, Failure).error()
            if frame.kind is not Kind.WELCOME:
                raise wire.broken(f"began with a {frame.kind.name} frame in place of WELCOME")
            _decoded(header, Welcome)
        except ConnectionEnded as error:
            stream.close()
            raise wire.broken(f"{error} before the gateway said welcome") from error
        except BaseException:
            stream.close()
            raise
        return stream


class _Exchange:
    """One request and its answers on one connection."""

    def __init__(self, stream: FrameStream, request_id: int) -> None:
        self._stream = stream
        self._request_id = request_id
        self.ended = False
        """The gateway's last frame of this exchange was received: the connection is ready for the next."""

    async def send_request(self, request: Question | PutRequest | GetRequest) -> None:
        await self._stream.send(Kind.REQUEST, self._request_id, request)

    async def send_data(self, chunks: Sequence[tuple[int, memoryview]]) -> None:
        await self._stream.send_all(data_frames(self._request_id, chunks))

    async def receive_data(self, into: Sequence[memoryview], filled: set[int]) -> bytes:
        """Receive DATA frames into their places, noting the indices, until DONE: its header."""
        reached = dict.fromkeys(range(len(into)), 0)
        while True:
            frame, header = await self._receive()
            if frame.kind is Kind.DONE:
                for index in filled:
                    if reached[index] != len(into[index]):
                        raise wire.broken(f"went out of step: chunk {index} ended at byte {reached[index]}")
                return header
            if frame.kind is not Kind.DATA or frame.index not in reached:
                raise wire.broken(f"went out of step: {frame.kind.name} frame for chunk {frame.index}")
            target = into[frame.index]
            if frame.offset != reached[frame.index] or frame.offset + frame.payload_bytes > len(target):
                raise wire.broken(f"went out of step: chunk {frame.index} at byte {frame.offset}")
            filled.add(frame.index)
            await self._stream.receive_into(target[frame.offset : frame.offset + frame.payload_bytes])
            reached[frame.index] += frame.payload_bytes

    async def expect(self, kind: Kind) -> bytes:
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


def _zero(into: Sequence[memoryview], indices: set[int]) -> None:
    for index in indices:
        into[index][:] = bytes(len(into[index]))
