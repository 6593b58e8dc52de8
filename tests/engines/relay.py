"""Between an engine and its gateway: connections pass through, and something happens when a request comes by."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Relay:
    """Passes connections from a loopback port of its own to another one."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._trap: tuple[bytes, Callable[[], None]] | None = None
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def trap(self, sign: bytes, spring: Callable[[], None]) -> None:
        """Call `spring` once, before the next bytes from a client that hold `sign` are passed on."""
        self._trap = sign, spring

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                for source, sink, watched in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pump, args=(source, sink, watched), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, watched: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if watched and self._trap is not None and self._trap[0] in data:
                    spring, self._trap = self._trap[1], None
                    spring()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def relay(target: int) -> Iterator[Relay]:
    made = Relay(target)
    try:
        yield made
    finally:
        made.close()
