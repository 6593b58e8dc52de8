"""Child processes that answer JSON lines, their end, and the CPU time of any process.

Children get a session of their own, so that a terminal's Ctrl-C reaches the bench alone, which then ends them. One
whose bench was killed sees its standard input end, and ends itself.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from kvgw.bench.plan import BenchError
from kvgw.bench.protocol import Failed

Answer = TypeVar("Answer", bound=Struct)

LINE_BYTES_MAX: Final = 4 * 1024 * 1024
END_SECONDS: Final = 10.0
"""Time to end on request before a child is killed."""
_CPUCLOCK_SCHED: Final = 2


class Child:
    """A process that answers JSON lines on its standard input and output."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.name = name
        self.pid = process.pid
        self._process = process
        self._input = process.stdin
        self._output = process.stdout

    def tell(self, message: Struct) -> None:
        """Send a line; a child that is gone is noticed when its answer is awaited."""
        self._input.write(msgspec.json.encode(message) + b"\n")

    async def hear(self, kind: type[Answer], limit_s: float) -> Answer:
        """The next answer. Raises `BenchError` when there is none in time, or the child says that it failed."""
        try:
            async with asyncio.timeout(limit_s):
                line = await self._output.readline()
        except TimeoutError:
            raise BenchError(f"the {self.name} (process {self.pid}) did not answer within {limit_s:g} s") from None
        if not line:
            code = await self._process.wait()
            raise BenchError(f"the {self.name} (process {self.pid}) ended with exit code {code}; it said why above")
        answer: Answer | Failed = msgspec.json.decode(line, type=kind | Failed)
        if isinstance(answer, Failed):
            raise BenchError(f"the {self.name} failed: {answer.message}")
        return answer


@asynccontextmanager
async def child(name: str, module: str) -> AsyncIterator[Child]:
    """Run ``python -m module``; leaving ends it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        limit=LINE_BYTES_MAX,
    )
    try:
        yield Child(name, process)
    finally:
        await end(process)


async def end(process: asyncio.subprocess.Process) -> None:
    """End a process: asked first, killed if it does not. Returns when it is gone."""
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def cpu_seconds(pid: int) -> float:
    """CPU time that a process and all its threads, ended ones too, have used. Raises `BenchError` if it is gone.

    From the kernel's CPU clock of the process, in nanoseconds: the ticks of ``/proc/<pid>/stat`` are 10 ms long, which
    is more than a short measurement takes.
    """
    try:
        return time.clock_gettime(_cpu_clock(pid))
    except OSError as error:
        raise BenchError(f"the CPU time of process {pid} cannot be read: {error.strerror}; is it gone?") from error


def _cpu_clock(pid: int) -> int:
    """The clock's number, as clock_getcpuclockid(3) makes it: the process id inverted, before the clock's kind."""
    return ~pid << 3 | _CPUCLOCK_SCHED
