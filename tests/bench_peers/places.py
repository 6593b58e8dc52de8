"""Where an S3 bucket is, in one line for a child process."""

from __future__ import annotations

import msgspec
from msgspec import Struct


class BucketPlace(Struct, frozen=True):
    """A bucket and who may use it. The secret is a test server's own."""

    endpoint: str
    region: str
    bucket: str
    access_key: str
    secret_key: str

    @classmethod
    def parse(cls, line: str) -> BucketPlace:
        return msgspec.json.decode(line, type=BucketPlace)

    def line(self) -> str:
        return msgspec.json.encode(self).decode()
