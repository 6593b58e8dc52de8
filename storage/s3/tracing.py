"""Looks through a bucket from outside: objects, all their versions and markers, and uploads never completed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from botocore.exceptions import ClientError

from storage.errors import TierUnavailable
from storage.s3.api import ListAnswer, ObjectVersion, UploadsAnswer, VersionsAnswer
from storage.s3.connection import S3Connection
from storage.s3.errors import code_of
from storage.tier import check_name
from storage.tracing import Trace, TraceKind

_UNKNOWN = frozenset({"NotImplemented", "501", "MethodNotAllowed", "405"})
_GONE = frozenset({"NoSuchUpload", "404"})


class S3Tracer:
    """Lists one bucket below the tier's prefix."""

    label = "s3"
    method = "ListObjectsV2, ListObjectVersions and ListMultipartUploads below the prefix"

    def __init__(self, connection: S3Connection) -> None:
        self._connection = connection

    async def traces(self, prefix: str) -> AsyncIterator[Trace]:
        """Everything whose key begins with `prefix`. Raises `TierUnavailable`."""
        async for trace in self._objects(prefix):
            yield trace
        async for trace in self._versions(prefix):
            yield trace
        async for trace in self._uploads(prefix):
            yield trace

    async def clear(self, traces: Sequence[Trace]) -> None:
        """Abort the uploads, and delete the strangers, of `traces`."""
        for trace in traces:
            key = self._connection.options.prefix + trace.name
            if trace.kind == "upload":
                async with self._connection.request(f"abort an upload of {trace.name}") as client:
                    try:
                        await client.abort_multipart_upload(**self._connection.bucket, Key=key, UploadId=trace.version)
                    except ClientError as error:
                        if code_of(error) not in _GONE:
                            raise
            elif trace.kind == "stranger":
                doomed: ObjectVersion = {"Key": key}
                if trace.version:
                    doomed["VersionId"] = trace.version
                async with self._connection.request(f"delete {trace.name}") as client:
                    await client.delete_objects(**self._connection.bucket, Delete={"Objects": [doomed]})

    async def _objects(self, prefix: str) -> AsyncIterator[Trace]:
        token: str | None = ""
        while token is not None:
            answer: ListAnswer
            async with self._connection.request("list objects") as client:
                if token:
                    answer = await client.list_objects_v2(
                        **self._connection.bucket, Prefix=self._key(prefix), ContinuationToken=token
                    )
                else:
                    answer = await client.list_objects_v2(**self._connection.bucket, Prefix=self._key(prefix))
            for item in answer.get("Contents", []):
                yield self._trace("blob", item["Key"], "")
            token = answer.get("NextContinuationToken")

    async def _versions(self, prefix: str) -> AsyncIterator[Trace]:
        key_marker = version_marker = ""
        while True:
            answer: VersionsAnswer
            async with self._connection.request("list versions") as client:
                try:
                    if key_marker:
                        answer = await client.list_object_versions(
                            **self._connection.bucket,
                            Prefix=self._key(prefix),
                            KeyMarker=key_marker,
                            VersionIdMarker=version_marker,
                        )
                    else:
                        answer = await client.list_object_versions(**self._connection.bucket, Prefix=self._key(prefix))
                except ClientError as error:
                    if code_of(error) in _UNKNOWN:
                        return  # a server without versions has none
                    raise
            for item in answer.get("Versions", []):
                yield self._trace("version", item["Key"], item.get("VersionId", "null"))
            for item in answer.get("DeleteMarkers", []):
                yield self._trace("marker", item["Key"], item.get("VersionId", "null"))
            if not answer.get("IsTruncated"):
                return
            key_marker, version_marker = answer.get("NextKeyMarker", ""), answer.get("NextVersionIdMarker", "")
            if not key_marker:
                raise TierUnavailable(f"{self._connection.options.place} lists versions without an end")

    async def _uploads(self, prefix: str) -> AsyncIterator[Trace]:
        key_marker = upload_marker = ""
        while True:
            answer: UploadsAnswer
            async with self._connection.request("list uploads") as client:
                try:
                    if key_marker:
                        answer = await client.list_multipart_uploads(
                            **self._connection.bucket,
                            Prefix=self._key(prefix),
                            KeyMarker=key_marker,
                            UploadIdMarker=upload_marker,
                        )
                    else:
                        answer = await client.list_multipart_uploads(
                            **self._connection.bucket, Prefix=self._key(prefix)
                        )
                except ClientError as error:
                    if code_of(error) in _UNKNOWN:
                        return  # a server without such uploads has none
                    raise
            for item in answer.get("Uploads", []):
                if item["Key"].startswith(self._key(prefix)):
                    yield self._trace("upload", item["Key"], item["UploadId"])
            if not answer.get("IsTruncated"):
                return
            key_marker, upload_marker = answer.get("NextKeyMarker", ""), answer.get("NextUploadIdMarker", "")
            if not key_marker:
                raise TierUnavailable(f"{self._connection.options.place} lists uploads without an end")

    def _key(self, prefix: str) -> str:
        return self._connection.options.prefix + prefix

    def _trace(self, kind: TraceKind, key: str, version: str) -> Trace:
        name = key.removeprefix(self._connection.options.prefix)
        try:
            check_name(name)
        except ValueError:
            return Trace("upload" if kind == "upload" else "stranger", name, version)
        return Trace(kind, name, version)
