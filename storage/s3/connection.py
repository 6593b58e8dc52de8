"""One request at a time limit: the bracket around every call to S3."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from storage.errors import TierUnavailable
from storage.ports import Workers
from storage.s3.api import BucketName, S3Client
from storage.s3.bulk import bulk_http
from storage.s3.client import DirectHttp, GuardedResolver, make_client
from storage.s3.errors import translated
from storage.s3.options import S3Options


class S3Connection:
    """A client made when it is first needed, since instance credentials may take time to be had."""

    def __init__(self, options: S3Options, workers: Workers | None = None) -> None:
        """With `workers`, bodies move in worker threads, as long as neither a proxy nor checksums are in their way."""
        self.options = options
        self.bucket: BucketName = {"Bucket": options.bucket}
        if options.expected_bucket_owner is not None:
            self.bucket["ExpectedBucketOwner"] = options.expected_bucket_owner
        self._client: S3Client | None = None
        self._workers = workers if options.checksums == "when_required" and not options.use_proxy else None
        self._making = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._closed = False

    @asynccontextmanager
    async def request(self, act: str) -> AsyncIterator[S3Client]:
        """The client, for one request with all its retries within the time limit.

        `act` completes the sentence "could not …". Foreign errors leave as `StorageError`.
        """
        try:
            async with asyncio.timeout(self.options.request_timeout_s):
                yield await self.connected()
        except NoCredentialsError as error:
            await self._forget_client()
            raise translated(error, self.options, act) from error
        except (TimeoutError, BotoCoreError, ClientError, aiohttp.ClientError) as error:
            raise translated(error, self.options, act) from error

    async def connected(self) -> S3Client:
        """Make the client unless there is one. Needs no connection; raises botocore's errors."""
        async with self._making:
            if self._closed:
                raise TierUnavailable(f"the S3 tier of {self.options.place} is closed")
            if self._client is None:
                self._client = await self._stack.enter_async_context(make_client(self.options, self._http()))
            return self._client

    def _http(self) -> type[DirectHttp]:
        if self._workers is None:
            return DirectHttp
        return bulk_http(self._workers, GuardedResolver(), self.options.connect_timeout_s)

    async def _forget_client(self) -> None:
        """Drop a client that was made without credentials, so that the next request looks for them again."""
        self._client = None
        await self._stack.aclose()

    async def aclose(self) -> None:
        self._closed = True
        self._client = None
        await self._stack.aclose()
