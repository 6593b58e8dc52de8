"""A storm of kills: real gateways on SQLite and NVMe, four tenants at work, killed and stopped again and again.

Each gateway has a data folder and a load of its own. Now and then it is looked at while it is quiet, and at the end its
folder is opened in this process and everything is looked at.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import psutil

from kvgw.client import Client, connect
from kvgw.errors import Outage
from kvgw.model import Durability, StatusReply, StatusRequest
from tests.support.gateways import MIB
from tests.torture.figures import Figures
from tests.torture.ground import OPTIONS, SETTINGS, close_down, make_tenants, reopened
from tests.torture.load import WRITE_S, Load
from tests.torture.nursery import Nursery

START_S: Final = 60.0
INSPECT_EVERY: Final = 40
"""Kills between two looks at a quiet gateway."""
STOP_SHARE: Final = 0.12
LIFE_S: Final = (0.05, 0.8)
STOP_S: Final = (0.2, 2.5)
QUIET_S: Final = 10.0

ENVIRONMENT: Final = {
    "SERVER__HTTP": "",
    "DEFAULTS__DURABILITY": "staged",
    "STAGING__BYTES": str(16 * MIB),
    "NVME__CAPACITY_BYTES": str(512 * MIB),
    "NVME__MIN_FREE_BYTES": "0",
    "MAINTENANCE__OUTBOX_SECONDS": "0.5",
    "MAINTENANCE__SWEEP_SECONDS": "0.5",
    "MAINTENANCE__ORPHANS_SECONDS": "2",
    "MAINTENANCE__NVME_ORPHAN_GRACE_SECONDS": str(WRITE_S + 2),
}


class Gateway:
    """A gateway process that can be killed, and clients of it for each tenant."""

    def __init__(self, data: Path, nursery: Nursery, tokens: dict[str, str], settings: dict[str, str]) -> None:
        self.data = data
        self.log = data.with_name(f"{data.name}.log")
        self.port = int(settings.get("SERVER__LISTEN", "").rpartition(":")[2] or 0)
        self.pid = 0
        self._nursery = nursery
        self._tokens = tokens
        own = {name: value for name, value in os.environ.items() if not name.startswith("KVGW")}
        self._environment = own | {f"KVGW__{name}": value for name, value in settings.items()}
        self._clients: dict[str, Client] = {}
        self.endpoint = f"unix:{data / 'kvgw.sock'}"

    def client(self, tenant: str) -> Client:
        if not self.pid:
            raise Outage("the gateway is not running")
        if tenant not in self._clients:
            self._clients[tenant] = connect(self.endpoint, token=self._tokens[tenant], options=OPTIONS)
        return self._clients[tenant]

    async def start(self) -> None:
        """Start, and return when it takes connections."""
        pid = await asyncio.to_thread(
            self._nursery.spawn, "tests.torture.nursery:serve", str(self.data), env=self._environment, log=self.log
        )
        deadline = time.monotonic() + START_S
        while not self._listens():
            ended = await asyncio.to_thread(self._nursery.status, pid)
            assert ended is None, f"the gateway ended at its start with {ended}:\n{self.words()}"
            assert time.monotonic() < deadline, f"the gateway did not listen within {START_S} s:\n{self.words()}"
            await asyncio.sleep(0.01)
        self.pid = pid

    async def kill(self) -> None:
        pid, self.pid = self.pid, 0
        await asyncio.to_thread(self._nursery.kill, pid)

    async def stop_for(self, seconds: float) -> None:
        """Freeze it: its sockets stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(self.pid, signal.SIGCONT)

    async def end(self) -> int:
        """End it in order; its exit code."""
        await self.forget_clients()
        pid, self.pid = self.pid, 0
        os.kill(pid, signal.SIGTERM)
        return await asyncio.to_thread(self._nursery.wait, pid, START_S)

    async def forget_clients(self) -> None:
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()

    async def holds(self) -> tuple[int, int]:
        """Connections of clients, and files, that the process has open."""
        return await asyncio.to_thread(self._holds)

    def _holds(self) -> tuple[int, int]:
        process = psutil.Process(self.pid)
        ours = str(self.data / "kvgw.sock")
        clients = sum(
            one.laddr == ours or (isinstance(one.laddr, tuple) and one.laddr[1:] == (self.port,))
            for one in process.net_connections(kind="all")
        )
        files = 0
        for number in os.listdir(f"/proc/{self.pid}/fd"):
            with suppress(FileNotFoundError):
                target = os.readlink(f"/proc/{self.pid}/fd/{number}")
                files += target.startswith("/") and not target.startswith(("/dev/", "/proc/"))
        return clients, files

    def words(self) -> str:
        """The last of what it said."""
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    def bugs(self) -> list[str]:
        """Tracebacks of ours in what it said: what a job or a connection survived, and nobody foresaw."""
        text = self.log.read_text(errors="replace")
        traces = [text[found.start() : found.start() + 4000] for found in re.finditer("Traceback", text)]
        return [one for one in traces if re.search(r'File "[^"]*/(kvgw|storage|tenancy)/[^"]*"', one)]

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.data / "kvgw.sock"))
            except OSError:
                return False
        return True


