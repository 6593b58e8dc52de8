"""memcached through pymemcache: set_many, get_many.

The client has no question for many keys that leaves the values behind, so that a match reads them. (Its raw_command can
ask with meta commands, but loses what came before where an answer arrives in several pieces.)
"""

from __future__ import annotations

from collections.abc import Sequence

from pymemcache.client.base import Client

from kvgw.bench.plan import BenchError
from tests.bench_peers.peers import Buffer, expect


class Memcached:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def put(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> None:
        # The client takes bytes only.
        values = {_name(key): bytes(chunk) for key, chunk in zip(keys, chunks, strict=True)}
        failed = self._client.set_many(values, noreply=False)
        if failed:
            raise BenchError(f"memcached stored all but {len(failed)} of {len(keys)} chunks")

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> Sequence[Buffer]:
        names = [_name(key) for key in keys]
        found = self._client.get_many(names)
        expect("get_many", len(found), keys)
        return [found[name] for name in names]

    async def match(self, keys: Sequence[bytes]) -> None:
        expect("get_many", len(self._client.get_many([_name(key) for key in keys])), keys)

    async def delete(self, keys: Sequence[bytes]) -> None:
        self._client.delete_many([_name(key) for key in keys], noreply=False)


def _name(key: bytes) -> str:
    return key.hex()


async def connect(where: str, memory: Sequence[memoryview]) -> Memcached:
    return Memcached(Client(where, timeout=60, connect_timeout=10, no_delay=True))
