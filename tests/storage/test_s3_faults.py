"""The S3 tier against a server that misbehaves: what is retried, an outage, or damage, and what is never sent."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from kvgw.runtime import SystemClock, ThreadWorkers
from storage.errors import BlobDamaged, BlobMissing, StorageError, TierFull, TierMisconfigured, TierUnavailable
from storage.s3 import S3Options, S3Tier
from storage.s3.upload import UploadBody
from tests.support.aio import aio
from tests.support.fake_s3 import FakeS3, error, reply
from tests.support.tier_conformance import MIB, content, listed, name, read
from tests.support.tls import self_signed

ETAG = {"ETag": '"x"'}
BINARY = {"Content_Type": "application/octet-stream"}


@asynccontextmanager
async def fake(
    server: FakeS3 | None = None, *, on_loop: bool = False, **settings: Any
) -> AsyncIterator[tuple[FakeS3, S3Tier]]:
    """A tier of a server. Bodies move in worker threads, as in a gateway, or `on_loop`."""
    async with server or FakeS3() as running:
        defaults = {"bucket": "b", "endpoint_url": running.endpoint, "access_key_id": "id", "secret_access_key": "key"}
        options = S3Options(**{**defaults, **settings})
        with closing(ThreadWorkers(8)) as workers:
            tier = await S3Tier.open(options, clock=SystemClock(), workers=None if on_loop else workers)
            try:
                yield running, tier
            finally:
                await tier.aclose()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore pauses for seconds between attempts."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)


CALLS: dict[str, Callable[[S3Tier], Awaitable[object]]] = {
    "put": lambda tier: tier.put(name(1), memoryview(content(MIB))),
    "get": lambda tier: read(tier, name(1), 10),
    "stat": lambda tier: tier.stat([name(1)]),
    "delete": lambda tier: tier.delete([name(1)]),
    "scan": lambda tier: listed(tier),
}
either_way = pytest.mark.parametrize("on_loop", [False, True], ids=["in-threads", "on-loop"])
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


@either_way
@aio
async def test_R57_a_broken_off_body_is_asked_for_again(on_loop: bool) -> None:
    data = content(4 * MIB)
    async with fake(on_loop=on_loop) as (server, tier):
        await tier.put(name(1), memoryview(data))
        server.faults.extend(reply(200, data[: 3 * MIB], length=len(data), **BINARY) for _ in range(2))
        assert await read(tier, name(1), len(data)) == data
        assert len(server.requests) == 4


FALSE_ANSWERS = {
    "broken-off": reply(200, b"01234", length=10, **BINARY),
    "no-length": reply(200, b"0123456789", length=None, **BINARY),
    "another-range": reply(206, b"0123456789", Content_Range="bytes 10-19/100", **BINARY),
    "encoded": reply(200, b"0123456789", Content_Encoding="gzip", **BINARY),
    "error-in-200": reply(200, error("SlowDown"), Content_Type="application/xml"),
    "nothing": b"",
    "not-http": b"\x16\x03\x01 what is this?\r\n\r\n",
    "bad-length": b"HTTP/1.1 200 OK\r\nContent-Length: ten\r\nConnection: close\r\n\r\n0123456789",
}


@either_way
@pytest.mark.parametrize("answer", FALSE_ANSWERS.values(), ids=FALSE_ANSWERS.keys())
@aio
async def test_R57_an_answer_that_no_s3_server_gives_is_an_outage_not_damage(answer: bytes, on_loop: bool) -> None:
    async with fake(on_loop=on_loop) as (server, tier):
        await tier.put(name(1), memoryview(b"0123456789"))
        server.faults.extend([answer] * 9)
        with pytest.raises(TierUnavailable):
            await read(tier, name(1), 10)
        # Where a kept connection ended without an answer, the request is sent once more over a new one.
        assert len(server.requests) <= 1 + (3 if answer else 6)
        server.faults.clear()
        server.faults.append(answer)
        assert await read(tier, name(1), 10) == b"0123456789"


@pytest.mark.parametrize("length", [0, 9, 11, 1000])
@aio
async def test_R57_a_whole_answer_of_another_length_is_damage_and_not_retried(length: int) -> None:
    async with fake() as (server, tier):
        await tier.put(name(1), memoryview(b"0123456789"))
        server.faults.append(reply(200, bytes(length), **BINARY))
        with pytest.raises(BlobDamaged, match=f"it has {length} bytes, not 10"):
            await read(tier, name(1), 10)
        assert len(server.requests) == 2


@aio
async def test_N03_a_wrong_checksum_that_lasts_is_damage() -> None:
    async with fake(checksums="when_supported") as (server, tier):
        await tier.put(name(1), memoryview(b"0123456789"))
        wrong = reply(200, b"0123456789", x_amz_checksum_crc32="AAAAAA==", **BINARY)
        server.faults.append(wrong)
        assert await read(tier, name(1), 10) == b"0123456789"
        server.faults.extend([wrong] * 3)
        with pytest.raises(BlobDamaged, match="its checksum is wrong"):
            await read(tier, name(1), 10)


@every_call
@aio
async def test_R65_slow_down_is_waited_out(call: Callable[[S3Tier], Awaitable[object]]) -> None:
    async with fake() as (server, tier):
        await tier.put(name(1), memoryview(b"0123456789"))
        server.faults.append(reply(503, error("SlowDown"), Retry_After="7"))
        seen = len(server.requests)
        try:
            await call(tier)
        except StorageError as met:  # the fake cannot list or delete; that it was asked again is what counts
            assert not isinstance(met, TierUnavailable) or "SlowDown" not in str(met)
        assert len(server.requests) > seen + 1


@every_call
@aio
async def test_R65_slow_down_that_lasts_is_an_outage_after_three_attempts(
    call: Callable[[S3Tier], Awaitable[object]],
) -> None:
    async with fake() as (server, tier):
        server.faults.extend([reply(503, error("SlowDown"))] * 9)
        with pytest.raises(TierUnavailable, match=r"SlowDown|503"):
            await call(tier)
        assert len(server.requests) == 3


@aio
async def test_R65_an_error_inside_a_200_is_an_error() -> None:
    async with fake(attempts_max=1) as (server, tier):
        for answer in (reply(200, error("SlowDown"), **ETAG), reply(200)):
            server.faults.append(answer)
            with pytest.raises(TierUnavailable, match=r"SlowDown|an ETag"):
                await tier.put(name(1), memoryview(content(MIB)))
        server.faults.extend([VERSIONING_OFF, reply(200, error("InternalError"))])
        with pytest.raises(TierUnavailable):
            await tier.delete([name(1)])


def deleted(*entries: str) -> bytes:
    return reply(200, f"<DeleteResult>{''.join(entries)}</DeleteResult>".encode(), Content_Type="application/xml")


VERSIONING_OFF = reply(200, b"<VersioningConfiguration/>", Content_Type="application/xml")


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        (
            [f"<Error><Key>{name(1)}</Key><Code>AccessDenied</Code><Message>no\nno</Message></Error>"],
            "AccessDenied no no",
        ),
        ([], "1 of 1 keys are not in the answer"),
    ],
)
@aio
async def test_a_deletion_is_read_key_by_key(entries: list[str], sentence: str) -> None:
    async with fake() as (server, tier):
        server.faults.extend([VERSIONING_OFF, deleted(*entries)])
        with pytest.raises(TierUnavailable, match=sentence):
            await tier.delete([name(1)])
        server.faults.append(deleted(f"<Error><Key>{name(1)}</Key><Code>NoSuchKey</Code></Error>"))
        await tier.delete([name(1)])


@every_call
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@aio
async def test_N11_no_redirect_is_followed(call: Callable[[S3Tier], Awaitable[object]], status: int) -> None:
    async with FakeS3() as foreign, fake(session_token="token") as (server, tier):
        for location in (f"{foreign.endpoint}/b/key", "http://169.254.169.254/latest/meta-data/"):
            asked = len(server.requests)
            server.faults.append(reply(status, Location=location))
            with pytest.raises(TierMisconfigured, match=r"sends requests on to http://.* which is not followed"):
                await call(tier)
            assert len(server.requests) == asked + 1
        assert foreign.requests == []


@every_call
@aio
async def test_N11_no_other_region_is_gone_to(call: Callable[[S3Tier], Awaitable[object]]) -> None:
    async with fake() as (server, tier):
        document = error("PermanentRedirect", Endpoint="b.s3.eu-west-9.amazonaws.com")
        server.faults.extend([reply(301, document, x_amz_bucket_region="eu-west-9")] * 3)
        with pytest.raises(TierMisconfigured, match="sends requests on to eu-west-9, which is not followed; set"):
            await call(tier)
        assert len(server.requests) == 1


@aio
async def test_N11_a_name_that_resolves_to_a_metadata_service_is_not_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rebound(host: str, port: int, *_: object, **__: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("169.254.169.254", port))]

    async with fake(endpoint_url="http://s3.example:9", allow_http=True, attempts_max=1) as (_, tier):
        monkeypatch.setattr(socket, "getaddrinfo", rebound)
        with pytest.raises(TierUnavailable, match=r"link-local address 169\.254\.169\.254"):
            await tier.put(name(1), memoryview(b"x"))


@pytest.mark.parametrize(
    ("answer", "kind", "sentence"),
    [
        (reply(403, error("AccessDenied")), TierMisconfigured, "denied to put blob .*; allow this access key"),
        (reply(403, error("SignatureDoesNotMatch")), TierMisconfigured, "does not accept the access key"),
        (reply(400, error("ExpiredToken")), TierMisconfigured, "does not accept the access key"),
        (reply(404, error("NoSuchBucket")), TierMisconfigured, "there is no bucket 'b' at http://.*; make the bucket"),
        (
            reply(403, error("RequestTimeTooSkewed", RequestTime="20261129T190000Z", ServerTime="2026-11-29T19:30Z")),
            TierMisconfigured,
            r"clocks of this machine \(20261129T190000Z\) and of bucket .* \(2026-11-29T19:30Z\) are too far apart",
        ),
        (
            reply(400, error("AuthorizationHeaderMalformed", Region="eu-west-9")),
            TierMisconfigured,
            "sends requests on to eu-west-9",
        ),
        (reply(507, error("XMinioStorageFull")), TierFull, "it is full"),
        (reply(400, error("EntityTooLarge")), TierUnavailable, "EntityTooLarge m"),
        (reply(500, b"<html>proxy error</html>"), TierUnavailable, "500"),
    ],
)
@aio
async def test_refusals_say_what_to_do(answer: bytes, kind: type[StorageError], sentence: str) -> None:
    async with fake(attempts_max=1) as (server, tier):
        server.faults.append(answer)
        with pytest.raises(kind, match=sentence):
            await tier.put(name(1), memoryview(content(MIB)))


@aio
async def test_F10_a_servers_message_stays_on_one_line() -> None:
    async with fake(attempts_max=1) as (server, tier):
        server.faults.append(reply(400, error("Odd", Message="a\nb\t\u202e" + "c" * 1000)))
        with pytest.raises(TierUnavailable) as caught:
            await tier.put(name(1), memoryview(b"x"))
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500


@every_call
@aio
async def test_the_time_limit_includes_retries(call: Callable[[S3Tier], Awaitable[object]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects and never answers
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with fake(endpoint_url=endpoint, request_timeout_s=0.4) as (_, tier):
            began = time.monotonic()
            with pytest.raises(TierUnavailable, match=r"within 0\.4 s"):
                await call(tier)
            assert time.monotonic() - began < 2


@aio
async def test_opening_needs_no_server_and_the_probe_says_that_there_is_none() -> None:
    async with fake(endpoint_url="http://127.0.0.1:9", attempts_max=1) as (_, tier):
        with pytest.raises(TierUnavailable, match="Connect call failed"):
            await tier.put(name(1), memoryview(b"x"))
        found = await tier.probe()
        assert not found.reachable
        assert "Connect call failed" in found.messages[0]


@either_way
@aio
async def test_after_a_cancelled_put_nobody_reads_or_holds_the_buffer(
    monkeypatch: pytest.MonkeyPatch, on_loop: bool
) -> None:
    bodies: list[UploadBody] = []

    def kept(sealed: memoryview) -> UploadBody:
        bodies.append(UploadBody(sealed))
        return bodies[0]

    monkeypatch.setattr("storage.s3.tier.body_of", kept)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with fake(endpoint_url=endpoint, on_loop=on_loop) as (_, tier):
            data = bytearray(4 * MIB)
            put = asyncio.create_task(tier.put(name(1), memoryview(data)))
            await asyncio.sleep(0.05)
            put.cancel()
            with pytest.raises(asyncio.CancelledError):
                await put
            with pytest.raises(ConnectionAbortedError):
                bodies[0].read()
            del put  # its traceback knows the buffer, and so does the loop until its next turn
            await asyncio.sleep(0)
            data.extend(b"resizing works only if nobody holds the buffer")


@aio
async def test_a_closed_tier_refuses() -> None:
    async with fake() as (_, tier):
        await tier.aclose()
        with pytest.raises(TierUnavailable, match="is closed"):
            await tier.put(name(1), memoryview(b"x"))


@aio
async def test_over_http_all_but_large_blobs_is_signed_whole_and_the_owner_is_named() -> None:
    """Who changes a sealed blob on the way makes it a miss; who changes a list of deletions would delete others."""
    large, small = content(MIB), content(1000)
    async with fake(expected_bucket_owner="123456789012", session_token="token") as (server, tier):
        await tier.put(name(1), memoryview(large))
        await tier.put(name(2), memoryview(small))
        with pytest.raises(BlobMissing):
            await read(tier, name(3), 1)
        server.faults.extend([VERSIONING_OFF, deleted()])
        with pytest.raises(TierUnavailable, match="not in the answer"):
            await tier.delete([name(1)])
        for request in server.requests:
            assert request.headers["x-amz-expected-bucket-owner"] == "123456789012"
            assert request.headers["x-amz-security-token"] == "token"
            said, whole = request.headers["x-amz-content-sha256"], hashlib.sha256(request.body).hexdigest()
            assert said == ("UNSIGNED-PAYLOAD" if request.body == large else whole)
            assert "x-amz-content-sha256" in request.headers["authorization"]
        assert [request.body for request in server.requests[:2]] == [large, small]
        assert server.requests[0].target == f"/b/{name(1)}"
        assert any(request.method == "POST" for request in server.requests)


@aio
async def test_N12_a_certificate_has_to_be_trusted_and_the_payload_is_not_signed_twice(tmp_path: Path) -> None:
    data = content(MIB)
    context, ca_file = self_signed(tmp_path)
    async with fake(FakeS3(context), attempts_max=1) as (server, tier):
        with pytest.raises(TierMisconfigured, match=r"is not trusted: .*; set ca_file to the authority that signed it"):
            await tier.put(name(1), memoryview(data))
        assert server.requests == []
    async with fake(FakeS3(context), ca_file=ca_file) as (server, tier):
        await tier.put(name(1), memoryview(data))
        assert await read(tier, name(1), MIB) == data
        assert server.requests[0].headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
@aio
async def test_R39_proxies_of_the_environment_are_used_only_if_asked(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for cleared in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(cleared, raising=False)
    async with FakeS3() as proxy:
        monkeypatch.setenv(variable, proxy.endpoint)
        async with fake() as (server, tier):
            await tier.put(name(1), memoryview(b"x"))
            assert len(server.requests) == 1
        assert proxy.requests == []
        if variable != "ALL_PROXY":
            async with fake(use_proxy=True) as (server, tier):
                await tier.put(name(1), memoryview(b"x"))
                assert server.requests == []
            assert len(proxy.requests) == 1


@aio
async def test_R61_settings_of_the_environment_are_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("this is [not a config")
    for variable, value in {
        "AWS_ACCESS_KEY_ID": "theirs",
        "AWS_SECRET_ACCESS_KEY": "theirs",
        "AWS_SESSION_TOKEN": "theirs",
        "AWS_PROFILE": "no-such-profile",
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "config"),
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_CA_BUNDLE": "/no/such/file",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_supported",
    }.items():
        monkeypatch.setenv(variable, value)
    async with fake() as (server, tier):
        await tier.put(name(1), memoryview(b"x"))
        assert "Credential=id/" in server.requests[0].headers["authorization"]
        assert "theirs" not in json.dumps(server.requests[0].headers)
        assert "x-amz-checksum-crc32" not in server.requests[0].headers


@aio
async def test_R61_instance_credentials_that_are_not_there_are_named_soon(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        settings = {"instance_credentials": True, "access_key_id": None, "secret_access_key": None}
        async with fake(**settings) as (server, tier):
            began = time.monotonic()
            with pytest.raises(TierMisconfigured, match="this machine has no S3 credentials for bucket 'b'"):
                await tier.put(name(1), memoryview(b"x"))
            assert time.monotonic() - began < 5
            assert server.requests == []
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "role")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "role-secret")
            await tier.put(name(1), memoryview(b"x"))  # found later, without a restart
            assert "Credential=role/" in server.requests[0].headers["authorization"]
