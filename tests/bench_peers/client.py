"""A peer's client process: ``python -m tests.bench_peers.client`` reads commands (`protocol`), and answers each.

It runs in the peer's environment. What a library writes to standard output goes to standard error: answers are alone
there.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from msgspec import Struct

from kvgw.bench.content import SAMPLE, Content
from kvgw.bench.plan import MATCH_CALLS, BenchError, Op
from kvgw.bench.protocol import Check, Done, Failed, Measured, Prepare
from kvgw.errors import KvgwError
from tests.bench_peers.peers import Buffer, PeerSubject, subject_of
from tests.bench_peers.protocol import ForgetPeer, MeasurePeer, OpenPeer, PeerCommand


class PeerClient:
    """Carries out commands, one at a time."""

    def __init__(self) -> None:
        self._subject: PeerSubject | None = None
        self._content = Content(memoryview(bytearray()), memoryview(bytearray()))
        self._read: Sequence[Buffer] = ()

    async def answer(self, command: PeerCommand) -> Struct:
        """Raises `BenchError` when the command cannot be carried out."""
        if isinstance(command, OpenPeer):
            memory = [memoryview(bytearray(nbytes)) for nbytes in (command.stored_bytes, command.call_bytes)]
            self._content = Content(*memory)
            self._subject = await subject_of(command.subject, command.where, memory)
            return Done()
        subject = self._opened
        match command:
            case Prepare():
                self._content.renew(command.chunk_bytes, command.batch, command.calls)
            case MeasurePeer():
                return await self._measure(command.op)
            case Check():
                self._check()
            case ForgetPeer():
                self._read = ()
                for keys in self._content.keys:
                    await subject.delete(keys)
        return Done()

    @property
    def _opened(self) -> PeerSubject:
        if self._subject is None:
            raise BenchError("open comes first")
        return self._subject

    async def _measure(self, op: Op) -> Measured:
        subject, content = self._opened, self._content

        async def get(index: int) -> None:
            self._read = await subject.get(content.keys[index], content.into)

        def call(index: int) -> Callable[[], Awaitable[None]]:
            if op == "put":
                return lambda: subject.put(content.keys[index], content.chunks[index])
            return lambda: get(index)

        calls = [call(index) for index in range(len(content.keys))]
        if op == "match64":
            calls = [lambda: subject.match(content.keys[0])] * MATCH_CALLS
        durations = []
        started = time.monotonic()
        for one in calls:
            before = time.perf_counter()
            await one()
            durations.append((time.perf_counter() - before) * 1e6)
        return Measured(started, time.monotonic(), durations)

    def _check(self) -> None:
        """Compare some of what the last GET read, wherever the peer's client left it. Raises `BenchError`."""
        wanted = self._content.chunks[-1]
        for index in range(0, len(wanted), max(1, len(wanted) // SAMPLE)):
            if bytes(wanted[index]) != bytes(self._read[index]):
                raise BenchError(f"chunk {index} of {len(wanted)} was read with other bytes than were stored")


def main() -> None:
    """Entry point of the process: ends with its standard input."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    client = PeerClient()
    commands: msgspec.json.Decoder[PeerCommand] = msgspec.json.Decoder(PeerCommand)
    with asyncio.Runner() as runner:
        for line in sys.stdin.buffer:
            try:
                answer = runner.run(client.answer(commands.decode(line)))
            except KvgwError as error:
                answer = Failed(str(error))
            except Exception as error:  # a peer's library may raise anything: its row is absent, with this reason
                answer = Failed(f"{type(error).__name__}: {error}")
            answers.write(msgspec.json.encode(answer) + b"\n")
            answers.flush()


if __name__ == "__main__":
    main()
