"""What this machine can do, with the gateway's building blocks alone: the yardstick beside every figure.

Each block works through more memory than the caches hold, in pieces as the gateway takes them.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvgw.bench.content import randomize
from kvgw.bench.plan import MIB, Limit, SocketName, TransportName, socket_of
from tenancy.sealing import SEG_LOG2_DEFAULT

RING_BYTES: Final = 64 * MIB
SEGMENT_BYTES: Final = 1 << SEG_LOG2_DEFAULT
TAG_BYTES: Final = 16
SOCKET_PIECE_BYTES: Final = 4 * MIB


class Yardstick:
    """Measures the limits, again and again, in memory taken once (about 128 MiB)."""

    def __init__(self) -> None:
        self._source = memoryview(bytearray(RING_BYTES))
        self._target = memoryview(bytearray(RING_BYTES + TAG_BYTES))
        randomize(self._source)
        randomize(self._target)
        self._sealer = AESGCM(os.urandom(32))

    def measure(self, transport: TransportName) -> dict[str, Limit]:
        """Limits by name: copy, aes_256_gcm, blake3, and sending and receiving on a loopback socket."""
        found = {
            "copy": self._timed(self._copy),
            "aes_256_gcm": self._timed(self._seal),
            "blake3": self._timed(self._hash),
        }
        kind = socket_of(transport)
        sending, receiving = self._through_socket(kind)
        return found | {f"{kind}_socket_send": sending, f"{kind}_socket_receive": receiving}

    def _timed(self, work: Callable[[int, int], None]) -> Limit:
        """Time `work` over the ring, a segment at a time."""
        wall, cpu = time.perf_counter(), time.thread_time()
        for start in range(0, RING_BYTES, SEGMENT_BYTES):
            work(start, start + SEGMENT_BYTES)
        return _limit(time.perf_counter() - wall, time.thread_time() - cpu)

    def _copy(self, start: int, end: int) -> None:
        self._target[start:end] = self._source[start:end]

    def _seal(self, start: int, end: int) -> None:
        nonce = start.to_bytes(12, "big")
        self._sealer.encrypt_into(nonce, self._source[start:end], None, self._target[start : end + TAG_BYTES])

    def _hash(self, start: int, end: int) -> None:
        blake3(self._source[start:end]).digest()

    def _through_socket(self, kind: SocketName) -> tuple[Limit, Limit]:
        """Move the ring from one thread to another; the sender's and the receiver's figures."""
        sender, receiver = _socket_pair(kind)
        cpu_sending: list[float] = []

        def send() -> None:
            cpu = time.thread_time()
            for start in range(0, RING_BYTES, SOCKET_PIECE_BYTES):
                sender.sendall(self._source[start : start + SOCKET_PIECE_BYTES])
            cpu_sending.append(time.thread_time() - cpu)

        with sender, receiver:
            thread = threading.Thread(target=send)
            wall, cpu = time.perf_counter(), time.thread_time()
            thread.start()
            at = 0
            while at < RING_BYTES:
                at += receiver.recv_into(self._target[at:RING_BYTES])
            seconds, cpu_receiving = time.perf_counter() - wall, time.thread_time() - cpu
            thread.join()
        return _limit(seconds, cpu_sending[0]), _limit(seconds, cpu_receiving)


def _limit(seconds: float, cpu_s: float) -> Limit:
    return Limit(RING_BYTES / 1e9 / seconds, RING_BYTES / 1e9 / cpu_s)


def _socket_pair(kind: SocketName) -> tuple[socket.socket, socket.socket]:
    if kind == "unix":
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
        return sender, receiver
