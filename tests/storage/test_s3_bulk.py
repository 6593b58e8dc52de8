"""Bodies of the S3 tier in worker threads: whose memory it is meanwhile, and which connections are used again."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing
from pathlib import Path

import pytest

from storage.errors import TierFull, TierMisconfigured, TierUnavailable
from storage.s3 import links
from storage.s3.exchange import DOCUMENT_BYTES_MAX, Exchange
from tests.storage.test_s3_faults import BINARY, _short_pauses, fake
from tests.support.aio import aio
from tests.support.fake_s3 import HEAD_END, FakeS3, error, reply
from tests.support.tier_conformance import MIB, content, name, read
from tests.support.tls import self_signed

__all__ = ["_short_pauses"]  # for every test here too

BODY = 16 * MIB
"""More than the sockets hold between them, so that who waits for one side waits."""
CONTINUE = b"HTTP/1.1 100 Continue" + HEAD_END


class Scripted(FakeS3):
    """Says `first` when the head of a request has come, takes `taken` bytes of its body, says `then`, and hangs up.

    With `stalls` it stays silent instead of hanging up. An empty `first` is an ordinary server.
    """

    def __init__(self, *, first: bytes = b"", taken: int = 0, then: bytes = b"", stalls: bool = False) -> None:
        super().__init__()
        self.first, self.taken, self.then, self.stalls = first, taken, then, stalls
        self.connections = 0
        self.bytes_taken = 0
        self.reached = asyncio.Event()
        self.gone = asyncio.Event()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await super()._serve(reader, writer)
        finally:
            self.gone.set()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if not self.first:
            return await super()._answer(reader, writer)
        await reader.readuntil(HEAD_END)
        writer.write(self.first)
        self.bytes_taken += len(await reader.readexactly(self.taken))
        writer.write(self.then)
        await writer.drain()
        self.reached.set()
        while self.stalls and not reader.at_eof() and not writer.is_closing():
            await asyncio.sleep(0.01)  # and reads nothing
        return False


# Memory (law 7)


@aio
async def test_a_cancelled_get_writes_into_its_target_no_more() -> None:
    """Law 7: cancelled while its thread waits for the rest, it ends at once, and the memory is the caller's again."""
    begun = reply(200, content(MIB), length=BODY, **BINARY)
    async with fake(server := Scripted(first=begun, stalls=True)) as (_, tier):
        target = bytearray(BODY)
        get = asyncio.create_task(tier.get_into(name(1), memoryview(target)))
        await server.reached.wait()
        get.cancel()
        async with asyncio.timeout(5):
            with pytest.raises(asyncio.CancelledError):
                await get
            await server.gone.wait()
        del get
        await asyncio.sleep(0)
        target.extend(b"resizing works only if nobody holds the buffer")


@aio
async def test_a_put_cancelled_in_the_middle_of_its_body_lets_go_of_it() -> None:
    """Law 7: while its thread is blocked in sending."""
    async with fake(server := Scripted(first=CONTINUE, taken=MIB, stalls=True)) as (_, tier):
        data = bytearray(BODY)
        put = asyncio.create_task(tier.put(name(1), memoryview(data)))
        await server.reached.wait()
        put.cancel()
        async with asyncio.timeout(5):
            with pytest.raises(asyncio.CancelledError):
                await put
        del put
        await asyncio.sleep(0)
        data.extend(b"resizing works only if nobody holds the buffer")


@aio
async def test_the_time_limit_ends_a_thread_that_is_blocked_in_a_body() -> None:
    begun = reply(200, content(MIB), length=BODY, **BINARY)
    async with fake(Scripted(first=begun, stalls=True), request_timeout_s=0.3) as (_, tier):
        with pytest.raises(TierUnavailable, match=r"within 0\.3 s"):
            await read(tier, name(1), BODY)
    async with fake(Scripted(first=CONTINUE, taken=MIB, stalls=True), request_timeout_s=0.3) as (_, tier):
        with pytest.raises(TierUnavailable, match=r"within 0\.3 s"):
            await tier.put(name(1), memoryview(bytearray(BODY)))


# What servers answer


