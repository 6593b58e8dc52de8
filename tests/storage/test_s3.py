"""The S3 tier against a real server: the conformance suite, versions, locks, crashes, and what a probe finds."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from typing import Any

import pytest

from kvgw.runtime import SystemClock, ThreadWorkers
from storage.errors import BlobMissing, TierMisconfigured, TierUnavailable
from storage.limited import LimitedTier
from storage.s3 import S3Options, S3Tier
from storage.tier import Tier
from tests.support.aio import aio
from tests.support.seaweed import Seaweed
from tests.support.tier_conformance import MIB, TierConformance, content, listed, name, opened, read

pytestmark = [pytest.mark.s3, pytest.mark.timeout(60)]

prefixes = (f"p{number}/" for number in itertools.count())


def options_for(server: Seaweed, **settings: Any) -> S3Options:
    defaults = {
        "bucket": server.bucket,
        "prefix": next(prefixes),
        "endpoint_url": server.endpoint,
        "region": server.region,
        "addressing_style": server.addressing,
        "checksums": server.checksums,
        "access_key_id": server.access_key,
        "secret_access_key": server.secret_key,
        "request_timeout_s": 20.0,
    }
    return S3Options(**{**defaults, **settings})


@asynccontextmanager
async def s3(server: Seaweed, **settings: Any) -> AsyncIterator[S3Tier]:
    with closing(ThreadWorkers(8)) as workers:
        tier = await S3Tier.open(options_for(server, **settings), clock=SystemClock(), workers=workers)
        try:
            yield tier
        finally:
            await tier.aclose()


@pytest.fixture
def bucket(seaweed: Seaweed, request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    """A client behind the tier's back, and a new bucket of its own, with or without object lock."""
    name = f"b{os.getpid()}-{next(prefixes)[1:-1]}"
    lock = bool(getattr(request, "param", False))
    with seaweed.client() as client:
        client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=lock)
        yield client, name


def versions(client: Any, bucket: str) -> list[str]:
    answer = client.list_object_versions(Bucket=bucket)
    return [item["Key"] for item in answer.get("Versions", []) + answer.get("DeleteMarkers", [])]


class TestS3Tier(TierConformance):
    @pytest.fixture(autouse=True)
    def _server(self, seaweed: Seaweed) -> None:
        self.server = seaweed

    def open_tier(self) -> AbstractAsyncContextManager[Tier]:
        return s3(self.server)


class TestS3TierWithChecksums(TestS3Tier):
    """Bodies do not move in worker threads then."""

    def open_tier(self) -> AbstractAsyncContextManager[Tier]:
        return s3(self.server, checksums="when_supported")


class TestLimitedS3Tier(TestS3Tier):
    def open_tier(self) -> AbstractAsyncContextManager[Tier]:
        @asynccontextmanager
        async def limited() -> AsyncIterator[Tier]:
            async with s3(self.server) as tier:
                yield LimitedTier(tier, 4, bytes_max=8 * MIB)

        return limited()


@aio
async def test_objects_lie_below_the_prefix_and_strangers_are_not_listed(seaweed: Seaweed) -> None:
    async with s3(seaweed, prefix="site-a/kv/") as tier, s3(seaweed, prefix="site-b/kv/") as other:
        await tier.put(name(1), memoryview(b"x"))
        await other.put(name(2), memoryview(b"y"))
        with seaweed.client() as client:
            client.put_object(Bucket=seaweed.bucket, Key="site-a/kv/v1/notes.txt", Body=b"mine")
            assert client.get_object(Bucket=seaweed.bucket, Key="site-a/kv/" + name(1))["Body"].read() == b"x"
        assert [blob.name for blob in await listed(tier)] == [name(1)]


@aio
async def test_more_blobs_than_a_page_or_a_batch_holds(seaweed: Seaweed) -> None:
    async with s3(seaweed) as tier:
        limited = LimitedTier(tier, 16)
        blobs = [name(number) for number in range(1050)]
        async with asyncio.TaskGroup() as group:
            for blob in blobs:
                group.create_task(limited.put(blob, memoryview(b"x")))
        assert sorted(blob.name for blob in await listed(tier)) == sorted(blobs)
        await tier.delete(blobs)
        assert await listed(tier) == []


@pytest.mark.parametrize("then", ["Enabled", "Suspended"])
@aio
async def test_R63_every_version_is_deleted(seaweed: Seaweed, bucket: tuple[Any, str], then: str) -> None:
    client, bucket_name = bucket
    client.put_bucket_versioning(Bucket=bucket_name, VersioningConfiguration={"Status": "Enabled"})
    async with s3(seaweed, bucket=bucket_name, prefix="") as tier:
        for _ in range(3):
            await tier.put(name(1), memoryview(b"x"))
        client.delete_object(Bucket=bucket_name, Key=name(1))
        await tier.put(name(2), memoryview(b"kept"))
        client.put_bucket_versioning(Bucket=bucket_name, VersioningConfiguration={"Status": then})
        await tier.put(name(1), memoryview(b"x"))
        assert len(versions(client, bucket_name)) >= 5
        await tier.delete([name(1), name(3)])
        assert set(versions(client, bucket_name)) == {name(2)}
        assert (await tier.probe()).versioning == "kept"


