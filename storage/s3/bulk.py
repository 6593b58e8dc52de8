"""Bodies in worker threads, straight between sockets and the memory where they lie; all else as in `DirectHttp`.

aiohttp copies a body two or three times, on the event loop. aiobotocore still signs, retries and maps errors.
"""

from __future__ import annotations

from functools import partial
from http.client import HTTPException
from ssl import SSLContext, SSLError
from urllib.parse import urlsplit

from aiobotocore.awsrequest import AioAWSResponse
from aiohttp.abc import AbstractResolver
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import ConnectionClosedError, ConnectTimeoutError, EndpointConnectionError, HTTPClientError
from botocore.exceptions import SSLError as BotocoreSSLError

from storage.ports import Workers
from storage.s3.client import DirectHttp, mark_redirected
from storage.s3.exchange import Exchange, head_of
from storage.s3.links import Link, Links, Origin
from storage.s3.upload import UploadBody


class BulkHttp(DirectHttp):
    """Sends bodies of uploads, and receives those of downloads, over connections of its own. Made by `bulk_http`."""

    _workers: Workers
    _links: Links
    _tls: SSLContext | None

    async def send(self, request: AWSPreparedRequest) -> AWSResponse:
        if not isinstance(request.body, UploadBody) and not request.stream_output:
            return await super().send(request)
        mark_redirected(request)
        link, exchange, document = await self._carried_out(request)
        body = Streamed(self._links, self._workers, link, exchange)
        if document is None:
            return AioAWSResponse(request.url, exchange.status, exchange.headers, body)
        body.close()
        return AioAWSResponse(request.url, exchange.status, exchange.headers, Document(document))

    async def __aexit__(self, *raised: object) -> None:
        self._links.close()
        await super().__aexit__(*raised)

    async def _carried_out(self, request: AWSPreparedRequest) -> tuple[Link, Exchange, bytes | None]:
        """A request with the head of its answer, and the rest of that if it is no download."""
        parts = urlsplit(request.url)
        try:
            head = head_of(request.method, parts, {name: _text(value) for name, value in request.headers.items()})
        except HTTPException as error:
            raise HTTPClientError(error=error) from error
        origin = Origin.of(parts, await self._trust() if parts.scheme == "https" else None)
        kept = self._links.idle(origin)
        if kept is not None:
            try:
                return await self._over(kept, request, head)
            except ConnectionClosedError as error:
                if not isinstance(error.__cause__, ConnectionError):
                    raise
                # The server had closed it, or did so before it answered: that says nothing about a new one.
        return await self._over(await self._connected(request.url, origin), request, head)

    async def _over(self, link: Link, request: AWSPreparedRequest, head: bytes) -> tuple[Link, Exchange, bytes | None]:
        exchange = Exchange(link.sock, request.method, asks="Expect" in request.headers)
        try:
            body = request.body.view if isinstance(request.body, UploadBody) else None
            work = partial(_carry_out, exchange, head, body, download=request.stream_output)
            return link, exchange, await link.step(self._workers, work)
        except BaseException as error:
            exchange.close()
            link.close()
            if isinstance(error, OSError | HTTPException):
                raise ConnectionClosedError(endpoint_url=request.url, request=request, error=error) from error
            raise

    async def _connected(self, url: str, origin: Origin) -> Link:
        try:
            return await self._links.open(origin)
        except SSLError as error:
            raise BotocoreSSLError(endpoint_url=url, error=error) from error
        except TimeoutError as error:
            raise ConnectTimeoutError(endpoint_url=url, error=error) from error
        except OSError as error:
            raise EndpointConnectionError(endpoint_url=url, error=error) from error

    async def _trust(self) -> SSLContext:
        """How certificates are judged: as `DirectHttp` judges them. Reads files once."""
        if self._tls is None:
            made: SSLContext = await self._workers.run(self._build_verify_context)
            self._tls = self._tls or made
        return self._tls


def bulk_http(workers: Workers, resolver: AbstractResolver, connect_timeout_s: float) -> type[BulkHttp]:
    """A class for one client, whose session botocore makes itself, with arguments of its own."""

    class Session(BulkHttp):
        _workers = workers
        _links = Links(resolver, workers, connect_timeout_s)
        _tls = None

    return Session


class Streamed:
    """The body of a download, still in its connection."""

    def __init__(self, links: Links, workers: Workers, link: Link, exchange: Exchange) -> None:
        self._links = links
        self._workers = workers
        self._link: Link | None = link
        self._exchange = exchange

    @property
    def content(self) -> Streamed:
        """Where aiobotocore reads from."""
        return self

    async def read(self, size: int) -> bytes:
        """The next bytes, `size` of them unless the body ends. Raises `OSError` and `HTTPException`."""
        return await self._open.step(self._workers, partial(self._exchange.read, size))

    async def read_into(self, target: memoryview) -> int:
        """Fill `target`; how many bytes there were. Raises `OSError` and `HTTPException`."""
        return await self._open.step(self._workers, partial(self._exchange.read_into, target))

    def close(self) -> None:
        """Keep the connection for the next request if the body was read to its end, else close it."""
        link, self._link = self._link, None
        if link is None:
            return
        reusable = self._exchange.reusable
        self._exchange.close()
        if reusable:
            self._links.keep(link)
        else:
            link.close()

    @property
    def _open(self) -> Link:
        assert self._link is not None, "the body was closed"
        return self._link


class Document:
    """A body that was read already."""

    def __init__(self, document: bytes) -> None:
        self._document = document

    async def read(self) -> bytes:
        """All of it."""
        return self._document


def _carry_out(exchange: Exchange, head: bytes, body: memoryview | None, *, download: bool) -> bytes | None:
    """In a worker thread: everything but the body of a download."""
    exchange.begin(head, body)
    return None if download and exchange.status < 300 else exchange.document()


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()
