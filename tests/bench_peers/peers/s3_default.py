"""S3 through aiobotocore as it comes: default checksums and signing, bytes in, read() out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aiobotocore.session import get_session

from tests.bench_peers.peers import Buffer
from tests.bench_peers.places import BucketPlace


class DefaultS3:
    """All chunks of a call at once."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    async def put(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> None:
        # The client takes bytes or files.
        await asyncio.gather(*(self._put(key, bytes(chunk)) for key, chunk in zip(keys, chunks, strict=True)))

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> Sequence[Buffer]:
        return await asyncio.gather(*(self._get(key) for key in keys))

    async def match(self, keys: Sequence[bytes]) -> None:
        await asyncio.gather(*(self._client.head_object(Bucket=self._bucket, Key=_name(key)) for key in keys))

    async def delete(self, keys: Sequence[bytes]) -> None:
        await asyncio.gather(*(self._client.delete_object(Bucket=self._bucket, Key=_name(key)) for key in keys))

    async def _put(self, key: bytes, body: Any) -> None:
        await self._client.put_object(Bucket=self._bucket, Key=_name(key), Body=body)

    async def _get(self, key: bytes) -> Buffer:
        answer = await self._client.get_object(Bucket=self._bucket, Key=_name(key))
        async with answer["Body"] as body:
            return await body.read()


def _name(key: bytes) -> str:
    return f"bench/{key.hex()}"


async def open_client(place: BucketPlace, config: Any = None) -> Any:
    """A client that is open for the life of the process."""
    return await (
        get_session()
        .create_client(
            "s3",
            endpoint_url=place.endpoint,
            region_name=place.region,
            aws_access_key_id=place.access_key,
            aws_secret_access_key=place.secret_key,
            config=config,
        )
        .__aenter__()
    )


async def connect(where: str, memory: Sequence[memoryview]) -> DefaultS3:
    place = BucketPlace.parse(where)
    return DefaultS3(await open_client(place), place.bucket)