@aio
async def test_R63_versioning_switched_on_later_is_noticed(seaweed: Seaweed, bucket: tuple[Any, str]) -> None:
    client, bucket_name = bucket
    async with s3(seaweed, bucket=bucket_name, prefix="") as tier:
        await tier.put(name(1), memoryview(b"x"))
        await tier.delete([name(1)])
        client.put_bucket_versioning(Bucket=bucket_name, VersioningConfiguration={"Status": "Enabled"})
        for number in (1, 2):
            await tier.put(name(number), memoryview(b"x"))
        await tier.delete([name(1), name(2)])
        assert versions(client, bucket_name) == []


@pytest.mark.parametrize("bucket", [True], indirect=True, ids=["locked"])
@aio
async def test_R63_a_lock_keeps_a_deletion_open(seaweed: Seaweed, bucket: tuple[Any, str]) -> None:
    client, bucket_name = bucket
    rule = {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}}
    client.put_object_lock_configuration(
        Bucket=bucket_name, ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule}
    )
    async with s3(seaweed, bucket=bucket_name, prefix="") as tier:
        await tier.put(name(1), memoryview(b"x"))
        with pytest.raises(TierUnavailable, match=rf"1 deletions were refused in bucket '{bucket_name}'"):
            await tier.delete([name(1), name(2)])
        found = await tier.probe()
        assert found.object_lock is True
        assert found.delete is False
        assert not found.usable
        assert any("object lock" in message for message in found.messages)


@aio
async def test_the_probe_tells_what_works_and_leaves_nothing(seaweed: Seaweed) -> None:
    async with s3(seaweed, prefix="probed/") as tier:
        found = await tier.probe()
    assert found.usable
    assert (found.range_read, found.checksum_mismatch_rejected, found.conditional_put) == (True, True, True)
    assert (found.versioning, found.object_lock) == ("none", False)
    assert found.clock_skew_s is not None
    assert abs(found.clock_skew_s) < 5
    assert found.messages == ()
    with seaweed.client() as client:
        assert "Contents" not in client.list_objects_v2(Bucket=seaweed.bucket, Prefix="probed/")


class LateClock(SystemClock):
    def now_ms(self) -> int:
        return super().now_ms() - 300_000


@aio
async def test_R59_the_probe_compares_the_clocks(seaweed: Seaweed) -> None:
    tier = await S3Tier.open(options_for(seaweed), clock=LateClock())
    async with opened(tier):
        found = await tier.probe()
    assert found.clock_skew_s is not None
    assert 290 < found.clock_skew_s < 310
    assert any("+300 s off" in message or "+299 s off" in message for message in found.messages)


@aio
async def test_a_missing_bucket_is_not_a_missing_blob(seaweed: Seaweed) -> None:
    async with s3(seaweed, bucket="no-such-bucket") as tier:
        expected = r"there is no bucket 'no-such-bucket' at http://127.0.0.1:\d+; make the bucket or name another"
        with pytest.raises(TierMisconfigured, match=expected):
            await read(tier, name(1), 1)
        with pytest.raises(TierMisconfigured, match=expected):
            await tier.stat([name(1)])
        with pytest.raises(TierMisconfigured, match=expected):
            await listed(tier)
        with pytest.raises(TierMisconfigured, match=expected):
            await tier.delete([name(1)])
        found = await tier.probe()
        assert not found.reachable
        assert any("make the bucket" in message for message in found.messages)


@pytest.mark.parametrize(("part", "value"), [("access_key_id", "nobody"), ("secret_access_key", "wrong-secret")])
@aio
async def test_wrong_credentials_are_named_but_not_shown(seaweed: Seaweed, part: str, value: str) -> None:
    async with s3(seaweed, **{part: value}) as tier:
        with pytest.raises(TierMisconfigured, match="does not accept the access key") as caught:
            await tier.put(name(1), memoryview(b"x"))
        assert seaweed.secret_key not in str(caught.value)
        assert "wrong-secret" not in str(caught.value)
        with pytest.raises(TierMisconfigured):
            await tier.stat([name(1)])


@aio
async def test_a_killed_server_is_an_outage_and_its_return_is_noticed(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Seaweed(tmp_path_factory.mktemp("own")) as server:
        async with s3(server, attempts_max=1) as tier:
            await tier.put(name(1), memoryview(content(MIB)))
            await asyncio.to_thread(server.kill)
            for call in (tier.put(name(2), memoryview(b"x")), tier.stat([name(1)]), tier.delete([name(1)])):
                with pytest.raises(TierUnavailable):
                    await call
            with pytest.raises(TierUnavailable):
                await read(tier, name(1), MIB)
            assert not (await tier.probe()).reachable
            await asyncio.to_thread(server.start)
            assert await read(tier, name(1), MIB) == content(MIB)
            with pytest.raises(BlobMissing):
                await read(tier, name(2), 1)
