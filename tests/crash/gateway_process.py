"""A real `kvgw serve` in a process of its own, to be killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

START_S = 60.0
STOP_S = 30.0


class GatewayProcess:
    """One gateway on one data folder. `settings` are ``SECTION__KEY`` → value."""

    def __init__(self, data: Path, **settings: object) -> None:
        self.data = data
        self.log = data.with_name("gateway.log")
        own = {name: value for name, value in os.environ.items() if not name.startswith("KVGW")}
        chosen = {"SERVER__HTTP": "", "STAGING__BYTES": 16 * 1024 * 1024} | settings
        self._environment = own | {f"KVGW__{name}": str(value) for name, value in chosen.items()}
        self._process: subprocess.Popen[bytes] | None = None
        self.prelude = ""
        """Python that runs in the process before the gateway does."""

    @property
    def socket(self) -> Path:
        return self.data / "kvgw.sock"

    def start(self) -> Self:
        """Start, and return when it takes connections."""
        program = [str(Path(sys.executable).with_name("kvgw"))]
        if self.prelude:
            program = [sys.executable, "-c", f"{self.prelude}\nfrom kvgw.cli import main\nmain()"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*program, "serve", "--data", str(self.data)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_S
        while not self._listens():
            assert self._process.poll() is None, f"the gateway ended at its start:\n{self.text()}"
            assert time.monotonic() < deadline, f"the gateway did not listen within {START_S} s:\n{self.text()}"
            time.sleep(0.01)
        return self

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_S)
            self._process = None

    def pause(self) -> bool:
        """Freeze it: its connections stay open, and nothing answers. False: it does not run now."""
        if self._process is None:
            return False
        self._process.send_signal(signal.SIGSTOP)
        return True

    def resume(self) -> None:
        """Let it go on, if nobody has ended it meanwhile."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """End it in order; its exit code."""
        assert self._process is not None
        self._process.terminate()
        code = self._process.wait(STOP_S)
        self._process = None
        return code

    def text(self) -> str:
        """The last of what it said."""
        return self.log.read_text(errors="replace")[-4000:]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
        return True
