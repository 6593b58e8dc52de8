"""S3 through obstore, the Python bindings of Rust's object_store: unsigned payloads, bodies from where they lie.

A GET leaves its bytes in memory of Rust's. (Its stream of pieces, copied to where they belong, costs more.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import obstore
from obstore.store import S3Store

from tests.bench_peers.peers import Buffer
from tests.bench_peers.places import BucketPlace


class Obstore:
    """All chunks of a call at once, a request each."""

    def __init__(self, store: S3Store) -> None:
        self._store = store

    async def put(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> None:
        await asyncio.gather(*(self._put(key, chunk) for key, chunk in zip(keys, chunks, strict=True)))

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> Sequence[Buffer]:
        return await asyncio.gather(*(self._get(key) for key in keys))

    async def match(self, keys: Sequence[bytes]) -> None:
        await asyncio.gather(*(obstore.head_async(self._store, _name(key)) for key in keys))

    async def delete(self, keys: Sequence[bytes]) -> None:
        await obstore.delete_async(self._store, [_name(key) for key in keys])

    async def _put(self, key: bytes, chunk: memoryview) -> None:
        # It would send bodies over 5 MiB as multipart uploads.
        await obstore.put_async(self._store, _name(key), chunk, use_multipart=False)

    async def _get(self, key: bytes) -> Buffer:
        answer = await obstore.get_async(self._store, _name(key))
        return memoryview(await answer.bytes_async())


def _name(key: bytes) -> str:
    return f"bench/{key.hex()}"


async def connect(where: str, memory: Sequence[memoryview]) -> Obstore:
    place = BucketPlace.parse(where)
    store = S3Store(
        place.bucket,
        endpoint=place.endpoint,
        region=place.region,
        access_key_id=place.access_key,
        secret_access_key=place.secret_key,
        unsigned_payload=True,
        client_options={"allow_http": True, "timeout": timedelta(seconds=60)},
    )
    return Obstore(store)
