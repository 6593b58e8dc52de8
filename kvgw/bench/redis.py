"""A Redis server of our own, in memory only, for as long as the bench runs."""

from __future__ import annotations

import asyncio
import shutil
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvgw.bench.plan import BenchError, SocketName
from kvgw.bench.processes import end
from kvgw.bench.resp import Resp
from kvgw.endpoint import Endpoint, TcpEndpoint, UnixEndpoint

START_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A server that answers."""

    endpoint: Endpoint
    version: str
    pid: int


def find_redis() -> str | None:
    """Path of ``redis-server``, if it is installed."""
    return shutil.which("redis-server")


@asynccontextmanager
async def redis_server(binary: str, folder: Path, transport: SocketName) -> AsyncIterator[RedisServer]:
    """Run Redis without persistence on a socket of the given kind; leaving ends it."""
    endpoint: Endpoint = UnixEndpoint(str(folder / "redis.sock"))
    where = ["--port", "0", "--unixsocket", str(folder / "redis.sock"), "--unixsocketperm", "700"]
    if transport == "tcp":
        endpoint = TcpEndpoint("127.0.0.1", _free_port())
        where = ["--bind", endpoint.host, "--port", str(endpoint.port)]
    log = folder / "redis.log"
    process = await asyncio.create_subprocess_exec(
        binary,
        *where,
        *("--save", "", "--appendonly", "no", "--daemonize", "no", "--dir", str(folder), "--logfile", str(log)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        version = await _answering(process, endpoint, log)
        yield RedisServer(endpoint, version, process.pid)
    finally:
        await end(process)


async def _answering(process: asyncio.subprocess.Process, endpoint: Endpoint, log: Path) -> str:
    """Wait until the server answers; its version."""
    deadline = time.monotonic() + START_SECONDS
    while process.returncode is None and time.monotonic() < deadline:
        try:
            connection = Resp.connect(endpoint)
        except OSError:
            await asyncio.sleep(0.02)
            continue
        try:
            return connection.version()
        finally:
            connection.close()
    raise BenchError(
        f"redis-server did not start within {START_SECONDS:g} s (leave it out with --no-redis); "
        f"its last words were: {_last_words(log)}"
    )


def _last_words(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-500:].strip() if log.is_file() else "none"


def _free_port() -> int:
    """A port that was free a moment ago; Redis cannot choose one itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
