"""The network between clients and gateways: frames take time, connections break, and clients give up in the middle."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from kvgw import wire
from kvgw.errors import Code, KvgwError, Outage
from kvgw.gateway.payloads import Chunk
from kvgw.model import GetReply, GetRequest, PutReply, PutRequest, Question
from kvgw.wiring import Opened
from tenancy.access import Caller
from tests.simulation.world import Node, Process, World

Answer = TypeVar("Answer")
Asked = TypeVar("Asked", PutRequest, GetRequest, Question)

GRACE_S: Final = 0.1
"""As `server.limits.grace_s`: a request ends at its deadline plus this."""
HANDLER_S: Final = 90.0
"""And its handler so long after that at the latest: what it has begun, it brings to its end."""

Serve = Callable[[Opened, "_Exchange"], Awaitable[Any]]


class ConnectionEnded(Exception):
    """The client is gone."""


class SimTransport:
    """A client's way to one node. Satisfies `kvgw.transport.Transport`."""

    def __init__(self, world: World, node: Node, caller: Callable[[Opened], Caller], *, shares: bool) -> None:
        """`shares`: payloads lie in memory that the gateway reads, and writes, where it is."""
        self._world, self._node, self._caller, self._shares = world, node, caller, shares

    async def ask(self, request: Question, answer: type[Answer]) -> Answer:
        checked = _received(request)

        async def serve(opened: Opened, _: _Exchange) -> Any:
            return await opened.gateway.answer(self._caller(opened), checked)

        reply = await self._exchange(request, serve, [])
        assert isinstance(reply, answer)
        return reply

    async def put(self, request: PutRequest, payloads: Sequence[memoryview]) -> PutReply:
        checked = _received(request)

        async def serve(opened: Opened, exchange: _Exchange) -> Any:
            return await opened.gateway.put(self._caller(opened), checked, exchange)

        reply: PutReply = await self._exchange(request, serve, payloads)
        return reply

    async def get(self, request: GetRequest, into: Sequence[memoryview]) -> GetReply:
        checked = _received(request)

        async def serve(opened: Opened, exchange: _Exchange) -> Any:
            return await opened.gateway.get(self._caller(opened), checked, exchange)

        reply: GetReply = await self._exchange(request, serve, into)
        return reply

    async def lend(self, nbytes: int) -> None:
        return

    async def aclose(self) -> None: ...

    async def _exchange(self, request: Any, serve: Serve, memory: Sequence[memoryview]) -> Any:
        """Send a request to whatever runs on the node now, and wait for its answer or for the end of the connection."""
        world = self._world
        await asyncio.sleep(world.delay())
        process = self._node.process
        if process is None or process.dead or process.opened is None or "clients" in self._node.cut:
            raise Outage("nobody listens there")
        exchange = _Exchange(world, process, memory, shares=self._shares)
        process.calls[exchange.answer] = None
        world.spawn(process, _handle(world, process, exchange, serve, request.deadline_ms / 1000))
        try:
            reply = await exchange.answer
        except ConnectionResetError as error:
            raise Outage(str(error)) from error
        finally:
            process.calls.pop(exchange.answer, None)
            exchange.hang_up()
        for index, data in exchange.received.items():
            memory[index][:] = data
        return reply


