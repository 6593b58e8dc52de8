"""One client connection: hello, then exchanges until it ends. Nothing is done for a peer that is not known."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Final

import kvgw
from kvgw import wire
from kvgw.authenticate import Authenticator, Known
from kvgw.channel import ConnectionEnded, PlainChannel
from kvgw.deadlines import Deadlines
from kvgw.errors import Code, KvgwError, Outage, RequestRefused
from kvgw.gateway.core import Gateway
from kvgw.gateway.translate import translated
from kvgw.model import GetRequest, PutRequest, Reply, Request
from kvgw.server.exchange import Exchange
from kvgw.server.limits import Limits
from kvgw.server.peers import peer_uid
from kvgw.stream import FrameStream, frame_bytes
from kvgw.tls import ServerCertificate
from kvgw.tlschannel import TlsChannel
from kvgw.wire import Frame, Hello, Kind, Places, Welcome, WindowAsked, WindowGiven
from storage.lending import Loan
from tenancy.access import Caller

log = logging.getLogger("kvgw.server")

WINDOWS_MAX: Final = 32
"""How often one connection may ask for a window: each is work for the kernel."""
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
        self._loan: Loan | None = None
        self._windows_left = WINDOWS_MAX
        self._deadlines = Deadlines()
        self._idle = self._deadlines.within(limits.idle_s)
        self._known: Known | None = None
        """Who is calling, as the peer's credential was answered for last."""
        self._request: Request | None = None
        """What has come is this, and it is not turned away."""

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
            self._deadlines.close()
            await self._end_loan()

    async def _welcome(self) -> Hello:
        async with asyncio.timeout(self._limits.hello_s):
            if self._tls is not None:
                await self._tls.handshake()
            frame, header = await self._stream.receive(HELLO_BYTES_MAX)
            if frame.kind is not Kind.HELLO or frame.payload_bytes:
                raise RequestRefused("a connection begins with HELLO")
            hello = wire.decode(header, Hello)
            version = wire.agree_version(hello.versions)
            caller = await self._welcomed(hello)
            welcome = Welcome(
                version,
                kvgw.__version__,
                self._node,
                str(caller.tenant),
                caller.default_namespace,
                lends=self._is_local and self._gateway.lends,
            )
            await self._stream.send(Kind.WELCOME, 0, welcome)
        return hello

    async def _welcomed(self, hello: Hello) -> Caller:
        """Who is calling, asked outside of a request: when that cannot be had, the connection ends with the reason."""
        try:
            return await self._authenticate(hello)
        except Outage as error:
            raise RequestRefused(f"cannot authenticate now: {error}", Code.UNAVAILABLE) from error

    async def _authenticate(self, hello: Hello) -> Caller:
        """Who is calling; looked at again for each request, so that a token that was revoked ends (I18)."""
        if self._known is not None and self._authenticator.holds(self._known):
            return self._known.caller
        source = "unix" if self._is_local else "tcp" if self._tls is None else "tls"
        with self._gateway.meter.strangers_from(source):
            self._known = await self._identify(hello)
        return self._known.caller

    async def _identify(self, hello: Hello) -> Known:
        if hello.token is not None:
            with translated():
                return await self._authenticator.known(hello.token)
        if self._is_local and peer_uid(self._socket) == self._limits.owner_uid:
            return Known.for_good(self._authenticator.owner())
        raise RequestRefused("a token is needed: pass one, or set KVGW_TOKEN", Code.UNAUTHENTICATED)

    async def _exchange(self, hello: Hello) -> None:
        self._request = None
        with self._deadlines.within(self._limits.idle_s) as self._idle:
            frame, header = await self._stream.receive(at_once=self._at_once)
        if frame.kind is Kind.WINDOW:
            await self._lend(hello, frame, header)
            return
        offsets: list[int] = []
        if frame.kind is Kind.PLACES and self._loan is not None and not frame.payload_bytes:
            offsets = wire.decode(header, Places).offsets
            async with asyncio.timeout(self._limits.hello_s):
                frame, header = await self._stream.receive()
        if frame.kind is not Kind.REQUEST or frame.payload_bytes:
            raise RequestRefused(f"a request was expected, not a {frame.kind.name} frame")
        window = None if self._loan is None else self._loan.window
        exchange = Exchange(
            self._stream, frame.request_id, self._limits, pushes=self._tls is None, window=window, offsets=offsets
        )
        try:
            await self._serve_request(hello, header, exchange)
        finally:
            if window is not None:
                window.unclaim()

    async def _serve_request(self, hello: Hello, header: bytes, exchange: Exchange) -> None:
        try:
            request = self._request
            if request is None:
                request = wire.decode_request(header)
                refusal = self._turned_away(request)
                if refusal is not None:
                    with self._deadlines.within(self._limits.discard_s):
                        await exchange.turn_away(refusal)
                    return
            with self._deadlines.within(request.deadline_ms / 1000 + self._limits.grace_s):
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

    def _at_once(self, frame: Frame, header: memoryview) -> bytes | None:
        """The answer to a request that is turned away, or whose answer is at hand; None: what comes of it takes more.

        In a crowd most are turned away, and what they cost is taken from those who are served; and a question that is
        answered from memory would cost most while it waited: no task is woken for either.
        """
        if frame.kind is not Kind.REQUEST or frame.payload_bytes:
            return None
        try:
            request = wire.decode_request(header)
        except RequestRefused:
            return None  # it is refused by the task, which does not end for it
        if (refusal := self._turned_away(request)) is not None:
            answer = frame_bytes(Kind.ERROR, frame.request_id, wire.failure(refusal))
        elif (reply := self._answered(request)) is not None:
            answer = frame_bytes(Kind.DONE, frame.request_id, reply)
        else:
            self._request = request
            return None
        self._idle.renew()
        return answer

    def _turned_away(self, request: Request) -> Outage | None:
        """Why it isn't served, if that can be told at once to whoever spoke here before."""
        speaker = self._speaker
        return None if speaker is None else self._gateway.turned_away(speaker, request)

    def _answered(self, request: Request) -> Reply | None:
        """What it asks, if that is at hand for whoever spoke here before."""
        speaker = self._speaker
        return None if speaker is None else self._gateway.at_once(speaker, request)

    @property
    def _speaker(self) -> Caller | None:
        """Who spoke here before, while that needs no new look."""
        known = self._known
        return known.caller if known is not None and self._authenticator.holds(known) else None

    async def _answer(self, caller: Caller, request: Request, exchange: Exchange) -> None:
        if isinstance(request, PutRequest):
            await exchange.done(await self._gateway.put(caller, request, exchange))
        elif isinstance(request, GetRequest):
            await exchange.done(await self._gateway.get(caller, request, exchange))
        else:
            await exchange.done(await self._gateway.answer(caller, request))

    async def _lend(self, hello: Hello, frame: Frame, header: bytes) -> None:
        """Give the client a window in the place of the one that it has, or say that there is none for it."""
        if frame.payload_bytes or not self._is_local:
            raise RequestRefused("a window is lent over a Unix socket, and asked for without a payload")
        asked = wire.decode(header, WindowAsked)
        await self._end_loan()
        caller = await self._welcomed(hello)
        if self._windows_left > 0:
            self._windows_left -= 1
            self._loan = await self._gateway.lend(caller, asked.least, asked.most)
        async with asyncio.timeout(self._limits.hello_s):
            if self._loan is None:
                await self._stream.send(Kind.WINDOW, 0, WindowGiven(0))
                return
            window = self._loan.window
            await self._stream.send_passing(Kind.WINDOW, WindowGiven(window.nbytes), window.descriptor)
        window.close_descriptor()

    async def _end_loan(self) -> None:
        """No exchange runs now, and no thread of one."""
        loan, self._loan = self._loan, None
        if loan is not None:
            await self._gateway.take_back(loan)

    @property
    def _is_local(self) -> bool:
        return self._socket.family == socket.AF_UNIX

    async def _last_words(self, error: RequestRefused) -> None:
        """Say why before the connection is closed; a peer that does not listen is no reason to wait."""
        try:
            async with asyncio.timeout(1.0):
                await self._stream.send(Kind.ERROR, 0, wire.failure(error))
        except (ConnectionEnded, TimeoutError):
            return
