"""Other stores of KV caches as LMCache uses them: its local disk, its own server, Redis, Mooncake Store.

LMCache and Mooncake run from an environment of their own. Each engine is a process (`lmcache_worker.py`); requests of
several tenants and adapters meet in one, as they do in an inference engine. The stores know no tenants: what a request
says of itself (LMCache's tags) is all that keeps them apart.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from tests.attacks.subject import Asker, NotApplicable, stop_process
from tests.bench_peers.environments import PeerAbsent, prepare
from tests.bench_peers.others import NEEDS

START_S = 300.0
WORKER = Path(__file__).with_name("lmcache_worker.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Equipment:
    """An interpreter with LMCache, the variables for it, and the programs of the stores."""

    python: Path
    variables: dict[str, str]
    programs: dict[str, Path]

    @classmethod
    def get(cls, others: tuple[str, ...]) -> Equipment:
        """Installs what is missing; raises `PeerAbsent`."""
        lmcache = prepare(NEEDS["lmcache"])
        variables, programs, sites = dict(lmcache.variables), {}, []
        for other in others:
            found = prepare(NEEDS[other])
            sites += [str(site) for site in found.python.parents[1].glob("lib/python*/site-packages")]
            variables |= found.variables
            if found.program is not None:
                programs[other] = found.program
        # One hash seed for all engines, which LMCache asks for.
        fixed = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "PYTHONPATH": ":".join(sites)}
        return cls(lmcache.python, variables | fixed, programs)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.variables}

    def version(self, package: str) -> str:
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        command = [str(self.python), "-c", code]
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=self.environment)
        return run.stdout.strip()


class Worker:
    """One engine's process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def started(cls, equipment: Equipment, log: Path, settings: dict[str, Any]) -> Self:
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *(str(equipment.python), str(WORKER), json.dumps(settings)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=equipment.environment,
            )
        made = cls(process)
        try:
            await made._answer(START_S)
        except (TimeoutError, json.JSONDecodeError):
            await made.aclose()
            raise PeerAbsent(f"the engine's process did not start; see the end of {_last_line(log)!r}") from None
        return made

    async def ask(self, op: str, who: Asker, tokens: list[int], limit_s: float, **more: str) -> Any:
        """The answer; raises `TimeoutError`, after which this process is of no use."""
        assert self._process.stdin is not None
        request = {"op": op, "tokens": tokens, "salt": who.salt, **more}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        answer = await self._answer(limit_s)
        if "error" in answer:
            raise AssertionError(f"{op}: {answer['error']}")
        return answer["result"]

    async def _answer(self, limit_s: float) -> Any:
        assert self._process.stdout is not None
        return json.loads(await asyncio.wait_for(self._process.stdout.readline(), limit_s))

    async def aclose(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


def _last_line(log: Path) -> str:
    return (log.read_text(errors="replace").strip().splitlines() or [""])[-1][-200:]


class LMCacheSubject(ABC):
    """LMCache over a store in a process of its own, or over its local disk."""

    title: ClassVar[str] = "LMCache"
    others: ClassVar[tuple[str, ...]] = ()
    """Environments besides LMCache's."""

    def __init__(self, equipment: Equipment, folder: Path) -> None:
        self._equipment = equipment
        self._folder = folder
        folder.mkdir()
        self.name = self.title
        self.version = f"LMCache {equipment.version('lmcache')}"
        self._workers: dict[tuple[str, str], Worker] = {}
        self._server: asyncio.subprocess.Process | None = None

    @classmethod
    async def started(cls, folder: Path) -> Self:
        """The store, running; raises `PeerAbsent`."""
        made = cls(await asyncio.to_thread(Equipment.get, cls.others), folder)
        try:
            await made._start()
        except BaseException:
            await made.aclose()
            raise
        return made

    @abstractmethod
    async def _start(self) -> None:
        """Start the store's own process, if it has one."""

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """LMCache's settings for this store."""

    async def _engine(self, who: Asker) -> Worker:
        kind = (who.revision, who.dtype)
        if kind not in self._workers:
            settings = {**self._settings(), "dtype": who.dtype}
            self._workers[kind] = await Worker.started(self._equipment, self._folder / "engines.log", settings)
        return self._workers[kind]

    async def _run(self, *command: str, log: str = "store.log") -> None:
        with (self._folder / log).open("ab") as output:
            self._server = await asyncio.create_subprocess_exec(
                *command, cwd=self._folder, stdout=output, stderr=output, env=self._equipment.environment
            )

    async def _listening(self, port: int) -> None:
        for _ in range(int(START_S / 0.1)):
            if self._server is not None and self._server.returncode is not None:
                raise PeerAbsent(f"the store ended: {_last_line(self._folder / 'store.log')}")
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
            else:
                writer.close()
                return
        raise PeerAbsent("the store does not listen")

    async def store(self, who: Asker, tokens: list[int], payload: bytes) -> None:
        await (await self._engine(who)).ask("put", who, tokens, START_S, payload=payload.hex())

    async def load(self, who: Asker, tokens: list[int], limit_s: float) -> bytes | None:
        engine = await self._engine(who)
        found = await engine.ask("get", who, tokens, limit_s)
        return None if found is None else bytes.fromhex(found)

    async def delete(self, who: Asker, tokens: list[int]) -> None:
        if not await (await self._engine(who)).ask("delete", who, tokens, START_S):
            raise NotApplicable("LMCache's remove() answers False over this store")

    async def flip(self, who: Asker, tokens: list[int]) -> str:
        raise NotApplicable("it keeps chunks in its own memory")

    async def swap(self, who: Asker, victim: list[int], foreign: list[int]) -> str:
        found = await self.load(who, foreign, START_S)
        assert found is not None
        await (await self._engine(who)).ask("overwrite", who, victim, START_S, payload=found.hex())
        return "put by a client under the live key"

    async def freeze(self) -> str:
        if self._server is None:
            raise NotApplicable("there is no process but the engine's own")
        await stop_process(self._server.pid)
        return "SIGSTOP to the store; LMCache's settings as they come"

    async def aclose(self) -> None:
        for worker in self._workers.values():
            await worker.aclose()
        if self._server is not None and self._server.returncode is None:
            self._server.kill()
            await self._server.wait()


class LocalDisk(LMCacheSubject):
    """LMCache's local disk backend: files beside the engine."""

    title = "LMCache, local disk"

    async def _start(self) -> None:
        """LMCache writes the files itself."""

    def _settings(self) -> dict[str, Any]:
        return {"local_disk": str(self._folder / "disk")}

    async def _file(self, who: Asker, tokens: list[int]) -> Path:
        return Path(await (await self._engine(who)).ask("path", who, tokens, START_S))

    async def flip(self, who: Asker, tokens: list[int]) -> str:
        file = await self._file(who, tokens)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        return "in its file"

    async def swap(self, who: Asker, victim: list[int], foreign: list[int]) -> str:
        (await self._file(who, victim)).write_bytes((await self._file(who, foreign)).read_bytes())
        return "a file over another"


class RemoteServer(LMCacheSubject):
    """LMCache's own server, in memory."""

    title = "LMCache server"

    async def _start(self) -> None:
        self._port = free_port()
        await self._run(str(self._equipment.python), "-m", "lmcache.v1.server", "127.0.0.1", str(self._port))
        await self._listening(self._port)

    def _settings(self) -> dict[str, Any]:
        return {"remote_url": f"lm://127.0.0.1:{self._port}"}


class Redis(LMCacheSubject):
    """Redis through LMCache's connector."""

    title = "Redis through LMCache"
    others = ("redis",)

    async def _start(self) -> None:
        binary = str(self._equipment.programs["redis"])
        self._cli = shutil.which("redis-cli") or str(Path(binary).with_name("redis-cli"))
        told = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
        self.version = f"Redis {re.findall(r'v=([0-9.]+)', told)[0]}, {self.version}"
        self._port = free_port()
        plain = ("--save", "", "--appendonly", "no", "--bind", "127.0.0.1")
        await self._run(binary, "--port", str(self._port), *plain)
        await self._listening(self._port)

    def _settings(self) -> dict[str, Any]:
        return {"remote_url": f"redis://127.0.0.1:{self._port}"}

    def _redis(self, *words: str) -> str:
        command = [self._cli, "-p", str(self._port), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    async def _key(self, who: Asker, tokens: list[int]) -> str:
        return await (await self._engine(who)).ask("path", who, tokens, START_S) + "kv_bytes"

    async def flip(self, who: Asker, tokens: list[int]) -> str:
        key = await self._key(who, tokens)
        bit = self._redis("GETBIT", key, "8000")
        self._redis("SETBIT", key, "8000", str(1 - int(bit)))
        return "SETBIT in its value"

    async def swap(self, who: Asker, victim: list[int], foreign: list[int]) -> str:
        copied = self._redis("COPY", await self._key(who, foreign), await self._key(who, victim), "REPLACE")
        assert copied == "1", copied
        return "COPY of a value over another"


class Mooncake(LMCacheSubject):
    """Mooncake Store through LMCache's connector: a master, and each engine with a segment of its own."""

    title = "Mooncake Store through LMCache"
    others = ("mooncake",)

    async def _start(self) -> None:
        found = self._equipment.version("mooncake-transfer-engine-non-cuda")
        self.version = f"Mooncake {found}, {self.version}"
        (binary,) = Path(self._equipment.variables["PYTHONPATH"]).glob("mooncake/mooncake_master")
        self._port, metrics = free_port(), free_port()
        await self._run(str(binary), "-rpc_port", str(self._port), "-metrics_port", str(metrics))
        await self._listening(self._port)

    def _settings(self) -> dict[str, Any]:
        extra = {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "mooncake_master_server_addr": f"127.0.0.1:{self._port}",
            "protocol": "tcp",
            "global_segment_size": str(64 << 20),
            "local_buffer_size": str(16 << 20),
            "save_chunk_meta": False,  # a value is the chunk's bytes and nothing else
        }
        return {"remote_url": f"mooncakestore://127.0.0.1:{self._port}/", "extra_config": extra}


PEERS: tuple[type[LMCacheSubject], ...] = (LocalDisk, RemoteServer, Redis, Mooncake)
