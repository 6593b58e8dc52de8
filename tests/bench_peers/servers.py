"""Processes of a run: peers' servers, and clients in a peer's environment. Leaving ends them.

Each has a session of its own, so that a terminal's Ctrl-C reaches the run alone, which then ends them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from kvgw.bench.plan import BenchError
from kvgw.bench.processes import LINE_BYTES_MAX, Child, end
from tests.bench_peers.environments import ROOT

START_SECONDS: Final = 60.0
QUIET: Final = {
    "GLOG_minloglevel": "2",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
}
"""Libraries of the peers that would write much, or tell their makers."""


@asynccontextmanager
async def server(
    name: str, command: Sequence[str], variables: Mapping[str, str], log: Path, answers: Callable[[], object]
) -> AsyncIterator[int]:
    """Run a server until this is left; its process id once `answers` does not raise `OSError`. Raises `BenchError`."""
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=log.parent,
            env=os.environ | QUIET | variables,
            start_new_session=True,
        )
    try:
        await _until_it_answers(name, process, log, answers)
        yield process.pid
    finally:
        await end(process)


async def _until_it_answers(
    name: str, process: asyncio.subprocess.Process, log: Path, answers: Callable[[], object]
) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_SECONDS
    while process.returncode is None and loop.time() < deadline:
        try:
            answers()
        except OSError:
            await asyncio.sleep(0.05)
        else:
            return
    raise BenchError(f"{name} did not start within {START_SECONDS:g} s; it said: {last_words(log)}")


def last_words(log: Path) -> str:
    """The end of a log, on one line."""
    return " ".join(log.read_text(errors="replace")[-200:].split()) if log.is_file() else "nothing"


@asynccontextmanager
async def client(
    name: str,
    module: str,
    *arguments: str,
    log: Path,
    python: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> AsyncIterator[Child]:
    """Run a module that answers JSON lines, as `kvgw.bench.processes.child` does, in any environment."""
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            str(python or sys.executable),
            "-m",
            module,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=out,
            cwd=ROOT,
            env=os.environ | QUIET | (variables or {}),
            start_new_session=True,
            limit=LINE_BYTES_MAX,
        )
    try:
        yield Child(name, process)
    finally:
        await end(process)


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tcp_answers(port: int) -> Callable[[], object]:
    """Raises `OSError` until something accepts connections at a port of 127.0.0.1."""
    return lambda: socket.create_connection(("127.0.0.1", port), timeout=2).close()


def unix_answers(path: Path) -> Callable[[], object]:
    """The same for a Unix socket."""

    def connect() -> None:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))

    return connect
