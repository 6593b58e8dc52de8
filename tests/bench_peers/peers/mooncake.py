"""Mooncake Store over TCP with registered buffers: batch_put_from, batch_get_into, batch_is_exist.

``python -m tests.bench_peers.peers.mooncake MASTER_PORT OWN_PORT BYTES`` is the process whose memory holds the chunks.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Final

from mooncake.store import MooncakeDistributedStore

from kvgw.bench.plan import MIB, BenchError
from tests.bench_peers.peers import Buffer, expect

LOCAL_BYTES: Final = 64 * MIB
"""The client library's own buffer; what it moves lies in registered memory."""


class Mooncake:
    def __init__(self, store: MooncakeDistributedStore) -> None:
        self._store = store

    async def put(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> None:
        codes = self._store.batch_put_from(
            _names(keys), [_address(one) for one in chunks], [len(one) for one in chunks]
        )
        expect("batch_put_from", codes.count(0), keys)

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> Sequence[Buffer]:
        sizes = [len(one) for one in into]
        read = self._store.batch_get_into(_names(keys), [_address(one) for one in into], sizes)
        if list(read) != sizes:
            raise BenchError(f"batch_get_into read {read} where {sizes} bytes were stored")
        return into

    async def match(self, keys: Sequence[bytes]) -> None:
        expect("batch_is_exist", list(self._store.batch_is_exist(_names(keys))).count(1), keys)

    async def delete(self, keys: Sequence[bytes]) -> None:
        # What was read a moment ago is leased, and goes all the same.
        expect("batch_remove", list(self._store.batch_remove(_names(keys), True)).count(0), keys)


def _names(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _set_up(master: int, own: int, segment_bytes: int) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    code = store.setup(f"127.0.0.1:{own}", "P2PHANDSHAKE", segment_bytes, LOCAL_BYTES, "tcp", "", f"127.0.0.1:{master}")
    if code:
        raise BenchError(f"Mooncake's set-up ended with code {code}")
    return store


async def connect(where: str, memory: Sequence[memoryview]) -> Mooncake:
    master, own = map(int, where.split(","))
    store = _set_up(master, own, 0)
    for view in memory:
        code = store.register_buffer(_address(view), len(view))
        if code:
            raise BenchError(f"Mooncake did not take {len(view)} bytes of memory: code {code}")
    return Mooncake(store)


def main() -> None:
    """Hold memory until standard input ends."""
    master, own, size = map(int, sys.argv[1:])
    store = _set_up(master, own, size)
    sys.stdout.write('{"is":"segment"}\n')
    sys.stdout.flush()
    sys.stdin.buffer.read()
    store.close()


if __name__ == "__main__":
    main()
