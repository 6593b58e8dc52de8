"""S3 in a storm: bodies cut anywhere, errors in rows, lost answers, racing conditional writes (N02, N05, N06, N13)."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from storage.errors import StorageError, TierUnavailable
from tests.storage.test_s3_faults import BINARY, _short_pauses, fake
from tests.support.aio import aio
from tests.support.fake_s3 import HEAD_END, FakeS3, Request, error, reply
from tests.support.tier_conformance import MIB, content, name, read

__all__ = ["_short_pauses"]  # for every test here too

STEP = 64 * 1024
ATTEMPTS = 3


@aio
async def test_N02_a_body_cut_at_any_step_is_an_outage_or_read_again_never_short() -> None:
    data = content(MIB)
    async with fake() as (server, tier):
        await tier.put(name(1), memoryview(data))
        for cut in range(0, MIB, STEP):
            server.faults.extend(reply(200, data[:cut], length=MIB, **BINARY) for _ in range(ATTEMPTS))
            with pytest.raises(TierUnavailable):
                await read(tier, name(1), MIB)
            server.faults.clear()
            server.faults.append(reply(200, data[:cut], length=MIB, **BINARY))
            assert await read(tier, name(1), MIB) == data, f"cut at {cut}, then whole"


STORMS = {
    "500": reply(500, error("InternalError")),
    "503": reply(503, error("SlowDown"), Retry_After="1"),
    "409": reply(409, error("OperationAborted")),
    "412": reply(412, error("PreconditionFailed")),
    "429": reply(429, error("TooManyRequests")),
}


@pytest.mark.parametrize("answer", STORMS.values(), ids=STORMS.keys())
@aio
async def test_N05_a_storm_of_errors_costs_three_attempts_and_a_moment(answer: bytes) -> None:
    data = content(1000)
    async with fake() as (server, tier):
        for call in (lambda: tier.put(name(1), memoryview(data)), lambda: read(tier, name(1), 1000)):
            server.requests.clear()
            server.faults.extend([answer] * 20)
            started = time.monotonic()
            with pytest.raises(StorageError):
                await call()
            assert time.monotonic() - started < 5
            assert len(server.requests) <= ATTEMPTS, "law 9"
            server.faults.clear()
        await tier.put(name(1), memoryview(data))
        assert await read(tier, name(1), 1000) == data, "and all is well afterwards"


@aio
async def test_N05_when_three_in_ten_fail_the_load_grows_by_half_at_most() -> None:
    data, chance = content(1000), random.Random(5)
    async with fake() as (server, tier):
        await tier.put(name(1), memoryview(data))
        server.requests.clear()
        right = 0
        for _ in range(200):
            server.faults.extend(STORMS["503"] if chance.random() < 0.3 else None for _ in range(ATTEMPTS))
            try:
                right += await read(tier, name(1), 1000) == data
            except TierUnavailable:
                continue
            finally:
                server.faults.clear()
        assert right >= 190
        assert len(server.requests) <= 1.5 * 200, f"amplification {len(server.requests) / 200}"


class AnswersLate(FakeS3):
    """Stores an object, and then says that something went wrong."""

    late = 0

    def _behave(self, request: Request) -> bytes:
        answer = super()._behave(request)
        if request.method == "PUT" and self.late:
            self.late -= 1
            return reply(500, error("InternalError"))
        return answer


@aio
async def test_N06_a_put_that_is_repeated_after_it_had_succeeded_leaves_one_object() -> None:
    data = content(100_000)
    server = AnswersLate()
    async with fake(server) as (_, tier):
        server.late = 2
        await tier.put(name(1), memoryview(data))
        assert [request.method for request in server.requests] == ["PUT"] * 3
        assert list(server.objects.values()) == [data], "the same name, the same bytes"
        server.late = 20
        with pytest.raises(TierUnavailable):
            await tier.put(name(2), memoryview(data))
        assert await read(tier, name(1), len(data)) == data


class Conditional(FakeS3):
    """Keeps ``If-None-Match`` as a real server does, or looks first and writes a moment later."""

    def __init__(self, *, atomic: bool) -> None:
        super().__init__()
        self.atomic = atomic

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(HEAD_END)).decode("latin-1")
        method, target, _ = head.split("\r\n")[0].split(" ")
        headers = {key.lower(): value for key, _, value in (line.partition(": ") for line in head.split("\r\n")[1:])}
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue" + HEAD_END)
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        path = target.partition("?")[0]
        query = target.partition("?")[2]
        there = "if-none-match" in headers and path in self.objects
        if not self.atomic:
            await asyncio.sleep(0.05)
        if there:
            writer.write(reply(412, error("PreconditionFailed")))
        elif path in ("/b", "/b/"):
            writer.write(self._bucket(method, query))
        else:
            writer.write(self._behave(Request(method, target, headers, body)))
        await writer.drain()
        return False

    def _bucket(self, method: str, query: str) -> bytes:
        if "versioning" in query:
            return reply(200, b"<VersioningConfiguration/>")
        if "object-lock" in query:
            return reply(404, error("ObjectLockConfigurationNotFoundError"))
        if "list-type" in query:
            keys = "".join(f"<Contents><Key>{path.removeprefix('/b/')}</Key></Contents>" for path in self.objects)
            return reply(200, f"<ListBucketResult>{keys}</ListBucketResult>".encode())
        return reply(200, b"<DeleteResult/>" if method == "POST" else b"")


@pytest.mark.parametrize("atomic", [True, False])
@aio
async def test_N13_a_server_whose_conditional_writes_race_is_told_apart(atomic: bool) -> None:
    async with fake(Conditional(atomic=atomic)) as (_, tier):
        found = await tier.probe()
        assert found.conditional_put is atomic
        assert any("conditional" in message for message in found.messages) is not atomic
        assert found.put
        assert found.get
