"""Small objects under names of the caller's choosing, in the same bucket but outside the blobs' prefix.

For what must be shared by all gateways and is no blob: wrapped namespace keys. A few hundred bytes each. They are
replaced in place, so each goes with a digest that the server checks: some take an upload that ended early for an empty
object.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncIterator
from typing import Final, Self

from botocore.exceptions import ClientError

from storage.errors import TierUnavailable
from storage.s3.api import ListAnswer
from storage.s3.connection import S3Connection
from storage.s3.download import Interrupted, fill
from storage.s3.erasure import Eraser
from storage.s3.errors import code_of
from storage.s3.options import S3Options

OBJECT_BYTES_MAX: Final = 4 * 1024 * 1024

_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}(?:/[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}){0,3}")
_MISSING: Final = frozenset({"NoSuchKey", "404"})
_EXISTS: Final = frozenset({"PreconditionFailed", "412", "ConditionalRequestConflict", "409"})


class S3Objects:
    """Objects below ``options.prefix``. Raises `TierUnavailable` and `TierMisconfigured` as the tier does."""

    def __init__(self, options: S3Options) -> None:
        self._connection = S3Connection(options)
        self._eraser = Eraser(self._connection)

    @property
    def place(self) -> str:
        """Bucket, endpoint and prefix, for sentences."""
        return f"{self._connection.options.place} under {self._connection.options.prefix!r}"

    async def get(self, name: str) -> bytes | None:
        """The object's bytes, or None when there is no such object."""
        key = self._key(name)
        async with self._connection.request(f"read {key}") as client:
            try:
                answer = await client.get_object(**self._connection.bucket, Key=key)
            except ClientError as error:
                if code_of(error) in _MISSING:
                    return None
                raise
            length = answer.get("ContentLength", -1)
            if not 0 <= length <= OBJECT_BYTES_MAX:
                answer["Body"].close()
                raise TierUnavailable(f"{key} in {self.place} has {length} bytes; at most {OBJECT_BYTES_MAX} are read")
            data = bytearray(length)
            try:
                await fill(answer, memoryview(data))
            except Interrupted as error:
                raise TierUnavailable(f"could not read {key} in {self.place}: {error}") from error
            return bytes(data)

    async def put(self, name: str, data: bytes) -> None:
        """Write the object, replacing one that is there."""
        key = self._key(name)
        async with self._connection.request(f"write {key}") as client:
            await client.put_object(**self._connection.bucket, Key=key, Body=data, ContentMD5=_digest(data))

    async def put_first(self, name: str, data: bytes) -> bool:
        """Write the object unless there is one; False when there is.

        Only as good as the server's conditional writes: read back what stands before relying on it.
        """
        key = self._key(name)
        async with self._connection.request(f"write {key}") as client:
            try:
                await client.put_object(
                    **self._connection.bucket, Key=key, Body=data, ContentMD5=_digest(data), IfNoneMatch="*"
                )
            except ClientError as error:
                if code_of(error) in _EXISTS:
                    return False
                raise
        return True

    async def names(self) -> AsyncIterator[str]:
        """The names of all objects below the prefix that could be ours, in the order of their bytes."""
        token: str | None = ""
        while token is not None:
            page = await self._page(token)
            for item in page.get("Contents", []):
                name = item["Key"].removeprefix(self._connection.options.prefix)
                if _NAME.fullmatch(name) is not None:
                    yield name
            token = page.get("NextContinuationToken")

    async def delete(self, name: str) -> None:
        """Delete the object with all its versions; one that is not there is no error."""
        await self._eraser.erase([self._key(name)])

    async def aclose(self) -> None:
        """Close the connections."""
        await self._connection.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _page(self, token: str) -> ListAnswer:
        bucket, prefix = self._connection.bucket, self._connection.options.prefix
        async with self._connection.request("list objects") as client:
            if token:
                return await client.list_objects_v2(**bucket, Prefix=prefix, ContinuationToken=token)
            return await client.list_objects_v2(**bucket, Prefix=prefix)

    def _key(self, name: str) -> str:
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"{name!r} is not an object name")
        return f"{self._connection.options.prefix}{name}"


def _digest(data: bytes) -> str:
    """What every S3 server holds an object against before it takes it."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
