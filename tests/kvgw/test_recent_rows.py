"""What is read again is not asked of the catalog again, and never says more than the catalog does (laws 2 and 5)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock
from uuid import UUID

import pytest

from kvgw.errors import RequestRefused
from kvgw.gateway.get import GetVerb
from kvgw.gateway.recent import KEPT_MS, RecentRows
from kvgw.model import Durability, Label, Outcome
from storage.tier import blob_name
from tenancy.errors import CatalogUnavailable
from tenancy.model import FoundChunk, Scope
from tests.kvgw.test_coherence_gateways import KEYS, Pair, pair, waits
from tests.kvgw.test_match_index import CLOSING, END, ENDS
from tests.support.admin import Admin
from tests.support.aio import aio
from tests.support.gateways import House, Kind, format_of, house, keys_of, payloads_of, read
from tests.support.manual_clock import ManualClock
from tests.support.several import Footing, on_footing
from tests.support.storm import storm

HERE, THERE = (Scope(UUID(int=1), UUID(int=number)) for number in (1, 2))


def row(key: bytes, expires_ms: int = 10) -> FoundChunk:
    values: dict[str, Any] = dict.fromkeys(FoundChunk._fields, 0)
    return FoundChunk(**{**values, "entry_key": key, "expires_ms": expires_ms, "blob_id": bytes(16), "on_nvme": True})


def rows(*keys: bytes, expires_ms: int = 10) -> dict[bytes, FoundChunk]:
    return {key: row(key, expires_ms) for key in keys}


async def let_promise_nothing(made: House) -> None:
    """A PUT need not be written to any tier, unless it asks for that."""
    await Admin(made.opened).own("PATCH", "/tenants/-/namespaces/default", {"durability": "staged"})


def overtake(made: House, call: str, by: Callable[[], Awaitable[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the catalog answers to `call` comes when something else has happened since."""
    kind = type(made.opened.rooms.catalog)
    plain = getattr(kind, call)

    async def overtaken(catalog: Any, *arguments: Any) -> Any:
        answer = await plain(catalog, *arguments)
        await by()
        return answer

    monkeypatch.setattr(kind, call, overtaken)


