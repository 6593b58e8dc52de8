"""Processes that start in a moment: a parent imports once what a gateway needs, and forks for each one that is wanted.

    with Nursery() as nursery:
        pid = nursery.spawn("tests.torture.nursery:serve", str(data), env={"KVGW__SERVER__HTTP": ""}, log=file)
        nursery.kill(pid)

A thousand kills fit into minutes this way. Children end with the nursery, and the nursery with whoever made it.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

ROOT: Final = Path(__file__).resolve().parents[2]
END_S: Final = 20.0
_DIE_WITH_PARENT: Final = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


class Nursery:
    """The parent of short-lived processes. Safe for use by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: dict[int, int] = {}
        self.alive: set[int] = set()

    def __enter__(self) -> Self:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.torture.nursery", str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for whoever made it, who then ends it
            )
        self._socket = ours
        self._lines = ours.makefile("r", encoding="utf-8")
        assert self._ask({"do": "ready"})["ready"]
        return self

    def __exit__(self, *_: object) -> None:
        for pid in sorted(self.alive):
            self.kill(pid)
        self._lines.close()
        self._socket.close()
        self._process.kill()
        self._process.wait(END_S)

    def spawn(self, target: str, *arguments: Any, env: dict[str, str] | None = None, log: Path | None = None) -> int:
        """Run ``module:function`` with these arguments in a process of its own; its id. Its result is its exit code."""
        asked = {"do": "spawn", "target": target, "arguments": arguments, "env": env, "log": str(log or os.devnull)}
        pid = int(self._ask(asked)["pid"])
        self.alive.add(pid)
        return pid

    def status(self, pid: int) -> int | None:
        """How it ended: its exit code, or minus the signal; None while it runs."""
        if pid in self._ended:
            return self._ended[pid]
        found = self._ask({"do": "status", "pid": pid})["status"]
        if found is not None:
            self.alive.discard(pid)
            self._ended[pid] = int(found)
        return found if found is None else int(found)

    def wait(self, pid: int, within_s: float = END_S) -> int:
        """Wait for its end; its status."""
        deadline = time.monotonic() + within_s
        while (found := self.status(pid)) is None:
            assert time.monotonic() < deadline, f"process {pid} has not ended within {within_s} s"
            time.sleep(0.002)
        return found

    def kill(self, pid: int) -> None:
        """End it as a crash would."""
        if self.status(pid) is None:
            os.kill(pid, signal.SIGKILL)
            self.wait(pid)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self._socket.sendall(json.dumps(question).encode() + b"\n")
            line = self._lines.readline()
        assert line, "the nursery has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


def serve(data: str) -> int:
    """``kvgw serve`` on a data folder; settings come from the environment."""
    from kvgw.cli import main

    sys.argv = ["kvgw", "serve", "--data", data]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _work(question: dict[str, Any]) -> dict[str, Any]:
    if question["do"] == "spawn":
        return {"pid": _fork(question)}
    if question["do"] == "status":
        pid, status = os.waitpid(question["pid"], os.WNOHANG)
        return {"status": os.waitstatus_to_exitcode(status) if pid else None}
    return {"ready": True}


def _fork(question: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _begin(question)
        module, _, name = question["target"].partition(":")
        code = int(getattr(importlib.import_module(module), name)(*question["arguments"]) or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _begin(question: dict[str, Any]) -> None:
    """In the child: nothing of the parent's but what it imported."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    log = os.open(question["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, 4096)
    if question["env"] is not None:
        os.environ.clear()
        os.environ.update(question["env"])


def _import_all() -> None:
    """What gateways and scenarios need, and what they would each read from disk again."""
    for name in (
        "asyncpg",
        "kvgw.admin.app",
        "kvgw.cli.serve",
        "kvgw.server.serve",
        "sqlalchemy.dialects.postgresql.asyncpg",
        "sqlalchemy.dialects.sqlite.pysqlite",
        "sqlalchemy.ext.asyncio",
        "storage.s3",
        "tests.torture.scenarios",
        "uvicorn",
    ):
        importlib.import_module(name)
    import botocore.session

    botocore.session.create_loader = cache(botocore.session.create_loader)
    loader = botocore.session.get_session().get_component("data_loader")
    for kind in ("service-2", "endpoint-rule-set-1", "paginators-1", "waiters-2"):
        loader.load_service_model("s3", kind)


def main(descriptor: int) -> None:
    _import_all()
    asyncio.run(asyncio.sleep(0))
    gc.collect()
    gc.freeze()
    with (
        suppress(BrokenPipeError),  # whoever asked has ended
        socket.socket(fileno=descriptor) as peer,
        peer.makefile("r", encoding="utf-8") as questions,
    ):
        for line in questions:
            peer.sendall(json.dumps(_work(json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
