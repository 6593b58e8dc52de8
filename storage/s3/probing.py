"""What a bucket can do, tried out for the operator."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Final, Literal, TypeAlias

from botocore.exceptions import ClientError

from storage.errors import BlobMissing, StorageError, TierUnavailable
from storage.ports import Clock
from storage.s3.api import PutAnswer
from storage.s3.connection import S3Connection
from storage.s3.download import Interrupted, fill
from storage.s3.erasure import Eraser
from storage.s3.errors import code_of
from storage.s3.options import S3Options

_CONTENT: Final = b"kvgw probes this bucket"
_OTHER_MD5: Final = base64.b64encode(bytes(16)).decode()

_REFUSALS: Final = frozenset(
    {"BadDigest", "InvalidDigest", "PreconditionFailed", "412", "ConditionalRequestConflict", "409"}
)
_SKEW_S: Final = 60.0
_RACERS: Final = 8

Step: TypeAlias = Callable[[], Awaitable[bool]]
Versioning: TypeAlias = Literal["kept", "none", "unknown"]


@dataclass(frozen=True, slots=True)
class S3Capabilities:
    """What was found; none where it could not be tried. `messages` say what is wrong and what to do.

    `versioning` is ``kept`` if deleted blobs would stay as old versions, now or from earlier; the tier deletes those
    too. With `object_lock` the server may refuse that. `clock_skew_s` is the server's time minus this machine's.
    """

    reachable: bool
    put: bool | None = None
    get: bool | None = None
    delete: bool | None = None
    list: bool | None = None
    range_read: bool | None = None
    checksum_mismatch_rejected: bool | None = None
    conditional_put: bool | None = None
    versioning: Versioning = "unknown"
    object_lock: bool | None = None
    clock_skew_s: float | None = None
    messages: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether the tier can do its work here."""
        return self.reachable and bool(self.put and self.get and self.delete and self.list)


@dataclass
class _Probe:
    """One run: the answers so far, and the messages."""

    connection: S3Connection
    eraser: Eraser
    clock: Clock
    key: str
    messages: list[str] = field(default_factory=list)

    @property
    def raced(self) -> str:
        return f"{self.key}-raced"

    @property
    def steps(self) -> dict[str, Step]:
        """What is tried on an object once it is stored, in order."""
        return {
            "get": self.get,
            "list": self.list,
            "range": self.get_range,
            "condition": self.refuses_second_put,
            "checksum": self.refuses_other_checksum,
        }

    async def attempt(self, step: Step) -> bool:
        """Run one step; an error is a no, and a message."""
        try:
            return await step()
        except StorageError as error:
            self.messages.append(str(error))
            return False

    async def skew(self) -> float | None:
        """Seconds by which the server's clock is ahead. Raises `StorageError` if there is no usable answer."""
        try:
            async with self.connection.request("look up the bucket") as client:
                answer = await client.head_bucket(**self.connection.bucket)
        except BlobMissing as error:
            raise TierUnavailable(f"there is no {self.connection.options.place}; make the bucket") from error
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        if date is None:
            return None
        return parsedate_to_datetime(date).timestamp() - self.clock.now_ms() / 1000

    async def put(self) -> bool:
        async with self.connection.request("put a probe") as client:
            answer = await client.put_object(**self.connection.bucket, Key=self.key, Body=_CONTENT)
        return bool(answer.get("ETag"))

    async def get(self) -> bool:
        target = bytearray(len(_CONTENT))
        async with self.connection.request("get the probe") as client:
            try:
                await fill(await client.get_object(**self.connection.bucket, Key=self.key), memoryview(target))
            except Interrupted as error:
                raise TierUnavailable(f"could not get the probe: {error}") from error
        return bytes(target) == _CONTENT

    async def get_range(self) -> bool:
        target = bytearray(3)
        async with self.connection.request("get a part of the probe") as client:
            answer = await client.get_object(**self.connection.bucket, Key=self.key, Range="bytes=1-3")
            try:
                if answer.get("ContentLength") != len(target):
                    return False
                count = await answer["Body"].readinto(memoryview(target))
            finally:
                answer["Body"].close()
        return bytes(target[:count]) == _CONTENT[1:4]

    async def list(self) -> bool:
        async with self.connection.request("list the probe") as client:
            answer = await client.list_objects_v2(**self.connection.bucket, Prefix=self.key)
        return [item["Key"] for item in answer.get("Contents", [])] == [self.key]

    async def refuses_other_checksum(self) -> bool:
        async with self.connection.request("put a probe with a wrong checksum") as client:
            bucket = self.connection.bucket
            return await _refused(client.put_object(**bucket, Key=self.key, Body=_CONTENT, ContentMD5=_OTHER_MD5))

    async def refuses_second_put(self) -> bool:
        """Also when many put at once: some servers look first and write later."""
        async with self.connection.request("put the probe again") as client:
            bucket = self.connection.bucket

            async def refused(key: str) -> bool:
                return await _refused(client.put_object(**bucket, Key=key, Body=_CONTENT, IfNoneMatch="*"))

            if not await refused(self.key):
                return False
            racing = [asyncio.ensure_future(refused(self.raced)) for _ in range(_RACERS)]
            await asyncio.wait(racing)
            return sum(racer.result() for racer in racing) == _RACERS - 1

    async def delete(self) -> bool:
        await self.eraser.erase([self.key, self.raced])
        try:
            await self.get()
        except BlobMissing:
            return True
        return False

    async def locked(self) -> bool | None:
        async with self.connection.request("ask for object lock") as client:
            try:
                answer = await client.get_object_lock_configuration(**self.connection.bucket)
            except ClientError as error:
                if code_of(error) in ("ObjectLockConfigurationNotFoundError", "NoSuchObjectLockConfiguration"):
                    return False
                return None
        return answer.get("ObjectLockConfiguration", {}).get("ObjectLockEnabled") == "Enabled"


