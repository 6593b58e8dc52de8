"""The S3 calls that are used, typed. aiobotocore brings no types; its client is cast to `S3Client` where it is made.

Names of parameters and answers are the S3 API's own.
"""
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NotRequired, Protocol, TypedDict

from storage.s3.upload import UploadBody


class BucketName(TypedDict):
    """Arguments that every call starts with."""

    Bucket: str
    ExpectedBucketOwner: NotRequired[str]


class Metadata(TypedDict):
    HTTPStatusCode: int
    HTTPHeaders: dict[str, str]


class Answer(TypedDict):
    ResponseMetadata: Metadata


class PutAnswer(Answer):
    ETag: NotRequired[str]


class HeadAnswer(Answer):
    ContentLength: int


class Body(Protocol):
    """A streamed answer."""

    @property
    def raw_stream(self) -> object: ...

    async def readinto(self, b: memoryview) -> int: ...

    def close(self) -> None: ...


class GetAnswer(Answer):
    Body: Body
    ContentLength: NotRequired[int]
    ContentEncoding: NotRequired[str]
    ContentType: NotRequired[str]


class ObjectVersion(TypedDict):
    Key: str
    VersionId: NotRequired[str]


class Doomed(TypedDict):
    Objects: Sequence[ObjectVersion]


class DeletedObject(TypedDict):
    Key: str
    DeleteMarker: NotRequired[bool]


class DeletionError(TypedDict):
    Key: NotRequired[str]
    Code: NotRequired[str]
    Message: NotRequired[str]


class DeleteAnswer(Answer):
    Deleted: NotRequired[list[DeletedObject]]
    Errors: NotRequired[list[DeletionError]]


class ListedObject(TypedDict):
    Key: str
    Size: int
    LastModified: datetime


class ListAnswer(Answer):
    Contents: NotRequired[list[ListedObject]]
    NextContinuationToken: NotRequired[str]


class VersionsAnswer(Answer):
    Versions: NotRequired[list[ObjectVersion]]
    DeleteMarkers: NotRequired[list[ObjectVersion]]
    IsTruncated: NotRequired[bool]
    NextKeyMarker: NotRequired[str]
    NextVersionIdMarker: NotRequired[str]


class ListedUpload(TypedDict):
    Key: str
    UploadId: str


class UploadsAnswer(Answer):
    Uploads: NotRequired[list[ListedUpload]]
    IsTruncated: NotRequired[bool]
    NextKeyMarker: NotRequired[str]
    NextUploadIdMarker: NotRequired[str]


class VersioningAnswer(Answer):
    Status: NotRequired[str]


class LockConfiguration(TypedDict):
    ObjectLockEnabled: NotRequired[str]


class LockAnswer(Answer):
    ObjectLockConfiguration: NotRequired[LockConfiguration]


class S3Client(Protocol):
    """A client as aiobotocore makes it; raises botocore's errors."""

    async def put_object(
        self,
        *,
        Bucket: str,
        ExpectedBucketOwner: str = ...,
        Key: str,
        Body: bytes | UploadBody,
        ContentType: str = ...,
        ContentMD5: str = ...,
        IfNoneMatch: str = ...,
    ) -> PutAnswer: ...

    async def get_object(
        self, *, Bucket: str, Key: str, ExpectedBucketOwner: str = ..., Range: str = ...
    ) -> GetAnswer: ...

    async def head_object(self, *, Bucket: str, Key: str, ExpectedBucketOwner: str = ...) -> HeadAnswer: ...

    async def head_bucket(self, *, Bucket: str, ExpectedBucketOwner: str = ...) -> Answer: ...

    async def delete_objects(self, *, Bucket: str, Delete: Doomed, ExpectedBucketOwner: str = ...) -> DeleteAnswer: ...

    async def list_objects_v2(
        self, *, Bucket: str, Prefix: str, ExpectedBucketOwner: str = ..., ContinuationToken: str = ...
    ) -> ListAnswer: ...

    async def list_object_versions(
        self,
        *,
        Bucket: str,
        Prefix: str,
        ExpectedBucketOwner: str = ...,
        KeyMarker: str = ...,
        VersionIdMarker: str = ...,
    ) -> VersionsAnswer: ...

    async def list_multipart_uploads(
        self,
        *,
        Bucket: str,
        Prefix: str,
        ExpectedBucketOwner: str = ...,
        KeyMarker: str = ...,
        UploadIdMarker: str = ...,
    ) -> UploadsAnswer: ...

    async def abort_multipart_upload(
        self, *, Bucket: str, Key: str, UploadId: str, ExpectedBucketOwner: str = ...
    ) -> Answer: ...

    async def get_bucket_versioning(self, *, Bucket: str, ExpectedBucketOwner: str = ...) -> VersioningAnswer: ...

    async def get_object_lock_configuration(self, *, Bucket: str, ExpectedBucketOwner: str = ...) -> LockAnswer: ...
