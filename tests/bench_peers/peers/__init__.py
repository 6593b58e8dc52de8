"""The peers, each through its own client as its users call it. A module imports its library when its peer is opened.

Bytes that a client hands out in memory of its own stay there, uncopied: that favours the peer.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

from kvgw.bench.plan import BenchError

Buffer: TypeAlias = bytes | bytearray | memoryview

MODULES: Final = {
    "redis": "tests.bench_peers.peers.redis_raw",
    "redis-py": "tests.bench_peers.peers.redis_py",
    "memcached": "tests.bench_peers.peers.memcached",
    "lmcache": "tests.bench_peers.peers.lmcache",
    "mooncake": "tests.bench_peers.peers.mooncake",
    "s3-tuned": "tests.bench_peers.peers.s3_tuned",
    "s3-default": "tests.bench_peers.peers.s3_default",
    "s3-obstore": "tests.bench_peers.peers.s3_obstore",
}


class PeerSubject(Protocol):
    """A peer under measurement. Each method raises unless everything was done."""

    async def put(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> None:
        """Store all chunks; returns when the peer has them."""
        ...

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> Sequence[Buffer]:
        """Read all chunks; where they are now: `into`, or memory of the client's own."""
        ...

    async def match(self, keys: Sequence[bytes]) -> None:
        """Find all chunks."""
        ...

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Delete all chunks."""
        ...


async def subject_of(name: str, where: str, memory: Sequence[memoryview]) -> PeerSubject:
    """Connect to the server at `where`. All chunks lie, and all buffers will lie, in `memory`."""
    subject: PeerSubject = await importlib.import_module(MODULES[name]).connect(where, memory)
    return subject


def expect(what: str, count: int, keys: Sequence[bytes]) -> None:
    """Raises `BenchError` unless all were met."""
    if count != len(keys):
        raise BenchError(f"{what} met {count} of {len(keys)} chunks that were just stored")
