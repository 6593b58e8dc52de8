"""The seams and the proxy themselves: what stands for S3 is a tier, and every toxic does what it says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import pytest

from storage.errors import TierUnavailable
from storage.tier import Tier
from tests.support.aio import aio
from tests.support.tier_conformance import TierConformance, content, name, read
from tests.torture.faults import Chance, FaultyTier, FolderTier, Kind, Nth
from tests.torture.toxics import KEPT_BYTES, Toxic, ToxicProxy

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 3000\r\n\r\n" + bytes(range(250)) * 12


class TestFolderTier(TierConformance):
    """Behind a seam where nothing happens."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.root = tmp_path / "bucket"

    def open_tier(self) -> AbstractAsyncContextManager[Tier]:
        @asynccontextmanager
        async def made() -> AsyncIterator[Tier]:
            yield FaultyTier(FolderTier(self.root), Nth())

        return made()


@aio
async def test_every_kind_of_fault_of_a_put_leaves_what_it_says(tmp_path: Path) -> None:
    whole = content(1000, 1)
    left: dict[Kind, bytes | None] = {}
    for number, kind in enumerate((Kind.ERROR, Kind.LOST_ANSWER, Kind.TEAR, Kind.CORRUPT, Kind.LOSE, Kind.DELAY)):
        inner = FolderTier(tmp_path / str(number))
        plan = Nth(1, kind)
        plan.armed = True
        with suppress(TierUnavailable):
            await FaultyTier(inner, plan).put(name(1), memoryview(whole))
        assert plan.fired == {kind: 1}
        lengths = await inner.stat([name(1)])
        left[kind] = await read(inner, name(1), lengths[name(1)]) if lengths else None
    assert left[Kind.ERROR] is None
    assert left[Kind.LOSE] is None
    assert left[Kind.LOST_ANSWER] == left[Kind.DELAY] == whole
    assert left[Kind.TEAR] == whole[:500]
    assert left[Kind.CORRUPT] != whole
    assert len(left[Kind.CORRUPT] or b"") == 1000


def test_chance_fires_at_its_rate_and_only_while_armed() -> None:
    plan = Chance(random.Random(1), 0.1, (Kind.ERROR, Kind.DELAY))
    assert [plan.next("x") for _ in range(100)] == [None] * 100
    plan.armed = True
    met = sum(plan.next("x") is not None for _ in range(2000))
    assert 130 < met < 270
    assert sum(plan.fired.values()) == met


@asynccontextmanager
async def proxied() -> AsyncIterator[ToxicProxy]:
    """A server that answers each line, behind a proxy."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while await reader.readline():
                writer.write(ANSWER)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, ToxicProxy(server.sockets[0].getsockname()[1]) as proxy:
        yield proxy


async def ask(proxy: ToxicProxy, within_s: float = 0.4) -> bytes:
    """What comes of one question: all of it, or what came before the connection ended or the time was over."""
    found = b""
    with suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        try:
            writer.write(b"question\n")
            async with asyncio.timeout(within_s):
                while len(found) < len(ANSWER) and (data := await reader.read(4096)):
                    found += data
        finally:
            writer.close()
    return found


@aio
async def test_each_toxic_does_what_it_says_and_heals() -> None:
    headers = ANSWER[: ANSWER.index(b"\r\n\r\n") + 4]
    async with proxied() as proxy:
        assert await ask(proxy) == ANSWER
        for toxic, expected in (
            (Toxic.SLICE, ANSWER),
            (Toxic.RESET, b""),
            (Toxic.DOWN, b""),
            (Toxic.TRUNCATE, ANSWER[:KEPT_BYTES]),
            (Toxic.STALL, headers),
        ):
            proxy.poison(toxic)
            assert await ask(proxy) == expected, toxic
            assert proxy.met[toxic] >= 1, toxic
            proxy.heal()
            assert await ask(proxy, 5.0) == ANSWER, f"healed after {toxic}"
        proxy.poison(Toxic.CORRUPT)
        damaged = await ask(proxy)
        assert damaged != ANSWER
        assert len(damaged) == len(ANSWER)
        for toxic in (Toxic.LATENCY, Toxic.BANDWIDTH):
            proxy.heal()
            proxy.poison(toxic)
            started = asyncio.get_running_loop().time()
            assert await ask(proxy, 5.0) == ANSWER, toxic
            assert asyncio.get_running_loop().time() - started > 0.04, toxic