async def look_at_quiet(gateway: Gateway, figures: Figures, idle: tuple[int, int], where: str) -> None:
    """A running gateway whose load pauses: what it holds must come down to what it held before any load (law 7)."""
    figures.counts["inspections"] += 1
    await gateway.forget_clients()
    deadline = time.monotonic() + QUIET_S
    while True:
        sockets, files = (max(0, now - before) for now, before in zip(await gateway.holds(), idle, strict=True))
        status = await _status(gateway)
        slots = status is None or status.staging.window_bytes > 0 or status.staging.waiting > 0
        if not sockets and not files and not slots:
            return
        if time.monotonic() > deadline:
            figures.breach("leaked_connections", f"{where}: {sockets} connections more than when it began", sockets)
            figures.breach("leaked_files", f"{where}: {files} files more than when it began", files)
            figures.breach("leaked_slots", f"{where}: {status.staging if status else 'no answer'}", int(slots))
            return
        await asyncio.sleep(0.1)


async def _status(gateway: Gateway) -> StatusReply | None:
    """As the gateway's own user, on a connection that is closed again."""
    client = connect(gateway.endpoint, options=OPTIONS)
    try:
        return await client._transport.ask(StatusRequest(), StatusReply)
    except Outage:
        return None
    finally:
        await client.aclose()


class Cell:
    """One gateway with its data folder and its load."""

    def __init__(self, name: str, folder: Path, nursery: Nursery, seed: str) -> None:
        self.figures = Figures()
        self._name = name
        self._data = folder / name
        self._nursery = nursery
        self._seed = seed
        self._rng = random.Random(f"{seed}/{name}/kills")

    async def run(self, ends: float) -> None:
        async with reopened(SETTINGS, self._data) as first:
            tokens = await make_tenants(first)
        gateway = Gateway(self._data, self._nursery, tokens, ENVIRONMENT)
        load = Load(self._name, self._seed, self.figures, gateway.client, durable=[Durability.NVME], workers=2)
        await gateway.start()
        await asyncio.sleep(1.0)
        idle = await gateway.holds()
        working = asyncio.create_task(load.run())
        try:
            while time.monotonic() < ends:
                await self._blow(gateway)
                if self.figures.counts["kills"] % INSPECT_EVERY == INSPECT_EVERY - 1:
                    await self._inspect(gateway, load, idle)
            await self._inspect(gateway, load, idle)
        finally:
            load.end()
            await working
        if (code := await gateway.end()) != 0:
            self.figures.breach("unforeseen", f"{self._name} ended with {code}: {gateway.words()[-300:]}")
        for bug in gateway.bugs()[:3]:
            self.figures.breach("unforeseen", f"{self._name}: {bug}")
        await close_down(SETTINGS, self._data, tokens, load, self._name)

    async def _blow(self, gateway: Gateway) -> None:
        await asyncio.sleep(self._rng.uniform(*LIFE_S))
        if self._rng.random() < STOP_SHARE:
            await gateway.stop_for(self._rng.uniform(*STOP_S))
            self.figures.counts["stops"] += 1
            self.figures.fault("SIGSTOP")
            return
        await gateway.kill()
        self.figures.counts["kills"] += 1
        self.figures.fault("SIGKILL")
        await gateway.start()

    async def _inspect(self, gateway: Gateway, load: Load, idle: tuple[int, int]) -> None:
        await asyncio.sleep(1.0)
        await load.pause()
        await look_at_quiet(gateway, self.figures, idle, self._name)
        await load.read_back()
        load.resume()


async def run(folder: Path, seconds: float, seed: str, tell: Callable[[str], None], cells: int = 2) -> Figures:
    """So many gateways side by side; the figures of all."""
    total = Figures()
    with ExitStack() as stack:
        nursery = stack.enter_context(Nursery())
        storms = [Cell(f"storm-{number}", folder, nursery, seed) for number in range(cells)]
        ends = time.monotonic() + seconds

        async def report() -> None:
            while True:
                await asyncio.sleep(10.0)
                now = Figures()
                for storm in storms:
                    now.add(storm.figures)
                tell(now.line())

        reporting = asyncio.create_task(report())
        try:
            async with asyncio.TaskGroup() as group:
                for storm in storms:
                    group.create_task(storm.run(ends))
        finally:
            reporting.cancel()
    for storm in storms:
        total.add(storm.figures)
    return total
