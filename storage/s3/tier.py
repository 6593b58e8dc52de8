"""The S3 tier: one object per blob, below a prefix of one bucket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final

from storage.errors import BlobDamaged, BlobMissing, TierMisconfigured, TierUnavailable
from storage.ports import Clock, Workers
from storage.s3.api import ListAnswer, S3Client
from storage.s3.connection import S3Connection
from storage.s3.download import Interrupted, fill
from storage.s3.erasure import Eraser
from storage.s3.options import S3Options
from storage.s3.probing import S3Capabilities, probe_bucket
from storage.s3.tracing import S3Tracer
from storage.s3.upload import UploadBody, body_of
from storage.tier import BlobInfo, check_name
from storage.together import Together

_STATS_AT_ONCE: Final = 16
_PAUSE_S: Final = 0.05


class S3Tier:
    """Blobs as objects ``<prefix><name>`` of a bucket. Made by `open`, which needs no connection."""

    label = "s3"

    def __init__(self, options: S3Options, *, clock: Clock, workers: Workers | None = None) -> None:
        self._options = options
        self._clock = clock
        self._connection = S3Connection(options, workers)
        self._eraser = Eraser(self._connection)

    @classmethod
    async def open(cls, options: S3Options, *, clock: Clock, workers: Workers | None = None) -> S3Tier:
        """Make the tier ready. A server that is away is met by the first request, not here.

        With `workers`, bodies move in their threads, one for each transfer at once, which is much cheaper.
        """
        tier = cls(options, clock=clock, workers=workers)
        if not options.instance_credentials:
            await tier._connection.connected()
        return tier

    async def put(self, name: str, sealed: memoryview) -> None:
        key = self._key(name)
        body = body_of(sealed)
        try:
            async with self._connection.request(f"put blob {name}") as client:
                answer = await client.put_object(
                    **self._connection.bucket, Key=key, Body=body, ContentType="application/octet-stream"
                )
        finally:
            if isinstance(body, UploadBody):
                body.release()
        if not answer.get("ETag"):
            raise TierUnavailable(
                f"{self._options.place} did not confirm blob {name} with an ETag; it may not be stored"
            )

    async def get_into(self, name: str, target: memoryview) -> None:
        key = self._key(name)
        async with self._connection.request(f"get blob {name}") as client:
            attempt = 1
            while not await self._got(client, key, target, last=attempt == self._options.attempts_max):
                await asyncio.sleep(_PAUSE_S * attempt)
                attempt += 1

    async def stat(self, names: Sequence[str]) -> dict[str, int]:
        keys = {name: self._key(name) for name in names}
        lengths: dict[str, int] = {}
        gate = asyncio.Semaphore(_STATS_AT_ONCE)

        async def look_up(name: str, key: str) -> None:
            async with gate:
                length = await self._length(name, key)
            if length is not None:
                lengths[name] = length

        async with Together() as group:
            for name, key in keys.items():
                group.create_task(look_up(name, key))
        if len(lengths) < len(keys):
            await self._check_bucket()
        return lengths

    async def delete(self, names: Sequence[str]) -> None:
        await self._eraser.erase([self._key(name) for name in names])

    async def scan(self) -> AsyncIterator[BlobInfo]:
        token: str | None = ""
        while token is not None:
            page = await self._page(token)
            for item in page.get("Contents", []):
                name = item["Key"].removeprefix(self._options.prefix)
                try:
                    check_name(name)
                except ValueError:
                    continue  # not ours: a probe, or somebody else's object
                yield BlobInfo(name, item["Size"], round(item["LastModified"].timestamp() * 1000))
            token = page.get("NextContinuationToken")

    async def probe(self) -> S3Capabilities:
        """Try out what the bucket can do. Writes only below ``<prefix>probe/`` and cleans up."""
        return await probe_bucket(self._connection, self._eraser, self._clock)

    def tracer(self) -> S3Tracer:
        """Looks through the bucket, over this tier's connections."""
        return S3Tracer(self._connection)

    async def aclose(self) -> None:
        await self._connection.aclose()

    def _key(self, name: str) -> str:
        return self._options.prefix + check_name(name)

    async def _got(self, client: S3Client, key: str, target: memoryview, *, last: bool) -> bool:
        """One attempt at a blob; whether it succeeded. An interruption is an error only at the last attempt."""
        answer = await client.get_object(**self._connection.bucket, Key=key)
        try:
            await fill(answer, target)
        except BlobDamaged as error:
            raise BlobDamaged(f"object {key} in {self._options.place} is damaged: {error}") from error
        except Interrupted as error:
            if last:
                raise error.lasting(f"could not get object {key} in {self._options.place}: {error}") from error
            return False
        return True

    async def _length(self, name: str, key: str) -> int | None:
        try:
            async with self._connection.request(f"look up blob {name}") as client:
                answer = await client.head_object(**self._connection.bucket, Key=key)
        except BlobMissing:
            return None
        return answer["ContentLength"]

    async def _check_bucket(self) -> None:
        """A HEAD has no body, so a missing bucket looks like a missing blob: tell them apart."""
        try:
            async with self._connection.request("look up the bucket") as client:
                await client.head_bucket(**self._connection.bucket)
        except BlobMissing as error:
            raise TierMisconfigured(f"there is no {self._options.place}; make the bucket or name another") from error

    async def _page(self, token: str) -> ListAnswer:
        async with self._connection.request("list blobs") as client:
            if token:
                return await client.list_objects_v2(
                    **self._connection.bucket, Prefix=self._options.prefix, ContinuationToken=token
                )
            return await client.list_objects_v2(**self._connection.bucket, Prefix=self._options.prefix)
