"""Redis through redis-py with hiredis: a pipeline of SET, one MGET, one EXISTS."""

from __future__ import annotations

from collections.abc import Sequence

import redis

from tests.bench_peers.peers import Buffer, expect


class RedisPy:
    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    async def put(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key, chunk in zip(keys, chunks, strict=True):
            pipeline.set(key, chunk)
        expect("SET", sum(pipeline.execute()), keys)

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> Sequence[Buffer]:
        values = [value for value in self._client.mget(keys) if value is not None]
        expect("MGET", len(values), keys)
        return values

    async def match(self, keys: Sequence[bytes]) -> None:
        expect("EXISTS", self._client.exists(*keys), keys)

    async def delete(self, keys: Sequence[bytes]) -> None:
        expect("DEL", self._client.delete(*keys), keys)


async def connect(where: str, memory: Sequence[memoryview]) -> RedisPy:
    return RedisPy(redis.Redis(unix_socket_path=where.removeprefix("unix:"), socket_timeout=60))
