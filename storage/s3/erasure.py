"""Deletion for good: in a bucket that keeps versions, every version and every marker goes too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from botocore.exceptions import ClientError

from storage.errors import TierUnavailable
from storage.s3.api import ObjectVersion
from storage.s3.connection import S3Connection
from storage.s3.errors import code_of, plain

BATCH_KEYS: Final = 1000

_KEEPS_VERSIONS: Final = frozenset({"Enabled", "Suspended"})
_NO_ANSWER: Final = frozenset({"AccessDenied", "403", "NotImplemented", "501", "MethodNotAllowed", "405"})
_GONE: Final = frozenset({"NoSuchKey", "NoSuchVersion"})


class Eraser:
    """Deletes keys of one bucket, and finds out whether the bucket keeps versions.

    It asks once. If versioning is switched on later, or may not be asked for, the first deletion shows it: it is
    answered with a marker.
    """

    def __init__(self, connection: S3Connection) -> None:
        self._connection = connection
        self._versioned: bool | None = None

    async def erase(self, keys: Sequence[str]) -> None:
        """Delete all versions of `keys`. Raises `TierUnavailable` if any may still be there."""
        refused: list[str] = []
        for batch in _batches(keys):
            if self._versioned is None:
                self._versioned = await self.keeps_versions() or False
            marked: Sequence[str] = batch
            if not self._versioned:
                errors, marked = await self._delete([{"Key": key} for key in batch])
                refused += errors
            for key in marked:
                self._versioned = True
                refused += await self._erase_versions(key)
        if refused:
            raise TierUnavailable(
                f"{len(refused)} deletions were refused in {self._connection.options.place}, the first: {refused[0]}"
            )

    async def keeps_versions(self) -> bool | None:
        """Whether the bucket keeps old versions, now or from earlier; none if the server does not say."""
        async with self._connection.request("ask for versioning") as client:
            try:
                answer = await client.get_bucket_versioning(**self._connection.bucket)
            except ClientError as error:
                if code_of(error) in _NO_ANSWER:
                    return None
                raise
        return answer.get("Status") in _KEEPS_VERSIONS

    async def _erase_versions(self, key: str) -> list[str]:
        refused: list[str] = []
        versions = await self._versions(key)
        for start in range(0, len(versions), BATCH_KEYS):
            errors, _ = await self._delete(versions[start : start + BATCH_KEYS])
            refused += errors
        return refused

    async def _versions(self, key: str) -> list[ObjectVersion]:
        """Every version and marker of one key."""
        found: list[ObjectVersion] = []
        key_marker = version_marker = ""
        while True:
            async with self._connection.request(f"list the versions of {key}") as client:
                if key_marker:
                    answer = await client.list_object_versions(
                        **self._connection.bucket, Prefix=key, KeyMarker=key_marker, VersionIdMarker=version_marker
                    )
                else:
                    answer = await client.list_object_versions(**self._connection.bucket, Prefix=key)
            items = answer.get("Versions", []) + answer.get("DeleteMarkers", [])
            found += [{"Key": key, "VersionId": item.get("VersionId", "null")} for item in items if item["Key"] == key]
            if not answer.get("IsTruncated"):
                return found
            key_marker, version_marker = answer.get("NextKeyMarker", ""), answer.get("NextVersionIdMarker", "")
            if not key_marker:
                raise TierUnavailable(f"{self._connection.options.place} lists the versions of {key} without an end")

    async def _delete(self, objects: Sequence[ObjectVersion]) -> tuple[list[str], list[str]]:
        """Refusals as sentences, and the keys for which only a marker was set."""
        async with self._connection.request(f"delete {len(objects)} objects") as client:
            answer = await client.delete_objects(**self._connection.bucket, Delete={"Objects": objects})
        refused = [
            f"{error.get('Key', 'a key')}: {error.get('Code', 'no code')} {plain(error.get('Message', ''))}"
            for error in answer.get("Errors", [])
            if error.get("Code") not in _GONE
        ]
        unanswered = len(objects) - len(answer.get("Deleted", [])) - len(answer.get("Errors", []))
        if unanswered > 0:
            refused.append(f"{unanswered} of {len(objects)} keys are not in the answer")
        marked = [item["Key"] for item in answer.get("Deleted", []) if item.get("DeleteMarker")]
        return refused, marked


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    unique = list(dict.fromkeys(keys))
    for start in range(0, len(unique), BATCH_KEYS):
        yield unique[start : start + BATCH_KEYS]
