"""LMCache's remote server through LMCache's own connector, as its engine adapters call it: a chunk at a time.

The server acknowledges no PUT. It takes a connection's commands in order, so that a question after the last PUT of a
call is answered once all of them are there: a PUT is measured until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from kvgw.bench.plan import BenchError
from tests.bench_peers.peers import Buffer, expect

MODEL: Final = "kvgw/bench"
POOL_GIB: Final = 0.25
"""LMCache's own host memory, from which a GET takes its buffers: two calls' worth and more."""
EMPTY: Final = memoryview(bytearray(1))


class LmCache:
    def __init__(self, connector: LMCServerConnector) -> None:
        self._connector = connector
        self._read: list[MemoryObj] = []

    async def put(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> None:
        for key, chunk in zip(keys, chunks, strict=True):
            await self._connector.put(_key(key), _object(chunk))
        if not await self._connector.exists(_key(keys[-1])):
            raise BenchError("the server does not know the chunk that was just stored")

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> Sequence[Buffer]:
        self._release()
        for key in keys:
            found = await self._connector.get(_key(key))
            if found is not None:
                self._read.append(found)
        expect("GET", len(self._read), keys)
        return [memoryview(one.byte_array) for one in self._read]

    async def match(self, keys: Sequence[bytes]) -> None:
        expect("EXIST", await self._connector.batched_async_contains("bench", [_key(key) for key in keys]), keys)

    async def delete(self, keys: Sequence[bytes]) -> None:
        """The server deletes nothing: a byte in place of each chunk gives the memory back."""
        self._release()
        await self.put(keys, [EMPTY] * len(keys))

    def _release(self) -> None:
        for one in self._read:
            one.ref_count_down()
        self._read = []


def _key(key: bytes) -> CacheEngineKey:
    return CacheEngineKey(MODEL, 1, 0, int.from_bytes(key[:8], "big"), torch.uint8)


def _object(chunk: memoryview) -> TensorMemoryObj:
    """What an engine's adapter hands over: host memory in place, without a copy."""
    shape = torch.Size([len(chunk)])
    about = MemoryObjMetadata(
        shape=shape,
        dtype=torch.uint8,
        address=0,
        phy_size=len(chunk),
        ref_count=1,
        pin_count=0,
        fmt=MemoryFormat.KV_2LTD,
    )
    return TensorMemoryObj(torch.frombuffer(chunk, dtype=torch.uint8), about, None)


async def connect(where: str, memory: Sequence[memoryview]) -> LmCache:
    host, _, port = where.rpartition(":")
    config = LMCacheEngineConfig.from_defaults(max_local_cpu_size=POOL_GIB, local_cpu=False)
    metadata = LMCacheMetadata(MODEL, 1, 1, 0, 0, torch.uint8, (16, 2, 256, 8, 64))
    backend = LocalCPUBackend(config, metadata, "cpu")
    return LmCache(LMCServerConnector(host, int(port), asyncio.get_running_loop(), backend))