async def _refused(put: Awaitable[PutAnswer]) -> bool:
    """Whether the server refuses a put as it should."""
    try:
        await put
    except ClientError as error:
        if code_of(error) in _REFUSALS:
            return True
        raise
    return False


async def probe_bucket(connection: S3Connection, eraser: Eraser, clock: Clock) -> S3Capabilities:
    """Try out a bucket step by step; never raises for what the server does."""
    probe = _Probe(connection, eraser, clock, f"{connection.options.prefix}probe/{secrets.token_hex(16)}")
    try:
        skew = await probe.skew()
        versions = await eraser.keeps_versions()
        locked = await probe.locked()
    except StorageError as error:
        return S3Capabilities(reachable=False, messages=(str(error),))
    found: dict[str, bool] = {}
    stored = await probe.attempt(probe.put)
    if stored:
        try:
            for name, step in probe.steps.items():
                found[name] = await probe.attempt(step)
        finally:
            found["delete"] = await probe.attempt(probe.delete)
    return S3Capabilities(
        reachable=True,
        put=stored,
        get=found.get("get"),
        delete=found.get("delete"),
        list=found.get("list"),
        range_read=found.get("range"),
        checksum_mismatch_rejected=found.get("checksum"),
        conditional_put=found.get("condition"),
        versioning="unknown" if versions is None else "kept" if versions else "none",
        object_lock=locked,
        clock_skew_s=skew,
        messages=(*probe.messages, *_advice(connection.options, versions, locked, skew, found.get("condition"))),
    )


def _advice(
    options: S3Options, versions: bool | None, locked: bool | None, skew: float | None, conditional: bool | None
) -> list[str]:
    advice = []
    if conditional is False:
        advice.append(
            f"{options.place} does not keep the first of several conditional puts: with the keys in S3 (keys.store), "
            "make namespaces and rotate keys through one gateway at a time; blobs do not depend on it"
        )
    if versions:
        advice.append(
            f"{options.place} keeps versions: each deletion costs extra requests; a bucket without versioning is better"
        )
    if locked:
        advice.append(
            f"{options.place} has object lock: deletions may be refused until a blob's lock ends; use a bucket without"
        )
    if skew is not None and abs(skew) > _SKEW_S:
        advice.append(
            f"the clock of {options.place} is {skew:+.0f} s off this machine's; synchronise them, S3 refuses requests "
            "at 15 minutes"
        )
    return advice