@aio
async def test_a_refused_put_sends_no_body() -> None:
    """The server says so instead of asking for it, and the connection is of no more use."""
    refusal = reply(403, error("AccessDenied")).replace(b"Connection: close\r\n", b"")
    async with fake(server := Scripted(first=refusal), attempts_max=1) as (_, tier):
        with pytest.raises(TierMisconfigured, match="denied to put blob"):
            await tier.put(name(1), memoryview(content(BODY)))
        server.first = b""
        await tier.put(name(1), memoryview(content(BODY)))
        assert (server.connections, server.bytes_taken) == (2, 0)


def test_a_connection_that_still_owes_a_body_is_not_used_again() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, closing(Exchange(ours, "PUT", asks=True)) as exchange:
        theirs.sendall(b"HTTP/1.1 403 No\r\nContent-Length: 2" + HEAD_END + b"no")
        exchange.begin(b"PUT / HTTP/1.1" + HEAD_END, memoryview(b"never sent"))
        assert exchange.document() == b"no"
        assert not exchange.reusable
        assert b"never" not in theirs.recv(1000)


@aio
async def test_a_put_that_is_refused_while_it_is_sent_says_why_or_is_an_outage() -> None:
    full = reply(507, error("XMinioStorageFull"))
    async with fake(Scripted(first=CONTINUE, taken=MIB, then=full), attempts_max=1) as (_, tier):
        # The answer may be lost where the server hangs up on bytes that it has not read.
        with pytest.raises((TierFull, TierUnavailable), match=r"it is full|reset|closed|Broken pipe"):
            await tier.put(name(1), memoryview(content(BODY)))


@aio
async def test_a_refusal_without_end_is_not_read_to_its_end() -> None:
    """Law 9."""
    async with fake(attempts_max=1) as (server, tier):
        for call in (tier.put(name(1), memoryview(content(MIB))), read(tier, name(1), 10)):
            server.faults.append(reply(403, b"x" * (DOCUMENT_BYTES_MAX + 1)))
            with pytest.raises(TierUnavailable, match="a document of 1048576 bytes or more"):
                await call


@aio
async def test_F08_a_header_that_would_break_out_of_its_line_is_not_sent() -> None:
    async with fake(session_token="token\r\nX-Other: 1", attempts_max=1) as (server, tier):
        for call in (tier.put(name(1), memoryview(content(MIB))), read(tier, name(1), 10)):
            with pytest.raises(TierUnavailable, match="control character") as caught:
                await call
            assert "X-Other" not in str(caught.value)
        assert server.requests == []


# Connections


@pytest.mark.parametrize("encrypted", [False, True], ids=["http", "https"])
@aio
async def test_one_connection_serves_one_request_after_another(tmp_path: Path, encrypted: bool) -> None:
    server = Scripted()
    settings = {}
    if encrypted:
        server._tls, settings["ca_file"] = self_signed(tmp_path)
    async with fake(server, **settings) as (_, tier):
        for number in range(3):
            data = content(2 * MIB + number)
            await tier.put(name(number), memoryview(data))
            assert await read(tier, name(number), len(data)) == data
        assert server.connections == 1


@aio
async def test_N05_a_kept_connection_that_the_server_has_closed_costs_no_attempt() -> None:
    data = content(MIB)
    async with fake(server := Scripted(), attempts_max=1) as (_, tier):
        await tier.put(name(1), memoryview(data))
        server.faults.append(b"")  # it hangs up on the next request, without an answer
        assert await read(tier, name(1), MIB) == data
        for writer in list(server._open):
            writer.close()  # now between two requests
        await asyncio.sleep(0.05)
        assert await read(tier, name(1), MIB) == data
        assert server.connections == 3


@aio
async def test_a_connection_is_not_kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 9: not until somebody else on the way has forgotten it."""
    monkeypatch.setattr(links, "_IDLE_S", 0.05)
    async with fake(server := Scripted()) as (_, tier):
        await tier.put(name(1), memoryview(content(MIB)))
        async with asyncio.timeout(5):
            await server.gone.wait()
        await tier.put(name(1), memoryview(content(MIB)))
        assert server.connections == 2
