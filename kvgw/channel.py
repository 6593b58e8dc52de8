"""Channels: bytes over a connected, non-blocking stream socket, in the clear or inside TLS.

Payloads are received straight into their destination and sent from where they lie. A transfer that has to wait
registers with the event loop once, not for each piece of it: the loop's own ``sock_*`` calls register, wake a task and
unregister for every buffer that the kernel fills. TLS runs over memory buffers, one copy in each direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final, Protocol, cast

TLS_PIECE_BYTES: Final = 256 * 1024
"""Bytes encrypted, or received, between two turns of the event loop."""

UNIX_SEND_BYTES: Final = 512 * 1024
"""What the kernel may hold for a peer on a Unix socket; it counts its own overhead and allows twice as much."""

_BUFFERS_AT_ONCE: Final = 512
"""Buffers given to one system call; Linux takes 1024."""


class ConnectionEnded(Exception):
    """The peer closed the connection, or the network did."""


class Outgoing:
    """Buffers on their way out, in order. They are used until nothing is left, or until this is given up."""

    __slots__ = ("_buffers",)

    def __init__(self, buffers: Iterable[bytes | memoryview]) -> None:
        self._buffers = deque(memoryview(buffer) for buffer in buffers if len(buffer))

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def first(self) -> memoryview:
        """The buffer that is next, or what is left of it."""
        return self._buffers[0]

    def sent(self, nbytes: int) -> None:
        """`nbytes` more are on their way."""
        while nbytes:
            first = self._buffers[0]
            if nbytes < len(first):
                self._buffers[0] = first[nbytes:]
                return
            nbytes -= len(self._buffers.popleft())

    def send_some(self, sock: socket.socket) -> None:
        """One system call. Raises `BlockingIOError` when the socket takes nothing now."""
        self.sent(sock.sendmsg(list(islice(self._buffers, _BUFFERS_AT_ONCE))))


class Channel(Protocol):
    """A two-way stream of bytes. One task sends and one receives at a time."""

    async def receive(self, target: memoryview, spare: memoryview) -> int:
        """Fill `target`; bytes that came with its last ones go to `spare`: how many. Raises `ConnectionEnded`."""
        ...

    async def send(self, outgoing: Outgoing) -> None:
        """Send all of it. Raises `ConnectionEnded`."""
        ...

    def push(self, outgoing: Outgoing, patience_s: float) -> float:
        """In a worker thread, while nothing else is sent: send what the peer takes, waiting at most so long for it.

        What is left of the patience, in seconds; 0 when the peer was given up and `outgoing` has more. A channel that
        cannot be used from a thread leaves all of it to `send`. Raises `ConnectionEnded`.
        """
        ...

    def close(self) -> None:
        """End the connection; a second call does nothing."""
        ...

    def abandon(self) -> None:
        """Give up the descriptor without ending the connection: another process still owns it."""
        ...


class PlainChannel:
    """A socket as it is: a Unix socket, or TCP on loopback."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        if sock.family == socket.AF_UNIX:
            # The default holds half of what fits into a processor's cache, and both sides take turns in small steps.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SEND_BYTES)
        else:
            # Without it a small frame behind a large one waits for the peer's delayed acknowledgement.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    async def receive_some(self, target: memoryview) -> int:
        """Receive at least one byte into `target`; 0 when the peer has ended. Raises `ConnectionEnded`."""
        try:
            return await self._loop.sock_recv_into(self._socket, target)
        except OSError as error:
            raise ConnectionEnded(str(error)) from error

    async def receive(self, target: memoryview, spare: memoryview) -> int:
        at = 0

        def fill() -> bool:
            nonlocal at
            count, _, _, _ = self._socket.recvmsg_into([target[at:], spare])
            if count == 0:
                raise ConnectionEnded("ended in the middle of a frame" if at else "ended")
            at += count
            return at >= len(target)

        await self._complete(fill, self._loop.add_reader, self._loop.remove_reader)
        return at - len(target)

    async def send(self, outgoing: Outgoing) -> None:
        def empty() -> bool:
            outgoing.send_some(self._socket)
            return not outgoing

        if outgoing:
            await self._complete(empty, self._loop.add_writer, self._loop.remove_writer)

    async def _complete(
        self,
        step: Callable[[], bool],
        register: Callable[[int, Callable[[], None]], object],
        unregister: Callable[[int], object],
    ) -> None:
        """Take steps until one says that it was the last, each when the socket is ready for it."""
        try:
            if step():
                return
        except BlockingIOError:
            pass  # registered below
        except OSError as error:
            raise ConnectionEnded(str(error)) from error
        done: asyncio.Future[None] = self._loop.create_future()

        def ready() -> None:
            if done.done():
                return
            try:
                if step():
                    done.set_result(None)
            except BlockingIOError:
                return
            except OSError as error:
                done.set_exception(ConnectionEnded(str(error)))
            except ConnectionEnded as error:
                done.set_exception(error)

        number = self._socket.fileno()
        register(number, ready)
        try:
            await done
        finally:
            unregister(number)

    def push(self, outgoing: Outgoing, patience_s: float) -> float:
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        while outgoing:
            try:
                outgoing.send_some(self._socket)
            except BlockingIOError:
                began = self._loop.time()
                if patience_s <= 0 or not writable.poll(patience_s * 1000):
                    return 0.0
                patience_s -= self._loop.time() - began
            except OSError as error:
                raise ConnectionEnded(str(error)) from error
        return max(0.0, patience_s)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def abandon(self) -> None:
        self._socket.close()


