"""A raw Redis client: RESP over a blocking socket, pipelined, values sent from and received into where they lie.

Small on purpose: it is what the bench holds the gateway's own client against, so it must not waste anything either.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Final

from kvgw.bench.plan import BenchError
from kvgw.endpoint import Endpoint, UnixEndpoint

VECTORS_MAX: Final = 1024
"""Pieces that the kernel takes in one call (IOV_MAX)."""
AHEAD_BYTES: Final = 64
"""Read-ahead behind a value: room for the next reply's header, and hardly anything to copy."""
SECONDS_MAX: Final = 60
"""A server that does not answer for so long has failed."""
_TIMEVAL: Final = struct.Struct("@ll")


class Resp:
    """A connection. Not for concurrent use. Raises `BenchError` for errors of the server and of the network."""

    def __init__(self, sock: socket.socket) -> None:
        # A limit of the kernel's: Python's own timeout would cost a poll before each call.
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(SECONDS_MAX, 0))
        self._socket = sock
        self._ahead = bytearray(AHEAD_BYTES)
        self._view = memoryview(self._ahead)
        self._start = 0
        self._end = 0

    @classmethod
    def connect(cls, endpoint: Endpoint) -> Resp:
        """Connect to a server. Raises `OSError` when none answers."""
        if isinstance(endpoint, UnixEndpoint):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(endpoint.path)
            except OSError:
                sock.close()
                raise
            return cls(sock)
        sock = socket.create_connection((endpoint.host, endpoint.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(sock)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def set_many(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """SET each key to its value, in one pipeline."""
        pieces: list[bytes | memoryview] = []
        for key, value in zip(keys, values, strict=True):
            pieces += [b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(value)), value, b"\r\n"]
        self._send(pieces)
        for _ in keys:
            self._expect(b"+OK")

    def get_many(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """MGET into buffers of exactly the values' lengths; how many keys had a value."""
        self._send([_command(b"MGET", *keys)])
        self._expect(b"*%d" % len(keys))
        return sum(self._bulk_into(target) for target in into)

    def exists(self, keys: Sequence[bytes]) -> int:
        """How many of the keys exist."""
        self._send([_command(b"EXISTS", *keys)])
        return self._integer()

    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete keys; how many there were."""
        self._send([_command(b"DEL", *keys)])
        return self._integer()

    def version(self) -> str:
        """The server's version."""
        self._send([_command(b"INFO", b"server")])
        length = self._number(b"$")
        text = bytearray(length)
        self._fill(memoryview(text))
        self._expect(b"")
        for line in text.decode(errors="replace").splitlines():
            if line.startswith("redis_version:"):
                return line.removeprefix("redis_version:")
        raise BenchError("the Redis server does not say which version it is")

    def _bulk_into(self, target: memoryview) -> bool:
        """Receive one bulk string into `target`; False if the server has none."""
        length = self._number(b"$")
        if length == -1:
            return False
        if length != len(target):
            raise BenchError(f"Redis answers with a value of {length} bytes where {len(target)} were stored")
        self._fill(target)
        self._expect(b"")
        return True

    def _integer(self) -> int:
        return self._number(b":")

    def _number(self, mark: bytes) -> int:
        line = self._line()
        try:
            if line[:1] == mark:
                return int(line[1:])
        except ValueError:
            pass  # said below, with every other line that does not belong here
        raise BenchError(f"Redis answers {line!r} where {mark!r} and a number belong")

    def _expect(self, wanted: bytes) -> None:
        line = self._line()
        if line != wanted:
            raise BenchError(f"Redis answers {line!r} where {wanted!r} belongs")

    def _line(self) -> bytes:
        """The next line, without its end."""
        while (at := self._ahead.find(b"\r\n", self._start, self._end)) < 0:
            if self._start:
                kept = self._ahead[self._start : self._end]
                self._ahead[: len(kept)] = kept
                self._start, self._end = 0, len(kept)
            if self._end == AHEAD_BYTES:
                raise BenchError(f"Redis answers a line without end: {bytes(self._ahead)!r}")
            self._end += self._receive([self._view[self._end :]])
        line = bytes(self._ahead[self._start : at])
        self._start = at + 2
        return line

    def _fill(self, target: memoryview) -> None:
        """Fill `target`, first with what was read ahead; what follows it is read ahead in the same system call."""
        at = min(len(target), self._end - self._start)
        target[:at] = self._view[self._start : self._start + at]
        self._start += at
        while at < len(target):
            self._start = self._end = 0
            at += self._receive([target[at:], self._view])
        if at > len(target):
            self._end = at - len(target)

    def _receive(self, into: Sequence[memoryview]) -> int:
        try:
            count = self._socket.recvmsg_into(into)[0]
        except OSError as error:
            raise BenchError(f"the connection to Redis failed: {error}") from error
        if count == 0:
            raise BenchError("Redis closed the connection")
        return count

    def _send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send all pieces, as many as the kernel takes in each system call."""
        at, done = 0, 0
        try:
            while at < len(pieces):
                first = memoryview(pieces[at])[done:]
                done += self._socket.sendmsg([first, *pieces[at + 1 : at + VECTORS_MAX]])
                while at < len(pieces) and done >= len(pieces[at]):
                    done -= len(pieces[at])
                    at += 1
        except OSError as error:
            raise BenchError(f"the connection to Redis failed: {error}") from error


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
