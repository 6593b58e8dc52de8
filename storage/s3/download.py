"""Answers to a GET, streamed into their target: exactly the right length, or an error that says whose fault it is."""

from __future__ import annotations

from http.client import HTTPException
from typing import Final

import aiohttp
from botocore.exceptions import FlexibleChecksumError, HTTPClientError, IncompleteReadError

from storage.errors import BlobDamaged, StorageError, TierUnavailable
from storage.s3.api import Body, GetAnswer
from storage.s3.bulk import Streamed

_READ_BYTES: Final = 256 * 1024
_WHOLE_OBJECT: Final = 200


class Interrupted(Exception):
    """The transfer failed in a way that says nothing about the blob, so another attempt is worth it.

    `lasting` is what it means if every attempt ends like this.
    """

    def __init__(self, reason: str, lasting: type[StorageError] = TierUnavailable) -> None:
        super().__init__(reason)
        self.lasting = lasting


async def fill(answer: GetAnswer, target: memoryview) -> None:
    """Stream a whole answer into `target`. Raises `Interrupted`, or `BlobDamaged` if its length is another."""
    try:
        _check(answer, len(target))
        await _stream(answer["Body"], target)
    except FlexibleChecksumError as error:
        raise Interrupted("its checksum is wrong", lasting=BlobDamaged) from error
    except (aiohttp.ClientError, HTTPClientError, IncompleteReadError, OSError, HTTPException) as error:
        raise Interrupted(f"the answer broke off: {error}") from error
    finally:
        answer["Body"].close()


def _check(answer: GetAnswer, length: int) -> None:
    """Whatever is not a plain answer with the whole object was not made by the S3 server that stored the blob."""
    status = answer["ResponseMetadata"]["HTTPStatusCode"]
    if status != _WHOLE_OBJECT:
        raise Interrupted(f"the answer has status {status} instead of {_WHOLE_OBJECT}")
    if answer.get("ContentEncoding"):
        raise Interrupted(f"the answer is encoded as {answer['ContentEncoding']!r}, which was not asked for")
    if "xml" in answer.get("ContentType", ""):
        raise Interrupted("the answer is a document, not a blob")
    if "ContentLength" not in answer:
        raise Interrupted("the answer does not say its length")
    if answer["ContentLength"] != length:
        raise BlobDamaged(f"it has {answer['ContentLength']} bytes, not {length}")


async def _stream(body: Body, target: memoryview) -> None:
    at = 0
    if isinstance(body.raw_stream, Streamed):
        at = await body.raw_stream.read_into(target)
        if at < len(target):
            raise Interrupted(f"the answer ended after {at} of {len(target)} bytes")
        return
    while at < len(target):
        count = await body.readinto(target[at : at + _READ_BYTES])
        if count == 0:
            raise Interrupted(f"the answer ended after {at} of {len(target)} bytes")
        at += count
    # The end has to be seen: only then is the checksum checked and the connection free for the next request.
    await body.readinto(memoryview(bytearray(1)))
