"""The gateway under measurement: one of our own in a process of its own, or one that runs already.

``python -m kvgw.bench.gateway`` is that process: it reads one `GatewayOrder`, serves like ``kvgw serve``, and ends at
SIGTERM or when its standard input does.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from kvgw.bench.plan import MIB, BenchError, Case, Options, TransportName
from kvgw.bench.processes import child
from kvgw.bench.protocol import Failed
from kvgw.endpoint import Endpoint, TcpEndpoint, UnixEndpoint, parse_endpoint
from kvgw.errors import KvgwError
from kvgw.server.process import run, settle, stop_signals
from kvgw.server.serve import serving
from kvgw.settings import DefaultSettings, ServerSettings, Settings, SharedMemorySettings, StagingSettings
from storage.errors import StorageError
from tenancy.errors import TenancyError

START_SECONDS: Final = 60.0
STAGING_SPARE_BYTES: Final = 256 * MIB
STAGING_ROUNDS: Final = 8
"""Staging has room for so many rounds, as a server's has: write-back does not begin while there is that much."""
_PEER_CREDENTIALS: Final = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class GatewayUnderTest:
    """Where it answers. `pid` is None when its process is not known: behind TCP, or in another PID namespace."""

    endpoint: Endpoint
    token: str | None
    pid: int | None


class GatewayOrder(Struct, frozen=True):
    """What the gateway's process is told."""

    settings: Settings
    folder: str
    transport: TransportName


class GatewayAnnounced(Struct, frozen=True, tag_field="is", tag="gateway"):
    """What it answers once it serves."""

    endpoint: str
    token: str | None


@asynccontextmanager
async def gateway_under_test(options: Options, folder: Path) -> AsyncIterator[GatewayUnderTest]:
    """The running gateway that the options name, or one of our own on `folder` until this is left."""
    if options.endpoint is not None:
        where = parse_endpoint(options.endpoint)
        pid = peer_pid(where.path) if isinstance(where, UnixEndpoint) else None
        yield GatewayUnderTest(where, options.token, pid)
        return
    settings = _settings(options)
    _check_memory(settings.staging.bytes + settings.shared_memory.bytes)
    async with child("gateway", "kvgw.bench.gateway") as process:
        process.tell(GatewayOrder(settings, str(folder), options.transport))
        announced = await process.hear(GatewayAnnounced, START_SECONDS)
        yield GatewayUnderTest(parse_endpoint(announced.endpoint), announced.token, process.pid)


def _settings(options: Options) -> Settings:
    """Staging for several rounds, where there is memory; every client's round stays resident, dirty or not, anyway.

    The gateway keeps a quarter of staging for windows, and a quarter of the rest from dirty residents.
    """
    stored = options.clients * max(case.stored_bytes for case in options.cases())
    roomy = min(STAGING_ROUNDS * stored, _available_bytes() // 4)
    staging = (max(2 * stored, roomy) + STAGING_SPARE_BYTES) // (2 * MIB) * (2 * MIB)
    return Settings(
        server=ServerSettings(http="", listen="127.0.0.1:0" if options.transport == "tcp" else ""),
        staging=StagingSettings(bytes=staging, tenants=1),
        shared_memory=shared_memory(options.transport, options.cases(), options.clients),
        defaults=DefaultSettings(durability="staged"),
    )


def shared_memory(transport: TransportName, cases: Sequence[Case], clients: int) -> SharedMemorySettings:
    """Windows in which every client has its round and its buffers; none over other transports."""
    if transport != "shm":
        return SharedMemorySettings(bytes=0)
    stored, read = max(case.stored_bytes for case in cases), max(case.call_bytes for case in cases)
    total = clients * (stored + read + 2 * MIB)
    return SharedMemorySettings(bytes=total, tenant_bytes=total, connection_bytes=stored + MIB)


def _check_memory(nbytes: int) -> None:
    available = _available_bytes()
    if nbytes > available // 2:
        raise BenchError(
            f"the gateway would need {nbytes // MIB} MiB of staging and shared memory, more than half of the "
            f"{available // MIB} MiB that are available; lower --clients, --batch or --round-bytes"
        )


def _available_bytes() -> int:
    """What the system says that it can give without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def peer_pid(path: str) -> int | None:
    """The process that listens on a Unix socket, None if it cannot be seen from here. Raises `BenchError`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            raise BenchError(f"no gateway answers at unix:{path}: {error.strerror or error}") from error
        raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        pid: int = _PEER_CREDENTIALS.unpack(raw)[0]
        return pid or None


async def _serve(order: GatewayOrder) -> None:
    async with serving(order.settings, Path(order.folder)) as started:
        kind = TcpEndpoint if order.transport == "tcp" else UnixEndpoint
        endpoint = next(one for one in started.endpoints if isinstance(one, kind))
        token = started.gateway.first_token if order.transport == "tcp" else None
        _answer(GatewayAnnounced(str(endpoint), token))
        loop = asyncio.get_running_loop()

        def input_ended() -> None:
            loop.remove_reader(sys.stdin.fileno())
            signal.raise_signal(signal.SIGTERM)

        loop.add_reader(sys.stdin.fileno(), input_ended)
        with stop_signals() as stopped:
            settle()
            await stopped


def main() -> None:
    """Entry point of the gateway's process."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    line = sys.stdin.buffer.readline()
    if not line:
        return
    try:
        run(_serve(msgspec.json.decode(line, type=GatewayOrder)))
    except (KvgwError, StorageError, TenancyError) as error:
        _answer(Failed(str(error)))
        sys.exit(1)


def _answer(message: Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
