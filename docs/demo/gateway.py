"""A gateway of its own for the demo: the command `kvgw serve` on a temporary data folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

_KVGW = Path(sys.executable).with_name("kvgw")
_START_S = 60.0
_STOP_S = 30.0
_STAGING_BYTES = 256 * 1024 * 1024


class GatewayFailed(Exception):
    """The gateway's process ended, did not get ready, or a command to it failed."""


class DemoGateway:
    """Starts with its ``with`` block, and ends with it, whatever happens inside."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder = folder
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"unix:{self.folder / 'kvgw.sock'}"

    def __enter__(self) -> DemoGateway:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process and wait until it answers on its socket."""
        with self._log.open("ab") as log:
            # A session of its own: Ctrl-C in the terminal is for the demo, which then ends the gateway in order.
            self._process = subprocess.Popen(
                [_KVGW, "serve", "--data", self.folder],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None:
                raise GatewayFailed(f"kvgw serve ended with exit code {self._process.returncode}:\n{self._tail()}")
            if time.monotonic() > deadline:
                raise GatewayFailed(f"kvgw serve was not ready after {_START_S:g} s:\n{self._tail()}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End the process: politely, then not. A second call does nothing."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def make_namespace(self, name: str) -> None:
        """Run ``kvgw namespace create``."""
        command = [_KVGW, "namespace", "create", name, "--data", self.folder]
        done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise GatewayFailed(f"kvgw namespace create {name} failed:\n{done.stdout}{done.stderr}")

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.folder / "kvgw.sock"))
            except (FileNotFoundError, ConnectionRefusedError):
                return False
        return True

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])


def _environment() -> dict[str, str]:
    """This process's environment, without settings for other gateways."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVGW")}
    return kept | {"KVGW__SERVER__HTTP": "", "KVGW__STAGING__BYTES": str(_STAGING_BYTES)}
