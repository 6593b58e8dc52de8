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
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Final, Protocol

from kvgw.passing import receive_passed
from kvgw.patience import patiently
from kvgw.runtime import runs_here

UNIX_SEND_BYTES: Final = 512 * 1024
"""What the kernel may hold for a peer on a Unix socket; it counts its own overhead and allows twice as much."""

_BUFFERS_AT_ONCE: Final = 512
"""Buffers given to one system call; Linux takes 1024."""


Sift = Callable[[int], bytes | None]
"""Says, before a task is woken for it, what to answer to what has come, so many bytes of it beyond its target; None:
it is for the task."""


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

    async def receive(self, target: memoryview, spare: memoryview, sift: Sift | None = None) -> int:
        """Fill `target`; bytes that came with its last ones go to `spare`: how many. Raises `ConnectionEnded`.

        What `sift` answers, is sent, and `target` filled once more; a channel may leave that to its caller.
        """
        ...

    def pull(self, target: memoryview, spare: memoryview, patience_s: float) -> tuple[int, float]:
        """In a worker thread, while nothing else is received: as `receive`, waiting at most so long for the peer.

        How much came, with what went to `spare`, and what is left of the patience, as `push` has it.
        """
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

    def __init__(self, sock: socket.socket, *, unix_send_bytes: int = UNIX_SEND_BYTES) -> None:
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._passed: list[int] | None = None
        self._heard: Callable[[], None] | None = None
        """What waits for the peer to speak."""
        self._listens = False
        """The socket's reader is registered with the event loop."""
        if sock.family == socket.AF_UNIX:
            # The default holds half of what fits into a processor's cache, and both sides take turns in small steps.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, unix_send_bytes)
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

    async def receive(self, target: memoryview, spare: memoryview, sift: Sift | None = None) -> int:
        at, unsent = 0, b""

        def fill() -> bool:
            nonlocal at, unsent
            if self._passed is None:
                count, _, _, _ = self._socket.recvmsg_into([target[at:], spare])
            else:
                count = receive_passed(self._socket, [target[at:], spare], self._passed)
            if count == 0:
                raise ConnectionEnded("ended in the middle of a frame" if at else "ended")
            at += count
            if at < len(target) or sift is None or (answer := sift(at - len(target))) is None:
                return at >= len(target)
            at, unsent = 0, answer[self._send_at_once(answer) :]
            return bool(unsent)

        await self._complete(fill, self._listen, self._rest)
        while unsent:  # nothing more is taken from a peer that does not take its answers
            await self.send(Outgoing((unsent,)))
            unsent = b""
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
        if self._listens and runs_here(self._loop):
            self._loop.remove_reader(self._socket.fileno())
        self._listens = False

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
        sent = self._send_at_once(data)
        if sent < len(data):
            await self.send(Outgoing((data[sent:],)))

    def _send_at_once(self, data: bytes) -> int:
        """How much of it the socket took. Raises `ConnectionEnded`."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionEnded(str(error)) from error

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
            except Exception as error:  # noqa: BLE001  # raised where it is waited for
                done.set_exception(error)

        number = self._socket.fileno()
        register(number, ready)
        try:
            await done
        finally:
            unregister(number)

    def push(self, outgoing: Outgoing, patience_s: float) -> float:
        def empty() -> bool:
            outgoing.send_some(self._socket)
            return not outgoing

        return self._patiently(empty, select.POLLOUT, patience_s) if outgoing else patience_s

    def pull(self, target: memoryview, spare: memoryview, patience_s: float) -> tuple[int, float]:
        at = 0

        def fill() -> bool:
            nonlocal at
            count, _, _, _ = self._socket.recvmsg_into([target[at:], spare])
            if count == 0:
                raise ConnectionEnded("ended in the middle of a frame")
            at += count
            return at >= len(target)

        left_s = self._patiently(fill, select.POLLIN, patience_s)
        return at, left_s

    def _patiently(self, step: Callable[[], bool], event: int, patience_s: float) -> float:
        try:
            return patiently(self._socket, step, event, patience_s, self._loop.time)
        except OSError as error:
            raise ConnectionEnded(str(error)) from error

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
