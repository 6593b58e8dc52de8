"""Redis through the raw client of `kvgw bench`: what Redis can do when its client wastes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from kvgw.bench.resp import Resp
from kvgw.bench.subjects import RedisSubject
from kvgw.endpoint import parse_endpoint
from tests.bench_peers.peers import Buffer


class RawRedis(RedisSubject):
    """As in `kvgw bench`."""

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> Sequence[Buffer]:  # type: ignore[override]
        await super().get(keys, into)
        return into


async def connect(where: str, memory: Sequence[memoryview]) -> RawRedis:
    return RawRedis(Resp.connect(parse_endpoint(where)))
