"""S3 through aiobotocore as fast as it gets: no checksums, unsigned payloads, bodies in pieces, reads into place."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from aiobotocore.config import AioConfig

from kvgw.bench.plan import KIB, BenchError
from storage.s3.upload import body_of
from tests.bench_peers.peers import Buffer
from tests.bench_peers.peers.s3_default import DefaultS3, open_client
from tests.bench_peers.places import BucketPlace

PIECE_BYTES: Final = 256 * KIB


class TunedS3(DefaultS3):
    """All chunks of a call at once, from where they lie and to where they belong."""

    async def put(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> None:
        await asyncio.gather(*(self._put(key, body_of(chunk)) for key, chunk in zip(keys, chunks, strict=True)))

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> Sequence[Buffer]:
        await asyncio.gather(*(self._get_into(key, target) for key, target in zip(keys, into, strict=True)))
        return into

    async def _get_into(self, key: bytes, target: memoryview) -> None:
        answer = await self._client.get_object(Bucket=self._bucket, Key=f"bench/{key.hex()}")
        at = 0
        async with answer["Body"] as body:
            async for piece in body.iter_chunks(PIECE_BYTES):
                target[at : at + len(piece)] = piece
                at += len(piece)
        if at != len(target):
            raise BenchError(f"S3 answered with {at} bytes where {len(target)} were stored")


async def connect(where: str, memory: Sequence[memoryview]) -> TunedS3:
    place = BucketPlace.parse(where)
    config = AioConfig(
        signature_version="s3v4",
        s3={"addressing_style": "path", "payload_signing_enabled": False},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        max_pool_connections=32,
    )
    return TunedS3(await open_client(place, config), place.bucket)
