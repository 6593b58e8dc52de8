"""Channels: bytes over a connected, non-blocking stream socket; `kvgw.tlschannel` has the one inside TLS.

Payloads are received straight into their destination and sent from where they lie. A transfer that has to wait
registers with the event loop once, not for each piece of it: the loop's own ``sock_*`` calls register, wake a task and
unregister for every buffer that the kernel fills. Who waits for a peer to speak stays registered until nobody listens:
to register and unregister costs more than a small frame back and forth.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Final, Protocol

UNIX_SEND_BYTES: Final = 512 * 1024
"""What the kernel may hold for a peer on a Unix socket; it counts its own overhead and allows twice as much."""

_BUFFERS_AT_ONCE: Final = 512
"""Buffers given to one system call; Linux takes 1024."""

_DESCRIPTORS_AT_ONCE: Final = 4
_DESCRIPTOR: Final = struct.Struct("i")


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

    async def send_small(self, data: bytes) -> None:
        """Send what mostly fits into one call of the system. Raises `ConnectionEnded`."""
        ...

    def push(self, outgoing: Outgoing, patience_s: float) -> float:
        """In a worker thread, while nothing else is sent: send what the peer takes, waiting at most so long for it.

        What is left of the patience, in seconds; 0 when the peer was given up and `outgoing` has more. A channel that
        cannot be used from a thread leaves all of it to `send`. Raises `ConnectionEnded`.
        """
        ...

    async def send_passing(self, data: bytes, descriptor: int) -> None:
        """Send `data`, and a duplicate of `descriptor` with it. Raises `ConnectionEnded`, also where that cannot be."""
        ...

    def accepting(self) -> AbstractContextManager[list[int]]:
        """While this is open: where descriptors go that come with what is received. Otherwise none is taken."""
        ...

    def over(self) -> bool:
        """Whether it is of no more use, asked while nothing is expected: the peer has ended it, or spoke unasked."""
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
        self._passed: list[int] | None = None
        self._heard: Callable[[], None] | None = None
        """What waits for the peer to speak."""
        self._listens = False
        """The socket's reader is registered with the event loop."""
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
            if self._passed is None:
                count, _, _, _ = self._socket.recvmsg_into([target[at:], spare])
            else:
                count = self._receive_passed([target[at:], spare], self._passed)
            if count == 0:
                raise ConnectionEnded("ended in the middle of a frame" if at else "ended")
            at += count
            return at >= len(target)

        await self._complete(fill, self._listen, self._rest)
        return at - len(target)

    def _listen(self, number: int, ready: Callable[[], None]) -> None:
        self._heard = ready
        if not self._listens:
            self._loop.add_reader(number, self._hear)
            self._listens = True

    def _rest(self, _: int) -> None:
        self._heard = None

    def _hear(self) -> None:
        if self._heard is not None:
            self._heard()
        else:
            self._stop_listening()  # the loop would say it again and again, until somebody takes it

    def _stop_listening(self) -> None:
        if self._listens and _runs(self._loop):
            self._loop.remove_reader(self._socket.fileno())
        self._listens = False

    def _receive_passed(self, buffers: list[memoryview], passed: list[int]) -> int:
        room = socket.CMSG_LEN(_DESCRIPTORS_AT_ONCE * _DESCRIPTOR.size)
        count, ancillary, _, _ = self._socket.recvmsg_into(buffers, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = len(data) // _DESCRIPTOR.size * _DESCRIPTOR.size
                passed += [number for (number,) in _DESCRIPTOR.iter_unpack(data[:whole])]
        return count

    @contextmanager
    def accepting(self) -> Iterator[list[int]]:
        passed: list[int] = []
        self._passed = passed
        try:
            yield passed
        finally:
            self._passed = None

    async def send_passing(self, data: bytes, descriptor: int) -> None:
        rest: list[bytes] = []

        def pass_on() -> bool:
            sent = socket.send_fds(self._socket, [data], [descriptor])
            rest.append(data[sent:])
            return True

        await self._complete(pass_on, self._loop.add_writer, self._loop.remove_writer)
        await self.send(Outgoing(rest))

    async def send(self, outgoing: Outgoing) -> None:
        def empty() -> bool:
            outgoing.send_some(self._socket)
            return not outgoing

        if outgoing:
            await self._complete(empty, self._loop.add_writer, self._loop.remove_writer)

    async def send_small(self, data: bytes) -> None:
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise ConnectionEnded(str(error)) from error
        if sent < len(data):
            await self.send(Outgoing((data[sent:],)))

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

    def over(self) -> bool:
        return self.receive_at_once(1, socket.MSG_PEEK) is not None

    def receive_at_once(self, most: int, flags: int = 0) -> bytes | None:
        """What has come already; nothing when the peer has ended, or is gone; None when it is silent."""
        try:
            return self._socket.recv(most, flags)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def close(self) -> None:
        self._stop_listening()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def abandon(self) -> None:
        self._stop_listening()
        self._socket.close()


def _runs(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether it is what runs here: one that has ended is deaf, and a forked child leaves it to its parent."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
