"""kvgw itself as it is served: a process of its own on a data folder, asked by each tenant with its own token."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Self

from kvgw.client import Client, connect
from kvgw.engines.options import EngineOptions
from kvgw.keys import prefix_keys
from kvgw.kvformat import KVFormat, LayerGroup
from kvgw.model import Durability
from kvgw.reports import Registered
from tests.attacks.subject import CHUNK_BYTES, CHUNK_TOKENS, Asker, stop_process
from tests.support.served import Served, answer, served

FORMAT = KVFormat(
    model="test/model",
    weights=b"w" * 32,
    tokenizer=b"t" * 32,
    kv_dtype="bfloat16",
    kv_quantisation=None,
    adapter=None,
    adapter_digest=None,
    positions=("kind", "rope", "theta", 10000.0),
    attention=(LayerGroup("mha", 2, kv_heads=2, head_dim=8),),
    layout="layer,kv,token,head,dim",
    tokens_per_chunk=CHUNK_TOKENS,
    engine="test",
    engine_abi="1",
    parallel=(1, 0, 1, 0, 1, 0),
    multimodal=None,
    extra=(),
)
_ADAPTERS = EngineOptions(endpoint="unix:/nowhere")
LOOKUP_S, LOAD_S = _ADAPTERS.lookup_deadline_s, _ADAPTERS.load_deadline_s
"""The deadlines of kvgw's engine adapters, unless they are set otherwise."""


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def format_for(who: Asker) -> KVFormat:
    """As the engine adapters make it: weights and adapter by their content."""
    made = replace(FORMAT, weights=_digest(who.revision), kv_dtype=who.dtype)
    if who.adapter:
        made = replace(made, adapter=who.adapter, adapter_digest=_digest(who.adapter))
    assert made.chunk_bytes == CHUNK_BYTES
    return made


class KvgwSubject:
    """A gateway with two tenants, SQLite and NVMe. Damage is done while it is down, so that it must read the disk."""

    name = "kvgw"

    def __init__(self, folder: Path) -> None:
        self.version = version("kvgw")
        self._folder = folder
        self._running = ExitStack()
        self._clients: dict[str, Client] = {}
        self._tokens: dict[str, str] = {}
        self._registered: dict[tuple[str, KVFormat], Registered] = {}
        self._files: dict[bytes, Path] = {}

    @classmethod
    async def started(cls, folder: Path) -> Self:
        """A gateway that runs, and its tenants."""
        made = cls(folder)
        made._start()
        for tenant in ("acme", "globex"):
            # In a thread: a command runs a loop of its own.
            await asyncio.to_thread(answer, "tenant", "create", tenant, "--data", str(folder))
            words = ("token", "create", "engine", "--tenant", tenant, "--data", str(folder))
            made._tokens[tenant] = (await asyncio.to_thread(answer, *words))["token"]
        return made

    def _start(self) -> None:
        self._process: Served = self._running.enter_context(served(self._folder))

    def _client(self, who: Asker) -> Client:
        if who.tenant not in self._clients:
            where = f"unix:{self._folder / 'kvgw.sock'}"
            self._clients[who.tenant] = connect(where, token=self._tokens[who.tenant])
        return self._clients[who.tenant]

    async def _format(self, who: Asker) -> Registered:
        """Registered once, as an engine does when it starts."""
        wanted = (who.tenant, format_for(who))
        if wanted not in self._registered:
            self._registered[wanted] = await self._client(who).register(format_for(who))
        return self._registered[wanted]

    def _key(self, who: Asker, tokens: list[int]) -> bytes:
        (key,) = prefix_keys(format_for(who), tokens, salt=who.salt.encode())
        return key

    def _blobs(self) -> set[Path]:
        return {path for path in (self._folder / "nvme" / "v1").glob("*/??/*") if path.is_file()}

    async def store(self, who: Asker, tokens: list[int], payload: bytes) -> None:
        client, key = self._client(who), self._key(who, tokens)
        before = self._blobs()
        registered = await self._format(who)
        report = await client.put(registered, [key], [payload], durability=Durability.NVME, deadline_s=10)
        assert report.stored == 1, report
        (self._files[key],) = self._blobs() - before

    async def load(self, who: Asker, tokens: list[int], limit_s: float) -> bytes | None:
        client, key = self._client(who), self._key(who, tokens)
        buffer = bytearray(CHUNK_BYTES)
        async with asyncio.timeout(limit_s):
            registered = await self._format(who)
            if (await client.match(registered, [key], deadline_s=LOOKUP_S)).count == 0:
                return None
            report = await client.get(registered, [key], [buffer], deadline_s=LOAD_S)
        return bytes(buffer) if report.hits else None

    async def delete(self, who: Asker, tokens: list[int]) -> None:
        client = self._client(who)
        registered = await self._format(who)
        assert await client.delete(registered, [self._key(who, tokens)]) == 1

    async def flip(self, who: Asker, tokens: list[int]) -> str:
        file = self._files[self._key(who, tokens)]
        await self._stop()
        blob = bytearray(file.read_bytes())
        blob[len(blob) // 2] ^= 1
        file.write_bytes(blob)
        self._start()
        return "in its file on NVMe, gateway started anew"

    async def swap(self, who: Asker, victim: list[int], foreign: list[int]) -> str:
        file = self._files[self._key(who, victim)]
        await self._stop()
        file.write_bytes(self._files[self._key(who, foreign)].read_bytes())
        self._start()
        return "a file on NVMe over another, gateway started anew"

    async def freeze(self) -> str:
        await stop_process(self._process.process.pid)
        return f"SIGSTOP to the gateway; a lookup's deadline is {LOOKUP_S:g} s"

    async def _stop(self) -> None:
        await self._hang_up()
        assert self._process.stop() == 0, self._process.complaints()
        self._running.close()

    async def _hang_up(self) -> None:
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()

    async def aclose(self) -> None:
        await self._hang_up()
        self._running.close()
