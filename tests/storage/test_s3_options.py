"""Settings of the S3 tier that are refused, without a secret in any sentence; and the body of an upload."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import TierMisconfigured
from storage.s3 import S3Options
from storage.s3.upload import PIECE_BYTES, UploadBody, body_of
from tests.support.aio import run
from tests.support.tier_conformance import content

KEYS: dict[str, Any] = {"access_key_id": "some-id", "secret_access_key": "some-secret"}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"bucket": ""}, "has no bucket"),
        ({"prefix": "kv"}, "prefix 'kv' cannot be used"),
        ({"prefix": "/kv/"}, "prefix '/kv/' cannot be used"),
        ({"prefix": "a//b/"}, "cannot be used"),
        ({"prefix": "a/../b/"}, "cannot be used"),
        ({"prefix": "é/"}, "cannot be used"),
        ({"prefix": "a" * 256 + "/"}, "cannot be used"),
        ({"endpoint_url": "file:///etc/passwd"}, "scheme is 'file'"),
        ({"endpoint_url": "gopher://host"}, "scheme is 'gopher'"),
        ({"endpoint_url": "minio:9000"}, "scheme is 'minio'"),
        ({"endpoint_url": "https://"}, "more or less than a host"),
        ({"endpoint_url": "https://host/path"}, "more or less than a host"),
        ({"endpoint_url": "https://host?x=1"}, "more or less than a host"),
        ({"endpoint_url": "https://host:99999"}, "is not a URL"),
        ({"endpoint_url": "https://[::1"}, "is not a URL"),
        ({"endpoint_url": "https://user:hunter2@host"}, "has a user or password in its URL"),
        ({"endpoint_url": "https://hunter2@host"}, "has a user or password in its URL"),
        ({"endpoint_url": "ftp://user:hunter2@host"}, "has a user or password in its URL"),
        ({"endpoint_url": "http://s3.example.com"}, "use https, or set allow_http"),
        ({"endpoint_url": "http://8.8.8.8:9000"}, "use https, or set allow_http"),
        ({"endpoint_url": "http://169.254.169.254"}, "link-local address"),
        ({"endpoint_url": "https://169.254.169.254"}, "link-local address"),
        ({"endpoint_url": "http://[fe80::1%25eth0]"}, "link-local address"),
        ({"access_key_id": None}, "only one of the S3 access key's two halves"),
        ({"secret_access_key": None}, "only one of the S3 access key's two halves"),
        ({"access_key_id": None, "secret_access_key": None}, "there are no S3 credentials"),
        ({"instance_credentials": True}, "both an S3 access key and instance_credentials"),
        ({"request_timeout_s": 0}, "request_timeout_s is 0; give more than 0"),
        ({"connect_timeout_s": -1.0}, "connect_timeout_s is -1.0"),
        ({"connect_timeout_s": float("nan")}, "connect_timeout_s is nan"),
        ({"attempts_max": 0}, "attempts_max is 0"),
        ({"connections_max": 0}, "connections_max is 0"),
    ],
)
def test_F08_settings_that_cannot_work_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TierMisconfigured, match=sentence) as caught:
        S3Options(**{"bucket": "b", **KEYS, **settings})
    assert "hunter2" not in str(caught.value)
    assert "some-secret" not in str(caught.value)


@pytest.mark.parametrize(
    "endpoint",
    ["https://s3.example.com", "http://localhost:8333/", "http://127.0.0.1:1", "http://10.1.2.3", "http://[::1]:9000"],
)
def test_endpoints_that_can_work_are_accepted(endpoint: str) -> None:
    assert S3Options("b", endpoint_url=endpoint, **KEYS).encrypted == endpoint.startswith("https:")
    assert S3Options("b", endpoint_url="http://minio:9000", allow_http=True, **KEYS).encrypted is False


def test_secrets_are_not_shown() -> None:
    shown = repr(S3Options("b", session_token="some-token", **KEYS))
    assert not any(secret in shown for secret in ("some-id", "some-secret", "some-token"))


@given(text=st.text(max_size=60))
def test_F08_any_text_as_an_endpoint_is_accepted_or_refused_with_a_sentence(text: str) -> None:
    try:
        S3Options("b", endpoint_url=text, **KEYS)
    except TierMisconfigured as error:
        assert "; " in str(error)


def test_a_small_body_is_sent_as_one_copy() -> None:
    assert body_of(memoryview(b"small")) == b"small"
    assert isinstance(body_of(memoryview(bytes(PIECE_BYTES + 1))), UploadBody)


@pytest.mark.parametrize("length", [1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES - 1])
def test_a_body_is_read_and_walked_as_a_file(length: int) -> None:
    data = content(length)
    body, file = UploadBody(memoryview(data)), io.BytesIO(data)
    assert len(body) == length
    for size in (0, 1, 1000, 10**6, -1, 5):
        assert body.read(size) == file.read(size)
        assert body.tell() == file.tell()
    for offset, whence in ((0, 2), (3, 0), (1, 1), (0, 0)):
        assert body.seek(offset, whence) == file.seek(offset, whence)

    async def walked() -> list[bytes]:
        return [piece async for piece in body]

    for _ in range(2):  # each attempt of a request walks anew
        pieces = run(walked())
        assert b"".join(pieces) == data
        assert max(map(len, pieces)) <= PIECE_BYTES


def test_a_released_body_gives_nothing_away() -> None:
    buffer = bytearray(content(2 * PIECE_BYTES))
    body = UploadBody(memoryview(buffer))

    async def walk() -> None:
        pieces = aiter(body)
        first = await anext(pieces)
        body.release()
        buffer[:] = bytes(len(buffer))
        assert first == content(2 * PIECE_BYTES)[:PIECE_BYTES]
        with pytest.raises(ConnectionAbortedError):
            await anext(pieces)

    asyncio.run(walk())
    with pytest.raises(ConnectionAbortedError):
        body.read()
