"""Transports: how the client reaches a gateway. One protocol, one contract suite over all of them.

`SocketTransport` keeps a few connections; each carries one exchange at a time. An exchange that fails or is cancelled
costs its connection, so that an answer can never be taken for another request's. On a Unix socket payloads may go
through windows that the gateway lends: one for each of these connections, through which they are copied, and one for
each `HeldWindow`, in which callers have them, on a connection of its own.
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
from kvgw.connection import Connection, Exchange
from kvgw.endpoint import Endpoint, TcpEndpoint, UnixEndpoint
from kvgw.errors import Outage
from kvgw.held import HeldWindow, HeldWindows
from kvgw.model import GetReply, GetRequest, PutReply, PutRequest, Question
from kvgw.tls import client_context

Answer = TypeVar("Answer")

CONNECTIONS_DEFAULT: Final = 4

FRESH_SECONDS: Final = 0.001
"""A connection that has just been used is used again unasked: to ask whether the gateway has ended it costs a call of
the system, as much as a tenth of a small question."""


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

    async def lend(self, nbytes: int) -> HeldWindow | None:
        """Memory shared with a gateway of this host, which payloads do not have to leave; None where there is none."""
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
        windows: HeldWindows | None = None,
    ) -> None:
        """`tls`: how an encrypted endpoint is checked; None: against the system's authorities.

        `windows`: use shared memory where the gateway lends it; the same for all transports of one client.
        """
        self._endpoint = endpoint
        self._token = token
        self._tls = tls
        if tls is None and isinstance(endpoint, TcpEndpoint) and endpoint.encrypted:
            self._tls = client_context(None)
        self._windows = windows or HeldWindows()
        self._shares = windows is not None and isinstance(endpoint, UnixEndpoint)
        self._lent: set[HeldWindow] = set()
        self._free: deque[Connection] = deque()
        self._connections = connections
        self._limit = asyncio.Semaphore(connections)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = os.getpid()
        self._closed = False
        self._next_request = 0

    async def ask(self, request: Question, answer: type[Answer]) -> Answer:
        # As `_exchange` without payloads, written out: a small question is mostly what is around it.
        self._settle_here()
        async with self._limit:
            connection = self._take_free() or await self._connect()
            exchange = self._begin(connection)
            try:
                return await exchange.ask(request, answer)
            except ConnectionEnded as error:
                raise wire.broken(str(error)) from error
            finally:
                self._give_back(connection, in_step=exchange.ended)

    async def put(self, request: PutRequest, payloads: Sequence[memoryview]) -> PutReply:
        async with self._exchange(payloads) as exchange:
            return await exchange.put(request, payloads)

    async def get(self, request: GetRequest, into: Sequence[memoryview]) -> GetReply:
        filled: set[int] = set()
        try:
            async with self._exchange(into) as exchange:
                reply = await exchange.get(request, into, filled)
        except BaseException:
            _zero(into, filled)
            raise
        hits = {hit.index for hit in reply.hits}
        if not hits <= filled:
            _zero(into, filled)
            raise wire.broken("went out of step: it announced chunks that it did not send")
        _zero(into, filled - hits)
        return reply

    async def lend(self, nbytes: int) -> HeldWindow | None:
        if not self._shares or self._closed:
            return None
        connection = await self._connect()
        try:
            await connection.take_window(nbytes, nbytes)
        except ConnectionEnded as error:
            connection.close()
            raise wire.broken(str(error)) from error
        except BaseException:
            connection.close()
            raise
        if connection.window is None:
            connection.close()
            return None
        self._settle_here()
        self._lent = {held for held in self._lent if held.connection is not None}
        held = HeldWindow(connection, connection.window, nbytes, self._windows)
        self._lent.add(held)
        return held

    async def aclose(self) -> None:
        self._closed = True
        self._settle_here()
        while self._free:
            self._free.pop().close()
        for held in self._lent:
            if not held.lock.locked():
                held.end()

    @asynccontextmanager
    async def _exchange(self, payloads: Sequence[memoryview]) -> AsyncIterator[Exchange]:
        """An exchange on the connection of the window that the payloads lie in, or on any other."""
        self._settle_here()
        held = self._windows.holding(payloads)
        if held is not None and held in self._lent:
            async with held.lock:
                self._windows.check(payloads)  # it may have been lost while this call waited for its turn
                if held.connection is not None and held.connection.stream.over():
                    held.end()
                if held.connection is not None:
                    async with self._on(held.connection, held) as exchange:
                        yield exchange
                    return
        async with self._limit:
            self._windows.check(payloads)
            connection = await self._with_room(sum(map(len, payloads)))
            async with self._on(connection, None) as exchange:
                yield exchange

    @asynccontextmanager
    async def _on(self, connection: Connection, held: HeldWindow | None) -> AsyncIterator[Exchange]:
        exchange = self._begin(connection)
        try:
            yield exchange
        except ConnectionEnded as error:
            # The gateway ends a connection when no thread of its uses the window any more.
            exchange.gateway_writes = False
            raise wire.broken(str(error)) from error
        finally:
            if held is not None and not exchange.ended:
                held.lost = exchange.gateway_writes
                held.end()
            elif held is None:
                self._give_back(connection, in_step=exchange.ended)

    def _begin(self, connection: Connection) -> Exchange:
        self._next_request = (self._next_request + 1) % 2**32
        return Exchange(connection, self._next_request)

    async def _with_room(self, nbytes: int) -> Connection:
        """A free connection or a new one, with a window for so much payload if there shall be one."""
        connection = self._take_free() or await self._connect()
        if not self._shares:
            return connection
        try:
            await connection.make_room(nbytes)
        except ConnectionEnded:
            connection.close()
            return await self._connect()
        except Outage as error:
            connection.close()
            if error.answered:
                raise
            # Whatever is between this client and the gateway passes no descriptors: never again then.
            self._shares = False
            return await self._connect()
        except BaseException:
            connection.close()
            raise
        return connection

    async def _connect(self) -> Connection:
        return await Connection.open(self._endpoint, self._token, self._tls)

    def _take_free(self) -> Connection | None:
        """One that the gateway has not ended meanwhile, as it does when it is restarted."""
        if self._closed:
            raise Outage("the client is closed")
        while self._free:
            connection = self._free.pop()
            fresh = asyncio.get_running_loop().time() - connection.rested_at < FRESH_SECONDS
            if fresh or not connection.stream.over():
                return connection
            connection.close()
        return None

    def _settle_here(self) -> None:
        """A forked child shares its parent's connections; using or ending one would break the parent's exchanges.

        In another event loop than before (a second ``asyncio.run``) those of the first are of no use any more.
        """
        if self._process != os.getpid():
            while self._free:
                self._free.pop().abandon()
            for held in self._lent:
                held.leave_to_parent()
            self._process = os.getpid()
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            while self._free:
                self._free.pop().close()
            for held in self._lent:
                held.end()
            self._limit = asyncio.Semaphore(self._connections)
            self._loop = loop

    def _give_back(self, connection: Connection, *, in_step: bool) -> None:
        if not in_step or self._closed or self._process != os.getpid():
            connection.close()
        else:
            connection.rested_at = asyncio.get_running_loop().time()
            self._free.append(connection)


def _zero(into: Sequence[memoryview], indices: set[int]) -> None:
    for index in indices:
        into[index][:] = bytes(len(into[index]))
