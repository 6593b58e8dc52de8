"""A client process that puts, repeats and deletes chunks without end, and writes down what was acknowledged.

    python -m tests.crash.storm <socket> <diary> <seed>

Each line of the diary is ``<what> <namespace> <key>``: ``stored`` and ``deleted`` after their acknowledgement,
``ending`` before a deletion is asked for. What a key holds follows from its name alone, so that anybody can check it.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from unittest import mock

from kvgw.breaker import BreakerOptions
from kvgw.client import Client, ClientOptions, connect
from kvgw.endpoint import parse_endpoint
from kvgw.errors import KvgwError, Outage
from kvgw.kvformat import KVFormat, LayerGroup
from kvgw.model import Durability, NamespaceCreateRequest, NamespaceInfo, Outcome, PutOutcome
from kvgw.transport import SocketTransport

NAMESPACES = ("default", "second")
WRITERS = 2
DEADLINE_S = 2.0
CHUNK_BYTES = 4096
CONTENTS = 400
"""So many contents are shared among all keys: many puts meet content that is there already."""

FORMAT = KVFormat(
    model="storm",
    weights=b"w" * 32,
    tokenizer=b"t" * 32,
    kv_dtype="float16",
    kv_quantisation=None,
    adapter=None,
    adapter_digest=None,
    positions=("kind", "none"),
    attention=(LayerGroup("mha", 1, kv_heads=1, head_dim=CHUNK_BYTES // 64),),
    layout="layer,kv,token,head,dim",
    tokens_per_chunk=16,
    engine="storm",
    engine_abi="1",
    parallel=(1, 0, 1, 0, 1, 0),
    multimodal=None,
    extra=(),
)


def content_of(namespace: str, key: str) -> bytes:
    """What `key` holds in `namespace`."""
    number = random.Random(key).randrange(CONTENTS)
    return random.Random(f"{namespace}/{number}").randbytes(CHUNK_BYTES)


def client_of(socket: str, namespace: str) -> Client:
    """A client that never gives up on its gateway; in the second namespace over shared memory."""
    breaker = BreakerOptions(failures=2**62)
    options = ClientOptions(namespace=namespace, breaker=breaker, shared_memory=namespace == NAMESPACES[1])
    return connect(f"unix:{socket}", options=options)


async def make_namespaces(socket: str) -> None:
    transport = SocketTransport(parse_endpoint(f"unix:{socket}"), None)
    try:
        for name in NAMESPACES[1:]:
            await transport.ask(NamespaceCreateRequest(name), NamespaceInfo)
    finally:
        await transport.aclose()


class Storm:
    """One writer in one namespace."""

    def __init__(self, socket: str, diary: Path, namespace: str, seed: str) -> None:
        self._client = client_of(socket, namespace)
        self._diary = diary.open("a", buffering=1)
        self._namespace = namespace
        self._seed = seed
        self._rng = random.Random(seed)
        self._count = 0
        self._stored: list[str] = []

    async def run(self) -> None:
        registered = None
        while registered is None:
            try:
                registered = await self._client.register(FORMAT, deadline_s=DEADLINE_S)
            except Outage:
                await asyncio.sleep(0.01)
        while True:
            if self._stored and self._rng.random() < 0.1:
                await self._delete(registered)
                continue
            keys = [self._new_key() for _ in range(self._rng.randint(1, 2))]
            if self._stored and self._rng.random() < 0.2:
                keys.append(self._rng.choice(self._stored))
            chunks = [content_of(self._namespace, key) for key in keys]
            report = await self._client.put(
                registered,
                [key.encode() for key in keys],
                chunks,
                durability=Durability.NVME,
                deadline_s=DEADLINE_S,
            )
            for key, outcome in zip(keys, report.outcomes, strict=True):
                if outcome in (PutOutcome.STORED, PutOutcome.HAVE):
                    self._note("stored", key)
                    self._stored.append(key)
            if report.outcome is Outcome.OUTAGE:
                await asyncio.sleep(0.01)

    async def _delete(self, registered: object) -> None:
        key = self._stored.pop(self._rng.randrange(len(self._stored)))
        self._stored = [other for other in self._stored if other != key]
        self._note("ending", key)
        try:
            await self._client.delete(registered, [key.encode()], deadline_s=DEADLINE_S)  # type: ignore[arg-type]
        except KvgwError:
            return
        self._note("deleted", key)

    def _new_key(self) -> str:
        self._count += 1
        return f"{self._seed}-{self._count}"

    def _note(self, what: str, key: str) -> None:
        self._diary.write(f"{what} {self._namespace} {key}\n")


async def main(socket: str, diary: Path, seed: str) -> None:
    small = mock.patch("kvgw.connection.COPIED_BYTES_MIN", 1)  # these chunks would go through the socket otherwise
    with small:
        await _storm(socket, diary, seed)


async def _storm(socket: str, diary: Path, seed: str) -> None:
    async with asyncio.TaskGroup() as group:
        for namespace in NAMESPACES:
            for writer in range(WRITERS):
                group.create_task(Storm(socket, diary, namespace, f"{seed}-{namespace}-{writer}").run())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