class _Exchange:
    """One request: the source of a PUT and the sink of a GET, with the client at the other end."""

    def __init__(self, world: World, process: Process, memory: Sequence[memoryview], *, shares: bool) -> None:
        self.answer: asyncio.Future[Any] = world.loop.create_future()
        self.received: dict[int, bytes] = {}
        self.pushes = not shares and bool(world.rng.getrandbits(1))
        self.handler: asyncio.Task[Any] | None = None
        self._world, self._process, self._memory, self._shares = world, process, memory, shares
        self._wanted: Sequence[int] = ()
        self._gone = False
        self.incoming = None

    def hang_up(self) -> None:
        """In the client: it has its answer, or has given up. The gateway notices a moment later."""
        self._gone = True
        if self.handler is not None and not self.handler.done():
            self._world.loop.call_later(self._world.delay(), self._cancel)

    def _cancel(self) -> None:
        if self.handler is not None and not self._process.dead:
            self.handler.cancel()

    async def travel(self) -> None:
        """Let something go over the connection. Raises when that has ended."""
        await asyncio.sleep(self._world.delay())
        if self._gone or not self._world.reaches(self._process.node, "clients"):
            raise ConnectionEnded

    async def wanted(self, indices: Sequence[int]) -> None:
        self._wanted = indices
        await self.travel()

    async def shared(self, most: int, nbytes: int) -> Sequence[memoryview]:
        if not self._shares:
            return ()
        await self.travel()
        indices, self._wanted = self._wanted[:most], self._wanted[most:]
        return [self._memory[index] for index in indices]

    async def receive(self, chunks: Sequence[Chunk]) -> None:
        for index, target in chunks:
            half = len(target) // 2
            await self.travel()
            target[:half] = self._memory[index][:half]
            await self.travel()
            target[half:] = self._memory[index][half:]

    def check(self) -> None:
        if self._gone:
            raise ConnectionEnded

    def places(self, count: int, nbytes: int) -> Sequence[memoryview]:
        return self._memory if self._shares else ()

    def delivery(self, chunks: Sequence[Chunk]) -> _Delivery:
        return _Delivery(self, [] if self._shares else list(chunks))

    def pushed(self) -> bool:
        """Whether the client's connection takes everything at once."""
        return not self._gone and bool(self._world.rng.getrandbits(1))


class _Delivery:
    """Chunks on their way to a client."""

    def __init__(self, exchange: _Exchange, chunks: list[Chunk]) -> None:
        self._exchange, self._chunks = exchange, chunks

    def push(self) -> bool:
        if self._exchange.pushed():
            for index, payload in self._chunks:
                self._exchange.received[index] = bytes(payload)
            self._chunks.clear()
        return not self._chunks

    async def finish(self) -> None:
        while self._chunks:
            index, payload = self._chunks.pop(0)
            half = len(payload) // 2
            first = bytes(payload[:half])
            await self._exchange.travel()
            self._exchange.received[index] = first + bytes(payload[half:])


async def _handle(world: World, process: Process, exchange: _Exchange, serve: Serve, deadline_s: float) -> None:
    """In the gateway's process: what its server does with one request."""
    task = asyncio.current_task()
    assert task is not None
    exchange.handler = task
    process.handlers[task] = None  # type: ignore[index]
    began = world.loop.now_s
    try:
        async with asyncio.timeout(deadline_s + GRACE_S):
            if process.opened is None:  # it is just ending
                raise ConnectionEnded
            reply, error = await serve(process.opened, exchange), None
    except TimeoutError:
        reply, error = None, Outage("the request's deadline is over", Code.DEADLINE)
    except KvgwError as raised:
        raised.answered = True
        reply, error = None, raised
    except (ConnectionEnded, asyncio.CancelledError):
        return
    except Exception as raised:
        world.breach(f"unforeseen: a request failed: {''.join(traceback.format_exception(raised))[-2500:]}")
        return
    finally:
        del process.handlers[task]  # type: ignore[arg-type]
        took = world.loop.now_s - began
        if took > deadline_s + HANDLER_S and not world.mix.fired["freeze"]:
            world.breach(f"law 9: a handler ended {took - deadline_s:.1f} s after its deadline")
    world.loop.run_outside(world.delay(), _answer, world, process, exchange.answer, reply, error)


def _answer(world: World, process: Process, answer: asyncio.Future[Any], reply: Any, error: Exception | None) -> None:
    if answer.done() or not world.reaches(process.node, "clients"):
        return
    if error is None:
        answer.set_result(reply)
    else:
        answer.set_exception(error)


def _received(request: Asked) -> Asked:
    """As a socket would have brought it."""
    received = wire.decode_request(wire.encode(request))
    assert isinstance(received, type(request))
    return received
