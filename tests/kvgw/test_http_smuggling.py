"""F05: requests that two readers could understand in two ways get one refusal, and nothing behind them is answered."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from kvgw.endpoint import TcpEndpoint
from kvgw.server.serve import Serving
from tests.kvgw.test_http import gateway
from tests.support.aio import aio

HOST = "Host: localhost\r\n"
BEHIND = "GET /livez HTTP/1.1\r\nHost: behind\r\n\r\n"
"""What an attacker would have answered in somebody else's place."""


async def answers(served: Serving, raw: bytes) -> list[int]:
    """The status of every response to `raw` until the server ends the connection or falls silent."""
    assert isinstance(served.http, TcpEndpoint)
    reader, writer = await asyncio.open_connection(served.http.host, served.http.port)
    writer.write(raw)
    text = b""
    try:
        async with asyncio.timeout(1.0):
            while data := await reader.read(65_536):
                text += data
    except (TimeoutError, ConnectionError):
        pass  # silent, or reset in the middle of what nobody wanted to read
    writer.transport.abort()
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", text)]


def request(*headers: str, body: str = "", line: str = "GET /livez HTTP/1.1") -> bytes:
    return (f"{line}\r\n{HOST}" + "".join(f"{header}\r\n" for header in headers) + f"\r\n{body}").encode("latin-1")


REFUSED = {
    "two-lengths": request("Content-Length: 0", f"Content-Length: {len(BEHIND)}", body=BEHIND),
    "two-lengths-in-one": request(f"Content-Length: 0, {len(BEHIND)}", body=BEHIND),
    "length-not-a-number": request("Content-Length: 0x10", body=BEHIND),
    "length-negative": request("Content-Length: -1", body=BEHIND),
    "length-signed": request("Content-Length: +5", body=BEHIND),
    "unknown-encoding": request("Transfer-Encoding: gzip, chunked", body=BEHIND),
    "encoding-twice": request("Transfer-Encoding: chunked", "Transfer-Encoding: identity", body=BEHIND),
    "space-before-colon": request("Content-Length : 5", body=BEHIND),
    "no-version": b"GET /livez\r\n\r\n",
    "two-hosts": request("Host: other"),
    "nul-in-header": request("X-A: a\0b"),
    "huge-header": request("X-A: " + "a" * 200_000),
    "many-headers": request(*(f"X-{number}: {'a' * 50}" for number in range(5_000))),
    "bad-chunk": request("Transfer-Encoding: chunked", body="zz\r\nabc\r\n0\r\n\r\n" + BEHIND),
    "chunk-overflow": request("Transfer-Encoding: chunked", body="FFFFFFFFFFFFFFFFFFFFFF\r\n" + BEHIND),
}


@pytest.mark.parametrize("raw", REFUSED.values(), ids=REFUSED.keys())
def test_F05_what_can_be_understood_in_two_ways_is_refused_once(tmp_path: Path, raw: bytes) -> None:
    @aio
    async def main() -> None:
        async with gateway(tmp_path / "gw") as (served, _):
            found = await answers(served, raw)
            assert len(found) <= 1, f"nothing behind it is answered: {found}"
            assert all(400 <= status < 500 for status in found), found
            assert await answers(served, request("Connection: close")) == [200], "the next client is served"

    main()


@aio
async def test_F05_length_and_chunks_together_leave_nothing_behind(tmp_path: Path) -> None:
    """Whichever of the two the server believes, the connection ends with this request."""
    async with gateway(tmp_path / "gw") as (served, _):
        for body in ("0\r\n\r\n" + BEHIND, "5\r\nabcde\r\n0\r\n\r\n" + BEHIND):
            for headers in (
                ("Content-Length: 4", "Transfer-Encoding: chunked"),
                ("Transfer-Encoding: chunked", "Content-Length: 4"),
                ("Transfer-Encoding:\tchunked", "Content-Length: 4"),
            ):
                found = await answers(served, request(*headers, body=body, line="POST /livez HTTP/1.1"))
                assert all(400 <= status < 500 for status in found), (headers, found)
                assert len(found) <= 1, (headers, found)


@aio
async def test_F05_pipelined_requests_are_answered_in_order_and_each_once(tmp_path: Path) -> None:
    async with gateway(tmp_path / "gw") as (served, _):
        one = request()
        assert await answers(served, one + one + request("Connection: close")) == [200, 200, 200]
        assert await answers(served, request("Connection: close") + one) == [200], "nothing after the end"


@pytest.mark.parametrize(
    "value", ["bytes=0-,5-2,-0,9e9-", "bytes=" + ",".join(f"{n}-{n}" for n in range(1_000)), "x=1"]
)
def test_F05_ranges_that_nobody_offered_change_nothing(tmp_path: Path, value: str) -> None:
    @aio
    async def main() -> None:
        async with gateway(tmp_path / "gw") as (served, _):
            assert await answers(served, request(f"Range: {value}", "Connection: close")) == [200]
            assert await answers(served, request("Expect: 100-continue", "Connection: close")) == [200]

    main()
