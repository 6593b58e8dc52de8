"""One client connection: hello, then exchanges until it ends. Nothing is done for a peer that is not known."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from typing import Final

import kvgw
from kvgw import wire
from kvgw.authenticate import Authenticator
from kvgw.channel import ConnectionEnded, Outgoing, PlainChannel, TlsChannel
from kvgw.errors import Code, KvgwError, Outage, RequestRefused
from kvgw.gateway.core import Gateway
from kvgw.gateway.payloads import Chunk
from kvgw.gateway.translate import translated
from kvgw.model import GetRequest, PutRequest, Reply, Request
from kvgw.server.limits import Limits
from kvgw.server.peers import peer_uid
from kvgw.stream import FrameStream, data_frames
from kvgw.tls import ServerCertificate
from kvgw.wire import Hello, Kind, Wanted, Welcome
from tenancy.access import Caller

log = logging.getLogger("kvgw.server")

_DISCARD_BYTES: Final = 256 * 1024
PATIENCE_SECONDS: Final = 0.02
PATIENCE_BYTES_PER_SECOND: Final = 2e9
"""A worker thread waits so long in one exchange, plus a second for so many bytes, for a peer that reads: one that is
slower is left to the event loop, and holds no thread."""
HELLO_BYTES_MAX: Final = 4096
"""What a peer may send before it is known."""


class Connection:
    """Serves one connected socket to its end. A peer that breaks the protocol is told so once and dropped."""

    def __init__(
        self,
        sock: socket.socket,
        gateway: Gateway,
        authenticator: Authenticator,
        node: str,
        limits: Limits,
        certificate: ServerCertificate | None = None,
    ) -> None:
        """With a `certificate`, the connection is TLS from its first byte; a Unix socket never is."""
        self._socket = sock
        self._tls: TlsChannel | None = None
        if certificate is not None and sock.family != socket.AF_UNIX:
            self._tls = TlsChannel(sock, certificate.context())
        self._stream = FrameStream(self._tls or PlainChannel(sock))
        self._gateway = gateway
        self._authenticator = authenticator
        self._node = node
        self._limits = limits

    async def serve(self) -> None:
        """Serve until the peer leaves. Never raises for what a peer did."""
        try:
            hello = await self._welcome()
            while True:
                await self._exchange(hello)
        except (ConnectionEnded, TimeoutError):
            return
        except RequestRefused as error:
            await self._last_words(error)
        except Exception:  # a bug of ours costs this connection, and no other
            log.exception("a connection failed in an unforeseen way")
        finally:
            self._stream.close()

    async def _welcome(self) -> Hello:
        try:
            async with asyncio.timeout(self._limits.hello_s):
                if self._tls is not None:
                    await self._tls.handshake()
                frame, header = await self._stream.receive(HELLO_BYTES_MAX)
                if frame.kind is not Kind.HELLO or frame.payload_bytes:
                    raise RequestRefused("a connection begins with HELLO")
                hello = wire.decode(header, Hello)
                version = wire.agree_version(hello.versions)
                caller = await self._authenticate(hello)
                welcome = Welcome(version, kvgw.__version__, self._node, str(caller.tenant), caller.default_namespace)
                await self._stream.send(Kind.WELCOME, 0, welcome)
        except Outage as error:
            raise RequestRefused(f"cannot authenticate now: {error}", Code.UNAVAILABLE) from error
        return hello

    async def _authenticate(self, hello: Hello) -> Caller:
        """Who is calling; asked again for each request, so that a token that was revoked ends (I18)."""
        source = "unix" if self._socket.family == socket.AF_UNIX else "tcp" if self._tls is None else "tls"
        with self._gateway.meter.strangers_from(source):
            return await self._identify(hello)

    async def _identify(self, hello: Hello) -> Caller:
        if hello.token is not None:
            with translated():
                return await self._authenticator.token(hello.token)
        if self._socket.family == socket.AF_UNIX and peer_uid(self._socket) == self._limits.owner_uid:
            return self._authenticator.owner()
        raise RequestRefused("a token is needed: pass one, or set KVGW_TOKEN", Code.UNAUTHENTICATED)

    async def _exchange(self, hello: Hello) -> None:
        async with asyncio.timeout(self._limits.idle_s):
            frame, header = await self._stream.receive()
        if frame.kind is not Kind.REQUEST or frame.payload_bytes:
            raise RequestRefused(f"a request was expected, not a {frame.kind.name} frame")
        exchange = _Exchange(self._stream, frame.request_id, self._limits, pushes=self._tls is None)
        try:
            request = wire.decode_request(header)
            async with asyncio.timeout(request.deadline_ms / 1000 + self._limits.grace_s):
                await self._answer(await self._authenticate(hello), request, exchange)
        except TimeoutError:
            await exchange.fail(Outage("the request's deadline is over", Code.DEADLINE))
        except KvgwError as error:
            await exchange.fail(error)
        except ConnectionEnded:
            raise
        except Exception:  # a bug of ours: its trace is for the operator, not for the client
            log.exception("a request failed in an unforeseen way")
            await exchange.fail(Outage("the gateway failed in an unforeseen way; see its log", Code.INTERNAL))

    async def _answer(self, caller: Caller, request: Request, exchange: _Exchange) -> None:
        if isinstance(request, PutRequest):
            await exchange.done(await self._gateway.put(caller, request, exchange))
        elif isinstance(request, GetRequest):
            await exchange.done(await self._gateway.get(caller, request, exchange))
        else:
            await exchange.done(await self._gateway.answer(caller, request))

    async def _last_words(self, error: RequestRefused) -> None:
        """Say why before the connection is closed; a peer that does not listen is no reason to wait."""
        try:
            async with asyncio.timeout(1.0):
                await self._stream.send(Kind.ERROR, 0, wire.failure(error))
        except (ConnectionEnded, TimeoutError):
            return


class Inside(Enum):
    """Whether a frame is on its way: until it is whole, no other frame can follow it."""

    NOTHING = "nothing"
    RECEIVING = "receiving"
    DELIVERING = "delivering"


class _Exchange:
    """Payload of one exchange: the source of a PUT and the sink of a GET."""

    def __init__(self, stream: FrameStream, request_id: int, limits: Limits, *, pushes: bool) -> None:
        self.request_id = request_id
        self.pushes = pushes
        self._stream = stream
        self._limits = limits
        self._patience_s = PATIENCE_SECONDS
        self._outstanding: list[int] = []
        self._inside = Inside.NOTHING

    async def wanted(self, indices: Sequence[int]) -> None:
        await self._stream.send(Kind.WANTED, self.request_id, Wanted(list(indices)))
        self._outstanding = list(indices)

    async def receive(self, chunks: Sequence[Chunk]) -> None:
        self._outstanding = self._outstanding[len(chunks) :]
        self._inside = Inside.RECEIVING
        async with self._in_time(sum(len(target) for _, target in chunks)):
            for index, target in chunks:
                await self._receive(index, target)
        self._inside = Inside.NOTHING

    async def _receive(self, index: int, target: memoryview) -> None:
        frame, _ = await self._stream.receive()
        if frame.kind is not Kind.DATA or frame.request_id != self.request_id or frame.index != index:
            raise RequestRefused(f"chunk {index} was expected, not a {frame.kind.name} frame for {frame.index}")
        if frame.offset or frame.payload_bytes != len(target):
            raise RequestRefused(
                f"chunk {index} came with {frame.payload_bytes} bytes at offset {frame.offset}; this format has "
                f"{len(target)} at 0",
                Code.LENGTH_MISMATCH,
            )
        await self._stream.receive_into(target)

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

    @asynccontextmanager
    async def _in_time(self, nbytes: int) -> AsyncIterator[None]:
        """A peer that trickles, or stops, gives up its window after the time that a slow network would need."""
        try:
            async with asyncio.timeout(self._limits.hello_s + nbytes / self._limits.bytes_per_second_min):
                yield
        except TimeoutError as error:
            raise ConnectionEnded("the payload moved too slowly") from error

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
        for _ in range(len(self._outstanding)):
            frame, _ = await self._stream.receive()
            left = frame.payload_bytes
            while left:
                piece = min(left, len(scratch))
                await self._stream.receive_into(scratch[:piece])
                left -= piece
        self._outstanding = []


class _Frames:
    """Chunks of a GET on their way, as DATA frames."""

    def __init__(self, exchange: _Exchange, chunks: Sequence[Chunk]) -> None:
        self._exchange = exchange
        self._outgoing = data_frames(exchange.request_id, chunks)
        self._nbytes = sum(len(payload) for _, payload in chunks)

    def push(self) -> bool:
        return self._exchange.push(self._outgoing, self._nbytes)

    async def finish(self) -> None:
        await self._exchange.send(self._outgoing, self._nbytes)