class TlsChannel:
    """TLS over a socket. Use `handshake` first; nothing else is sent or received before it has succeeded."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_hostname: str | None = None) -> None:
        """Without `server_hostname` this is the server's end."""
        self._plain = PlainChannel(sock)
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
        )
        self._scratch = memoryview(bytearray(TLS_PIECE_BYTES))
        self._flushing = asyncio.Lock()

    async def handshake(self) -> None:
        """Agree on keys and check the peer's certificate. Raises `ConnectionEnded` with TLS's own reason."""
        try:
            while True:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    await self._flush()
                    if not await self._fill():
                        raise ConnectionEnded("ended in the TLS handshake") from None
                else:
                    await self._flush()
                    return
        except ssl.SSLError as error:
            with contextlib.suppress(ConnectionEnded):
                await self._flush()  # the alert that tells the peer
            reason = getattr(error, "verify_message", "") or error.reason or str(error)
            raise ConnectionEnded(f"failed in the TLS handshake: {reason}") from error

    async def receive(self, target: memoryview, spare: memoryview) -> int:
        at = 0
        while at < len(target):
            count = await self._receive_some(target[at:])
            if count == 0:
                raise ConnectionEnded("ended in the middle of a frame" if at else "ended")
            at += count
        return 0

    async def _receive_some(self, target: memoryview) -> int:
        while True:
            try:
                # With a buffer to fill it answers how much it filled, and takes any writable one.
                return cast("int", self._tls.read(len(target), cast("bytearray", target)))
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._fill():
                    raise ConnectionEnded("ended without saying so inside TLS") from None
            except ssl.SSLZeroReturnError:
                return 0
            except ssl.SSLError as error:
                raise ConnectionEnded(f"broke TLS: {error.reason or error}") from error

    async def send(self, outgoing: Outgoing) -> None:
        try:
            while outgoing:
                gathered = 0
                while outgoing and gathered < TLS_PIECE_BYTES:
                    gathered += self._write(outgoing, TLS_PIECE_BYTES - gathered)
                await self._flush()
        except ssl.SSLError as error:
            raise ConnectionEnded(f"broke TLS: {error.reason or error}") from error

    def _write(self, outgoing: Outgoing, most: int) -> int:
        count = self._tls.write(outgoing.first()[:most])
        outgoing.sent(count)
        return count

    def push(self, outgoing: Outgoing, patience_s: float) -> float:
        return 0.0  # its state belongs to the event loop

    async def _fill(self) -> bool:
        """Receive some of what the peer sent; False when it has ended."""
        count = await self._plain.receive_some(self._scratch)
        self._incoming.write(self._scratch[:count])
        return count > 0

    async def _flush(self) -> None:
        """Send what TLS has to say."""
        async with self._flushing:
            data = self._outgoing.read()
            if data:
                await self._plain.send(Outgoing([data]))

    def close(self) -> None:
        self._plain.close()

    def abandon(self) -> None:
        self._plain.abandon()
