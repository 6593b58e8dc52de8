"""The embedded gateway: a gateway inside this process, for one process only.

    async with kvgw.embedded.open(folder) as client: ...

The caller is the data folder's owner, tenant ``default``. Engines are several processes: they use an endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

from kvgw import wire
from kvgw.client import Client, ClientOptions
from kvgw.errors import KvgwError, Outage
from kvgw.gateway.core import Gateway
from kvgw.gateway.payloads import Chunk
from kvgw.model import GetReply, GetRequest, PutReply, PutRequest, Question
from kvgw.settings import Settings
from kvgw.wiring import World, opened
from tenancy.access import Caller

Answer = TypeVar("Answer")
Sent = TypeVar("Sent", PutRequest, GetRequest, Question)


class EmbeddedTransport:
    """Carries a client's requests to a gateway in the same event loop."""

    def __init__(self, gateway: Gateway, caller: Caller) -> None:
        self._gateway = gateway
        self._caller = caller
        self._process = os.getpid()
        self._closed = False

    async def ask(self, request: Question, answer: type[Answer]) -> Answer:
        checked = self._checked(request)
        with _answers():
            reply = await self._gateway.answer(self._caller, checked)
        assert isinstance(reply, answer)
        return reply

    async def put(self, request: PutRequest, payloads: Sequence[memoryview]) -> PutReply:
        checked = self._checked(request)
        with _answers():
            return await self._gateway.put(self._caller, checked, _Source(payloads))

    async def get(self, request: GetRequest, into: Sequence[memoryview]) -> GetReply:
        checked = self._checked(request)
        with _answers():
            return await self._gateway.get(self._caller, checked, _Sink(into))

    async def lend(self, nbytes: int) -> None:
        return  # chunks go straight to and from any memory of this process

    async def aclose(self) -> None:
        self._closed = True

    def _checked(self, request: Sent) -> Sent:
        """The request as a socket would have brought it: within the same bounds, or refused with the same sentence."""
        if self._closed:
            raise Outage("the client is closed")
        if self._process != os.getpid():
            raise Outage("an embedded gateway belongs to the process that opened it; a forked child needs an endpoint")
        received = wire.decode_request(wire.encode(request))
        assert isinstance(received, type(request))
        return received


@contextmanager
def _answers() -> Iterator[None]:
    """What the gateway raises is its answer."""
    try:
        yield
    except KvgwError as error:
        error.answered = True
        raise


class _Source:
    """The caller's own buffers."""

    def __init__(self, payloads: Sequence[memoryview]) -> None:
        self._payloads = payloads
        self._wanted: Sequence[int] = ()
        self.incoming = None

    async def wanted(self, indices: Sequence[int]) -> None:
        self._wanted = indices

    async def shared(self, most: int, nbytes: int) -> Sequence[memoryview]:
        indices, self._wanted = self._wanted[:most], self._wanted[most:]
        return [self._payloads[index] for index in indices]

    async def receive(self, chunks: Sequence[Chunk]) -> None:
        raise AssertionError("all chunks were shared")

    def check(self) -> None:
        return  # a caller that gives up gets its buffers back when no thread reads them any more


class _Sink:
    """The caller's own buffers."""

    pushes = True

    def __init__(self, into: Sequence[memoryview]) -> None:
        self._into = into

    def places(self, count: int, nbytes: int) -> Sequence[memoryview]:
        return self._into

    def delivery(self, chunks: Sequence[Chunk]) -> _Delivered:
        return _Delivered()


class _Delivered:
    """Chunks that were opened where the caller wants them."""

    def push(self) -> bool:
        return True

    async def finish(self) -> None:
        return


@asynccontextmanager
async def open(  # noqa: A001  # reads as kvgw.embedded.open
    folder: Path | str,
    *,
    settings: Settings | None = None,
    options: ClientOptions | None = None,
    world: World | None = None,
) -> AsyncIterator[Client]:
    """A client of a gateway that runs in this process on the data folder `folder`."""
    data = Path(os.path.abspath(folder))  # noqa: ASYNC240  # looks at no file
    async with opened(settings or Settings(), data, world=world) as gateway:
        crew = asyncio.create_task(gateway.crew.run())
        client = Client(EmbeddedTransport(gateway.gateway, gateway.authenticator.owner()), options)
        try:
            yield client
        finally:
            await client.aclose()
            crew.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await crew