class Asked:
    """Counts look-ups in the catalog."""

    def __init__(self, made: House, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        kind = type(made.opened.rooms.catalog)
        plain = kind.lookup

        async def lookup(catalog: Any, *arguments: Any) -> Any:
            self.count += 1
            return await plain(catalog, *arguments)

        monkeypatch.setattr(kind, "lookup", lookup)


@aio
async def test_the_second_read_asks_no_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with house("embedded", tmp_path / "gw", clock=ManualClock()) as made:
        client = made.client()
        registered = await client.register(format_of())
        payloads = payloads_of(registered, 5)
        await client.put(registered, keys_of(5), payloads)
        made.opened.rooms.recent.drop((await made.place()).scope)
        asked = Asked(made, monkeypatch)
        for keys, expected in ((keys_of(5), payloads), (keys_of(5), payloads), (keys_of(3), payloads[:3])):
            assert (await read(client, registered, keys))[1] == expected
        assert asked.count == 1
        await read(client, registered, [*keys_of(2), b"another"])
        assert asked.count == 2, "one key that is not known is enough to ask"


@pytest.mark.parametrize("kind", ["embedded", "unix"])
@pytest.mark.parametrize("end", ENDS)
@aio
async def test_law5_what_ended_is_not_read(tmp_path: Path, end: str, kind: Kind) -> None:
    async with house(kind, tmp_path / "gw", clock=ManualClock(), check=False) as made:
        admin, client = Admin(made.opened), made.client()
        registered = await client.register(format_of())
        keys, payloads = keys_of(4), payloads_of(registered, 4)
        await client.put(registered, keys, payloads, ttl="1h", labels=[Label("user", "u")])
        assert (await read(client, registered, keys))[1] == payloads
        assert len(made.opened.rooms.recent) == 4
        await END[end](made, admin, client, registered)
        if end == "delete":
            assert made.opened.rooms.recent.names() == [], "law 5: not even its salts"
        if end in CLOSING:
            with pytest.raises(RequestRefused):
                await read(client, registered, keys)
        else:
            assert (await read(client, registered, keys))[1] == [None] * 4, f"law 5: {end}"


@pytest.mark.parametrize("durability", [Durability.STAGED, Durability.NVME])
@aio
async def test_what_was_stored_is_read_without_the_catalog(
    tmp_path: Path, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house("embedded", tmp_path / "gw", clock=ManualClock()) as made:
        await let_promise_nothing(made)
        client = made.client()
        registered = await client.register(format_of())
        keys, payloads = keys_of(5), payloads_of(registered, 5)
        asked = Asked(made, monkeypatch)
        await client.put(registered, keys, payloads, durability=durability)
        assert (await read(client, registered, keys))[1] == payloads
        assert asked.count == 0


@aio
async def test_law2_what_a_put_remembers_is_what_a_look_up_finds(tmp_path: Path) -> None:
    """Whatever was there before: the same content, another, less durable, under another key, twice in one batch."""
    chance = random.Random(7)
    async with house("embedded", tmp_path / "gw", clock=ManualClock()) as made:
        await let_promise_nothing(made)
        client = made.client()
        registered = await client.register(format_of())
        keys, payloads = keys_of(12), payloads_of(registered, 6)
        rooms, scope = made.opened.rooms, (await made.place()).scope
        seen = 0
        for _ in range(120):
            some = chance.sample(keys, chance.randint(1, 4))
            content = [chance.choice(payloads) for _ in some]
            durability = chance.choice((Durability.STAGED, Durability.NVME))
            await client.put(registered, some, content, durability=durability, ttl=chance.choice(("5m", "1h")))
            shelf = rooms.recent._shelves.get(scope)
            now_ms = rooms.time.now_ms()
            if shelf is not None and shelf.stands(rooms.catalog.version(scope.tenant) or 0, now_ms):
                seen += len(shelf.rows)
                assert await rooms.catalog.lookup(scope, [1], list(shelf.rows), now_ms) == dict(shelf.rows)
            await made.wait(chance.choice((0.1, 1.0, 3.0)))
            if chance.random() < 0.3:
                await client.delete(registered, chance.sample(keys, 3))
        assert seen > 30


@aio
async def test_what_left_staging_in_the_moment_after_it_was_seen_is_read_from_where_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row from memory says that no tier has it."""
    async with house("embedded", tmp_path / "gw", clock=ManualClock()) as made:
        await let_promise_nothing(made)
        client = made.client()
        registered = await client.register(format_of())
        keys, payloads = keys_of(3), payloads_of(registered, 3)
        rooms = made.opened.rooms
        await client.put(registered, keys, payloads, durability=Durability.STAGED)
        await made.opened.crew.drain_everywhere()
        assert not any(one.on_nvme for one in rooms.recent._shelves[(await made.place()).scope].rows.values())
        asked = Asked(made, monkeypatch)
        holds = type(rooms.staging).holds

        def gone_then(staging: Any, name: str) -> bool:
            there = holds(staging, name)
            staging.drop(name)
            return there

        monkeypatch.setattr(type(rooms.staging), "holds", gone_then)
        report, got = await read(client, registered, keys)
        assert (got, asked.count) == (payloads, 1)
        assert [(hit.index, hit.tier) for hit in report.hits] == [(index, "nvme") for index in range(3)]


@aio
async def test_law2_without_the_catalog_what_is_here_is_read_though_another_chunk_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house("embedded", tmp_path / "gw", clock=ManualClock()) as made:
        client = made.client()
        registered = await client.register(format_of())
        keys, payloads = keys_of(3), payloads_of(registered, 3)
        await let_promise_nothing(made)
        await client.put(registered, keys, payloads, durability=Durability.STAGED)
        rooms, scope = made.opened.rooms, (await made.place()).scope
        left = [rooms.recent._shelves[scope].rows[key] for key in rooms.recent._shelves[scope].rows][1]
        monkeypatch.setattr(GetVerb, "_all_here", lambda *_: True)
        rooms.staging.drop(blob_name(scope.namespace, left.blob_id))  # in the moment after it was seen
        monkeypatch.setattr(type(rooms.catalog), "lookup", AsyncMock(side_effect=CatalogUnavailable("away")))
        report, got = await read(client, registered, keys)
        assert (got, report.outcome) == ([payloads[0], None, payloads[2]], Outcome.OUTAGE)
        assert len(report.hits) == 2


@aio
async def test_a_life_that_was_changed_is_reported_as_it_is(tmp_path: Path) -> None:
    async with house("embedded", tmp_path / "gw", clock=ManualClock()) as made:
        await Admin(made.opened).own("PATCH", "/tenants/-/namespaces/default", {"sliding_ttl": True})
        client = made.client()
        registered = await client.register(format_of())
        keys, payloads = keys_of(2), payloads_of(registered, 2)

        async def lives() -> float:
            hit = (await read(client, registered, keys))[0].hits[0]
            return (hit.expires_ms - made.opened.rooms.time.now_ms()) / 1000

        await client.put(registered, keys, payloads, ttl="1h")
        assert await lives() == pytest.approx(3600, abs=1)
        await client.touch(registered, keys, ttl="2h")
        assert await lives() == pytest.approx(7200, abs=1)
        await made.wait(7000.0)
        await client.put(registered, keys, payloads, ttl="10m")
        for _ in range(3):
            assert await lives() == pytest.approx(600, abs=1), "the shorter life is what is made longer now"
        scope = (await made.place()).scope
        entries = list(made.opened.rooms.recent._shelves[scope].rows)
        await made.opened.rooms.catalog.extend(scope, 1, entries, 3_600_000, made.opened.rooms.time.now_ms())
        await made.wait(6.0)
        assert await lives() > 3000, "what another gateway did is seen after seconds"


@aio
async def test_a_sliding_life_is_extended_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with house("embedded", tmp_path / "gw", clock=ManualClock()) as made:
        await Admin(made.opened).own("PATCH", "/tenants/-/namespaces/default", {"sliding_ttl": True})
        client = made.client()
        registered = await client.register(format_of())
        await client.put(registered, keys_of(2), payloads_of(registered, 2), ttl="1h")
        await read(client, registered, keys_of(2))
        await made.wait(1800.0)
        asked = Asked(made, monkeypatch)
        ends = [(await read(client, registered, keys_of(2)))[0].hits[0].expires_ms for _ in range(3)]
        assert asked.count == 2, "to extend what the row says now, and to learn of the extension"
        assert ends[0] == ends[1] == ends[2]
        await made.wait(3000.0)
        assert None not in (await read(client, registered, keys_of(2)))[1], "it lives past its first hour"


@pytest.mark.parametrize("seed", range(3))
@aio
async def test_law2_a_storm_of_everything_is_read_as_the_catalog_has_it(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with house("embedded", tmp_path / "gw", clock=ManualClock()) as made:
        client = made.client()
        registered = await client.register(format_of())
        used = 0
        async for keys, start, stop in storm(rng, made, client, registered, 140):
            got = (await read(client, registered, keys[start:stop]))[1]
            used += got.count(None) < len(got)
            recent, made.opened.rooms.recent._shelves = made.opened.rooms.recent._shelves, type(_shelves(made))()
            assert got == (await read(client, registered, keys[start:stop]))[1], "law 5"
            made.opened.rooms.recent._shelves = recent
        assert used > 20, "nothing was ever there"


def _shelves(made: House) -> Any:
    return made.opened.rooms.recent._shelves


@pytest.mark.postgres
@pytest.mark.s3
@on_footing
async def test_law5_what_another_gateway_ended_is_not_read(shared: Footing) -> None:
    async with pair(shared) as both:
        payloads = payloads_of(both.registered, len(KEYS))

        async def got() -> list[bytes | None]:
            return (await read(both.reader, both.registered, KEYS))[1]

        await _until_nobody_is_asked(both, got, payloads)
        going = asyncio.create_task(both.writer.delete(both.registered, KEYS[2:]))
        await waits(both.a)
        assert not going.done(), "the other gateway still reads it from memory"
        await both.poll()
        assert await going == 2
        assert await got() == [*payloads[:2], None, None], "law 5"


async def _until_nobody_is_asked(both: Pair, got: Callable[[], Awaitable[list[bytes | None]]], expected: Any) -> None:
    """On a machine that is busy a lease may be over before it is used."""
    for _ in range(50):
        await both.poll()
        for _ in range(3):
            before = len(both.asked)
            assert await got() == expected
            if len(both.asked) == before:
                return
    raise AssertionError("it always asked the catalog")


@aio
async def test_law5_a_deletion_that_overtakes_a_look_up_leaves_no_row_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house("embedded", tmp_path / "gw", clock=ManualClock()) as made:
        client = made.client()
        registered = await client.register(format_of())
        await client.put(registered, keys_of(2), payloads_of(registered, 2))
        made.opened.rooms.recent.drop((await made.place()).scope)
        overtake(made, "lookup", lambda: client.delete(registered, keys_of(2)), monkeypatch)
        await read(client, registered, keys_of(2))
        assert made.opened.rooms.recent.names() == []


@aio
async def test_law5_a_deletion_that_overtakes_a_commit_leaves_no_row_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house("embedded", tmp_path / "gw", clock=ManualClock()) as made:
        client = made.client()
        registered = await client.register(format_of())
        overtake(made, "commit", lambda: client.delete(registered, keys_of(2)), monkeypatch)
        await client.put(registered, keys_of(2), payloads_of(registered, 2))
        assert made.opened.rooms.recent.names() == []
        assert (await read(client, registered, keys_of(2)))[1] == [None, None]


def test_it_is_bounded_and_forgets_what_was_read_longest_ago() -> None:
    recent = RecentRows(4)
    recent.remember(HERE, 1, rows(b"a", b"b"), 0)
    recent.remember(HERE, 1, rows(b"c", b"d"), 0)
    assert recent.find(HERE, 1, [b"a"], 0) == rows(b"a") and len(recent) == 4
    recent.remember(HERE, 1, rows(b"e"), 0)
    assert recent.find(HERE, 1, [b"b"], 0) is None, "the oldest"
    assert recent.find(HERE, 1, [b"a", b"e"], 0) == rows(b"a", b"e")
    recent.remember(THERE, 1, rows(b"x", b"y"), 0)
    assert recent.find(HERE, 1, [b"c"], 0) is None and recent.find(HERE, 1, [b"d"], 0) is None
    assert recent.find(THERE, 1, [b"x", b"y"], 0) == rows(b"x", b"y") and len(recent) == 4


def test_it_holds_under_its_version_and_until_the_expiry_alone() -> None:
    recent = RecentRows()
    recent.remember(HERE, None, rows(b"a"), 0)
    assert len(recent) == 0, "where the version is not known, nothing is kept"
    recent.remember(HERE, 1, rows(b"a", b"b", expires_ms=10), 0)
    assert recent.find(HERE, None, [b"a"], 0) is None and recent.find(THERE, 1, [b"a"], 0) is None
    assert recent.find(HERE, 1, [b"a"], 9) is not None and recent.find(HERE, 1, [b"a"], 10) is None
    assert recent.find(HERE, 2, [b"a"], 0) is None and recent.names() == []
    recent.remember(HERE, 2, rows(b"c"), 0)
    assert recent.find(HERE, 2, [b"a"], 0) is None and len(recent) == 1, "what another version said is gone"
    recent.forget(HERE, [b"c", b"none"])
    recent.forget(THERE, [b"c"])
    assert len(recent) == 0 and recent.find(HERE, 2, [b"c"], 0) is None
    recent.remember(HERE, 2, rows(b"d"), 0)
    assert recent.find(HERE, 2, [b"d"], 0) == rows(b"d")
    recent.remember(HERE, 2, rows(b"e", expires_ms=10**6), KEPT_MS - 1)
    assert recent.find(HERE, 2, [b"e"], KEPT_MS - 1) is not None
    assert recent.find(HERE, 2, [b"e"], KEPT_MS) is None, "all are read again after seconds"
    recent.remember(HERE, 2, rows(b"f", expires_ms=10**6), KEPT_MS)
    assert recent.find(HERE, 2, [b"f"], 0) is None, "the clock was set back"
