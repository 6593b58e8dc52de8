"""An S3 server that misbehaves on demand. For faults only: what is right is tested against the real server.

    async with FakeS3() as server:
        server.faults.append(reply(503, error("SlowDown")))
        ...
        server.requests[0].headers["authorization"]

It stores what is put and gives it back. Each request takes the next of `faults` first: the bytes to answer with, after
which the connection is closed, or none to behave for one request.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass
from typing import Self

HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


def reply(status: int, body: bytes = b"", *, length: int | None = -1, **headers: str) -> bytes:
    """An answer. `length` is what Content-Length says: -1 the truth, none for no such header."""
    lines = [f"HTTP/1.1 {status} Whatever", "Connection: close"]
    if length is not None:
        lines.append(f"Content-Length: {len(body) if length == -1 else length}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + HEAD_END + body


def error(code: str, **details: str) -> bytes:
    """The document of an S3 error."""
    inner = "".join(f"<{name}>{value}</{name}>" for name, value in {"Code": code, "Message": "m", **details}.items())
    return f'<?xml version="1.0" encoding="UTF-8"?><Error>{inner}</Error>'.encode()


class FakeS3:
    """The server, on a free port of 127.0.0.1 while its context lasts."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.faults: deque[bytes | None] = deque()
        self.requests: list[Request] = []
        self.objects: dict[str, bytes] = {}
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in list(self._open):
            writer.close()
        await self._server.wait_closed()

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def endpoint(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away, as clients of a misbehaving server do
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; whether the connection stays open."""
        head = (await reader.readuntil(HEAD_END)).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue" + HEAD_END)
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        request = Request(method, target, headers, body)
        self.requests.append(request)
        fault = self.faults.popleft() if self.faults else None
        if fault is not None and method == "HEAD":
            fault = fault.partition(HEAD_END)[0] + HEAD_END
        writer.write(fault if fault is not None else self._behave(request))
        await writer.drain()
        return fault is None

    def _behave(self, request: Request) -> bytes:
        path = request.target.partition("?")[0]
        if request.method == "PUT":
            self.objects[path] = request.body
            return b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 0' + HEAD_END
        found = self.objects.get(path)
        if found is None:
            document = b"" if request.method == "HEAD" else error("NoSuchKey")
            return f"HTTP/1.1 404 No\r\nContent-Length: {len(document)}".encode() + HEAD_END + document
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: {len(found)}".encode()
        return head + HEAD_END + (b"" if request.method == "HEAD" else found)
