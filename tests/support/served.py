"""`kvgw serve` in a process of its own, as an operator runs it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from kvgw.cli import main

ROOT = Path(__file__).resolve().parents[2]

SERVICE_LINKS = {"KVGW_PORT": "tcp://10.0.0.7:8470", "KVGW_SERVICE_HOST": "10.0.0.7", "KVGW_SERVICE_PORT": "8470"}
"""What Kubernetes puts into the environment of a pod beside a service named kvgw."""

SMALL_TOML = """
[server]
http = "127.0.0.1:0"
[staging]
bytes = 16777216
[nvme]
capacity_bytes = 67108864
min_free_bytes = 0
"""


def environment(**more: str) -> dict[str, str]:
    """An environment without settings of the one who runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVGW")}
    return {**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **more}


def command(*arguments: str, files: int = 0) -> list[str]:
    """The command line; `files`: how many descriptors the process may have, if not as many as this one."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files})); " if files else ""
    return [sys.executable, "-c", f"{limit}from kvgw.cli import main; main()", *arguments]


def kvgw(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in this process: a new one spends its time on imports."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment(**more), clear=True),
        mock.patch.object(sys, "argv", ["kvgw", *arguments]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        else:
            code = 0
    return subprocess.CompletedProcess(["kvgw", *arguments], code, out.getvalue(), err.getvalue())


def answer(*arguments: str, **more: str) -> Any:
    """The JSON that a command prints."""
    run = kvgw(*arguments, "--json", **more)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout)


class Served:
    """A running gateway."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.printed = ""

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line
            if line == "ready\n":
                return
        raise AssertionError(f"it ended before it was ready:\n{self.printed}{self.complaints()}")

    def complaints(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    @property
    def token(self) -> str:
        found = re.search(r"kvgw_[a-z2-7]{16}_\S+", self.printed)
        assert found is not None, self.printed
        return found[0]

    @property
    def http(self) -> str:
        found = re.search(r"http://127\.0\.0\.1:\d+", self.printed)
        assert found is not None, self.printed
        return found[0]

    def stop(self, how: signal.Signals = signal.SIGTERM, timeout: float = 15.0) -> int:
        self.process.send_signal(how)
        return self.process.wait(timeout)


@contextmanager
def served(folder: Path, *options: str, settings: str = SMALL_TOML, files: int = 0, **more: str) -> Iterator[Served]:
    """A gateway that is ready; killed at the end if it still runs."""
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "kvgw.toml").write_text(settings)
    process = subprocess.Popen(
        command("serve", "--data", str(folder), *options, files=files),
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        running = Served(process, folder)
        try:
            running.wait_ready()
            yield running
        finally:
            if process.poll() is None:
                process.kill()
