"""The gateway's side of the conformance scenarios (`kvgw.engines.testing`): a real one in a process of its own."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from tests.support.served import Served, kvgw, served

SETTINGS: Final = """
[server]
http = ""
[staging]
bytes = 67108864
[nvme]
capacity_bytes = 268435456
min_free_bytes = 0
"""
DEADLINES_S: Final = (2.0, 3.0, 4.0)
"""Of a lookup, a load and a store. A machine that runs engine, gateway and tests on few cores answers late."""


def content(prompt: int, index: int, size: int) -> bytes:
    """The bytes of a chunk."""
    return random.Random(prompt * 1000 + index).randbytes(size)


class Gateway:
    """A gateway that is stopped, killed, frozen and started again over the same data."""

    tenants: Final = ("red", "blue")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self.running: Served | None = None
        self.start()
        self.tokens = {name: self._token(name) for name in self.tenants}

    @property
    def options(self) -> dict[str, Any]:
        """What every adapter is told."""
        names = ("lookup_deadline_s", "load_deadline_s", "store_deadline_s")
        return {"endpoint": f"unix:{self.folder / 'kvgw.sock'}", **dict(zip(names, DEADLINES_S, strict=True))}

    def start(self) -> None:
        self.running = self._stack.enter_context(served(self.folder, settings=SETTINGS))

    def stop(self) -> None:
        assert self.running is not None
        self.running.stop()
        self._ended()

    def kill(self) -> None:
        assert self.running is not None
        self.running.stop(signal.SIGKILL)
        self._ended()

    def ensure(self) -> None:
        """Start it if a test left it ended."""
        if self.running is None:
            self.start()

    def freeze(self) -> None:
        assert self.running is not None
        self.running.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.running is not None
        self.running.process.send_signal(signal.SIGCONT)

    def damage_one(self) -> None:
        # Chunks have thousands of bytes, what else is there has less; the newest is of the test that runs.
        blobs = [path for path in (self.folder / "nvme").rglob("*") if path.is_file() and path.stat().st_size > 2000]
        blob = max(blobs, key=lambda path: path.stat().st_mtime_ns)
        with blob.open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            byte = file.read(1)
            file.seek(-100, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))

    def close(self) -> None:
        if self.running is not None:
            self.stop()

    def _ended(self) -> None:
        if self.running is not None and self.running.process.poll() is not None:
            print(self.running.complaints(), file=sys.stderr)  # shown with a test that fails
        self._stack.close()
        self.running = None

    def _token(self, tenant: str) -> Path:
        assert kvgw("tenant", "create", tenant, "--data", str(self.folder)).returncode == 0
        made = kvgw("token", "create", "engine", "--tenant", tenant, "--data", str(self.folder), "--json")
        path = self.folder / f"{tenant}.token"
        path.write_text(json.loads(made.stdout)["token"])
        return path


@contextmanager
def gateway(folder: Path) -> Iterator[Gateway]:
    """For all tests of a module: each is apart from the others by what it gives as ``compatibility``."""
    made = Gateway(folder)
    try:
        yield made
    finally:
        made.close()
