"""Child processes that answer JSON lines, their end, and the CPU time of any process.

Children get a session of their own, so that a terminal's Ctrl-C reaches the bench alone, which then ends them. One
whose bench was killed sees its standard input end, and ends itself.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from kvgw.bench.plan import BenchError
from kvgw.bench.protocol import Failed

Answer = TypeVar("Answer", bound=Struct)

LINE_BYTES_MAX: Final = 4 * 1024 * 1024
END_SECONDS: Final = 10.0
"""Time to end on request before a child is killed."""
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


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
    """CPU time that a process and all its threads, ended ones too, have used. Raises `BenchError` if it is gone."""
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise BenchError(f"the CPU time of process {pid} cannot be read: {error.strerror}") from error


def parse_stat(text: str) -> float:
    """User and system time in seconds from a ``/proc/<pid>/stat`` line.

    The second field is the program's name in parentheses, which may itself hold spaces and parentheses.
    """
    _, _, rest = text.rpartition(")")
    fields = rest.split()
    if len(fields) < 13:
        raise BenchError(f"not a line of /proc/<pid>/stat: {text!r:.200}")
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
