"""A client process: ``python -m kvgw.bench.worker`` reads commands from standard input and answers each (`protocol`).

Starting, connecting and preparing are commands of their own, so that a measurement is nothing but the calls.
"""

from __future__ import annotations

import asyncio
import mmap
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TypeAlias

import msgspec
from msgspec import Struct

from kvgw.bench.content import Content
from kvgw.bench.limits import Yardstick
from kvgw.bench.plan import MATCH_CALLS, BenchError, SystemName
from kvgw.bench.protocol import (
    Check,
    Command,
    Done,
    Failed,
    Forget,
    MachineLimits,
    Measure,
    Measured,
    MeasureLimits,
    Open,
    Prepare,
)
from kvgw.bench.resp import Resp
from kvgw.bench.subjects import KvgwSubject, RedisSubject, Subject
from kvgw.client import Client, ClientOptions, connect
from kvgw.endpoint import parse_endpoint
from kvgw.errors import KvgwError

Call: TypeAlias = Callable[[], Awaitable[None]]


class Worker:
    """Carries out commands, one at a time."""

    def __init__(self) -> None:
        self._subjects: dict[SystemName, Subject] = {}
        self._content = Content(memoryview(bytearray()), memoryview(bytearray()))
        self._yardstick: Yardstick | None = None
        self._stack = AsyncExitStack()

    async def answer(self, command: Command) -> Struct:
        """Raises `KvgwError` when the command cannot be carried out."""
        match command:
            case Open():
                await self._open(command)
            case Prepare():
                self._content.renew(command.chunk_bytes, command.batch, command.calls)
                for subject in self._subjects.values():
                    await subject.prepare(command.chunk_bytes)
            case Measure():
                return await self._measure(command)
            case Check():
                self._content.check()
            case Forget():
                for keys in self._content.keys:
                    await self._subjects[command.system].delete(keys)
            case MeasureLimits():
                self._yardstick = self._yardstick or Yardstick()
                return MachineLimits(self._yardstick.measure(command.transport))
        return Done()

    async def _open(self, command: Open) -> None:
        options = ClientOptions(namespace=command.namespace, shared_memory=command.shared_memory)
        client = connect(command.endpoint, token=command.token, options=options)
        self._subjects["kvgw"] = KvgwSubject(client, command.durability)
        sizes = command.stored_bytes, command.call_bytes
        if command.redis:
            self._subjects["redis"] = RedisSubject(_connect_redis(command.redis))
        if command.shared_memory:
            memory = [await self._window(client, nbytes) for nbytes in sizes]
        else:
            memory = [memoryview(bytearray(nbytes)) for nbytes in sizes]
        self._content = Content(*memory)

    async def _window(self, client: Client, nbytes: int) -> memoryview:
        """Memory shared with the gateway until this process ends."""
        view = await self._stack.enter_async_context(client.window(nbytes))
        if not isinstance(view.obj, mmap.mmap):
            raise BenchError(
                f"the gateway lends no window of {nbytes} bytes: raise its shared_memory settings, or lower "
                "--round-bytes"
            )
        return view

    async def _measure(self, command: Measure) -> Measured:
        calls = self._calls(command)
        durations: list[float] = []
        started = time.monotonic()
        for call in calls:
            before = time.perf_counter()
            await call()
            durations.append((time.perf_counter() - before) * 1e6)
        return Measured(started, time.monotonic(), durations)

    def _calls(self, command: Measure) -> list[Call]:
        """The calls to be timed; whatever can be had ready before is."""
        subject, content = self._subjects[command.system], self._content

        def put(index: int) -> Call:
            return lambda: subject.put(content.keys[index], content.chunks[index])

        def get(index: int) -> Call:
            return lambda: subject.get(content.keys[index], content.into)

        if command.op == "match64":
            return [lambda: subject.match(content.keys[0])] * MATCH_CALLS
        return [(put if command.op == "put" else get)(index) for index in range(len(content.keys))]


def _connect_redis(endpoint: str) -> Resp:
    try:
        return Resp.connect(parse_endpoint(endpoint))
    except OSError as error:
        raise BenchError(f"no Redis answers at {endpoint}: {error.strerror or error}") from error


def main() -> None:
    """Entry point of the process: ends with its standard input."""
    worker = Worker()
    commands: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
    with asyncio.Runner() as runner:
        for line in sys.stdin.buffer:
            try:
                answer = runner.run(worker.answer(commands.decode(line)))
            except KvgwError as error:
                answer = Failed(str(error))
            sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
