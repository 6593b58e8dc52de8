"""HTTP over a blocking socket, for a worker thread: bodies are sent from where they lie, and read into place.

The heads of answers are parsed by the standard library.
"""

from __future__ import annotations

import re
import socket
from http.client import HTTPException, HTTPResponse, IncompleteRead
from typing import Final
from urllib.parse import SplitResult

DOCUMENT_BYTES_MAX: Final = 1024 * 1024
_CONTINUE: Final = re.compile(rb"HTTP/1\.[01] 100\b")
_CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f]")
_PORTS: Final = {"http": 80, "https": 443}


def head_of(method: str, url: SplitResult, headers: dict[str, str]) -> bytes:
    """The head of a request. Raises `HTTPException` for a header that would break out of its line."""
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    lines = [f"{method} {target} HTTP/1.1", f"Host: {_host_of(url)}", "Accept-Encoding: identity"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if any(_CONTROLS.search(line) for line in lines):
        raise HTTPException("a header of the request has a control character in it")
    return "\r\n".join([*lines, "", ""]).encode()


def _host_of(url: SplitResult) -> str:
    """Host and port as they are signed: in small letters, and no port where it is the scheme's own."""
    host = url.hostname or ""
    if ":" in host:
        host = f"[{host}]"
    return host if url.port in (None, _PORTS.get(url.scheme)) else f"{host}:{url.port}"


class Exchange:
    """One request and its answer. The methods block, and end early when the socket is shut.

    They raise `OSError` and `HTTPException`.
    """

    def __init__(self, sock: socket.socket, method: str, *, asks: bool) -> None:
        """`asks`: whether the request's head has ``Expect: 100-continue``."""
        self._sock = sock
        self._asks = asks
        self._answer = HTTPResponse(sock, method=method)
        self._whole = True
        """Whether the body of the request was sent: without it, the connection is of no more use."""

    @property
    def status(self) -> int:
        return self._answer.status

    @property
    def headers(self) -> dict[str, str]:
        """The answer's, by names in small letters."""
        return {name.lower(): value for name, value in self._answer.getheaders()}

    @property
    def reusable(self) -> bool:
        """Whether another request may follow on the connection."""
        return self._whole and self._answer.isclosed() and not self._answer.will_close

    def begin(self, head: bytes, body: memoryview | None) -> None:
        """Send a request, and read the head of its answer.

        If the head asks, a `body` goes out once the server wants it, and not if it answers something else.
        """
        self._sock.sendall(head)
        if body is not None:
            self._whole = self._wanted() and self._sent(body)
        self._answer.begin()  # it passes over a 100
        declared = self._answer.getheader("content-length")
        if declared is not None and self._answer.length is None and not self._answer.chunked:
            raise HTTPException(f"the answer says that its length is {declared!r}")

    def document(self) -> bytes:
        """The body of the answer, if it is short: what refusals and confirmations have."""
        pieces = [b""]
        room = DOCUMENT_BYTES_MAX
        while not self._answer.isclosed() and (piece := self._answer.read(room)):
            pieces.append(piece)
            room -= len(piece)
            if room == 0:
                raise HTTPException(f"the answer is a document of {DOCUMENT_BYTES_MAX} bytes or more")
        if self._answer.length:
            raise IncompleteRead(b"", self._answer.length)
        return b"".join(pieces)

    def read(self, size: int) -> bytes:
        """The next bytes of the answer's body, `size` of them unless it ends."""
        return self._answer.read(size)

    def read_into(self, target: memoryview) -> int:
        """Fill `target` with the answer's body; how many bytes there were."""
        at = 0
        while at < len(target) and (count := self._answer.readinto(target[at:])):
            at += count
        return at

    def close(self) -> None:
        """Let go of the socket, which otherwise stays open when it is closed. No thread may be using it."""
        self._answer.close()

    def _wanted(self) -> bool:
        return not self._asks or _CONTINUE.match(self._answer.fp.peek(1)) is not None

    def _sent(self, body: memoryview) -> bool:
        try:
            self._sock.sendall(body)
        except OSError:
            return False  # the server hung up; it may have said why, and if not, reading its answer fails
        return True
