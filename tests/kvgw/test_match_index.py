"""The index of matches never says more than the catalog does, whatever happens in between (laws 2 and 5)."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from kvgw.client import Client
from kvgw.errors import RequestRefused
from kvgw.gateway.index import ENTRY_BYTES, RUN_BYTES, MatchIndex
from kvgw.model import Label
from kvgw.reports import Registered
from tenancy.model import FoundChunk, Scope
from tests.support.admin import Admin
from tests.support.aio import aio
from tests.support.gateways import House, Kind, format_of, house, keys_of, payloads_of, read
from tests.support.manual_clock import ManualClock
from tests.support.several import Footing, on_footing
from tests.support.storm import storm

ENDS = ("delete", "label", "expiry", "epochs", "suspend", "shred", "evict", "quarantine", "room")
CLOSING = ("suspend", "shred")
"""The namespace takes no requests after these."""


def remembered(made: House) -> int:
    return len(made.opened.rooms.index)


async def matched_anew(made: House, client: Client, registered: Registered, keys: list[bytes]) -> int:
    """What the catalog says, asked past the index."""
    index, made.opened.rooms.index._shelves = made.opened.rooms.index._shelves, type(made.opened.rooms.index._shelves)()
    try:
        return (await client.match(registered, keys)).count
    finally:
        made.opened.rooms.index._shelves = index


@aio
async def test_the_second_match_asks_no_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with house("embedded", tmp_path / "gw", clock=ManualClock()) as made:
        client = made.client()
        registered = await client.register(format_of())
        await client.put(registered, keys_of(5), payloads_of(registered, 5))
        first = await client.match(registered, keys_of(5))
        asked = []
        monkeypatch.setattr(type(made.opened.rooms.catalog), "lookup", lambda *_: asked.append(1))
        assert await client.match(registered, keys_of(5)) == first
        assert (await client.match(registered, keys_of(3))).count == 3
        assert not asked


@pytest.mark.parametrize("kind", ["embedded", "unix"])
@pytest.mark.parametrize("end", ENDS)
@aio
async def test_law5_what_ended_is_not_remembered(tmp_path: Path, end: str, kind: Kind) -> None:
    async with house(kind, tmp_path / "gw", clock=ManualClock(), check=False) as made:
        admin, client = Admin(made.opened), made.client()
        registered = await client.register(format_of())
        keys = keys_of(4)
        await client.put(registered, keys, payloads_of(registered, 4), ttl="1h", labels=[Label("user", "u")])
        assert (await client.match(registered, keys)).count == 4
        assert remembered(made) == 4
        assert (await client.match(registered, keys)).count == 4
        await END[end](made, admin, client, registered)
        if end in CLOSING:
            with pytest.raises(RequestRefused):
                await client.match(registered, keys)
        else:
            assert (await client.match(registered, keys)).count == 0, f"law 5: {end}"


async def delete(made: House, admin: Admin, client: Client, registered: Registered) -> None:
    await client.delete(registered, keys_of(4))


async def label(made: House, admin: Admin, client: Client, registered: Registered) -> None:
    body = {"label": {"kind": "user", "value": "u"}}
    await admin.own("POST", "/tenants/-/namespaces/default/deletions", body)


async def expiry(made: House, admin: Admin, client: Client, registered: Registered) -> None:
    await made.wait(3600.0)


async def epochs(made: House, admin: Admin, client: Client, registered: Registered) -> None:
    await admin.own("POST", "/tenants/-/namespaces/default/keys/rotate", {"key": "data"})
    await admin.own(
        "PATCH", "/tenants/-/namespaces/default/keys", {"min_decrypt_epoch": 2}, query={"confirm": "default"}
    )


async def suspend(made: House, admin: Admin, client: Client, registered: Registered) -> None:
    await admin.own("PATCH", "/tenants/-/namespaces/default", {"state": "suspended"})


async def shred(made: House, admin: Admin, client: Client, registered: Registered) -> None:
    await admin.own("POST", "/tenants/-/namespaces/default/shred", query={"confirm": "default"})


async def evict(made: House, admin: Admin, client: Client, registered: Registered) -> None:
    scope = (await made.place()).scope
    catalog, now_ms = made.opened.rooms.catalog, made.opened.rooms.time.now_ms()
    found = await catalog.eviction_candidates(scope, now_ms, 10)
    await catalog.evict_nvme(scope, [one.blob_id for one in found], now_ms)
    for one in found:
        made.opened.rooms.staging.drop(one.object_name)


async def quarantine(made: House, admin: Admin, client: Client, registered: Registered) -> None:
    for file in (made.opened.folder / "nvme").rglob("*"):
        if file.is_file() and file.stat().st_size > 4096:
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
    staging = made.opened.rooms.staging
    for name in list(staging.names()):
        staging.drop(name)
    assert (await read(client, registered, keys_of(4)))[1] == [None] * 4, "law 2"


async def room(made: House, admin: Admin, client: Client, registered: Registered) -> None:
    await admin.own("PATCH", "/tenants/-/namespaces/default", {"over_quota": "make_room", "limit_objects": 4})
    scope = (await made.place()).scope
    while await made.opened.rooms.catalog.make_room(scope, made.opened.rooms.time.now_ms()):
        pass
    await admin.own("PATCH", "/tenants/-/namespaces/default", {"limit_objects": 1})
    while await made.opened.rooms.catalog.make_room(scope, made.opened.rooms.time.now_ms()):
        pass


END: dict[str, Any] = {
    "delete": delete,
    "label": label,
    "expiry": expiry,
    "epochs": epochs,
    "suspend": suspend,
    "shred": shred,
    "evict": evict,
    "quarantine": quarantine,
    "room": room,
}


@pytest.mark.parametrize("seed", range(3))
@aio
async def test_a_storm_of_everything_leaves_index_and_catalog_of_one_mind(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    clock = ManualClock()
    async with house("embedded", tmp_path / "gw", clock=clock) as made:
        client = made.client()
        registered = await client.register(format_of())
        used = 0
        async for keys, start, stop in storm(rng, made, client, registered, 150):
            for run in (keys[:stop], keys[start:stop]):
                said = (await client.match(registered, run)).count
                used += said > 0
                assert said == await matched_anew(made, client, registered, run), "law 5"
        assert used > 20, "nothing was ever there"


@on_footing
async def test_where_others_may_write_nothing_is_remembered_before_the_first_look(footing: Footing) -> None:
    async with footing.gateway("a") as made:
        client = made.client()
        registered = await client.register(format_of())
        await client.put(registered, keys_of(3), payloads_of(registered, 3))
        assert (await client.match(registered, keys_of(3))).count == 3
        assert remembered(made) == 0


def test_it_is_bounded_and_forgets_what_was_asked_longest_ago() -> None:
    each = RUN_BYTES + 16 * (8 + ENTRY_BYTES)
    index = MatchIndex(4 * each)
    keys = [[(16 * run + at).to_bytes(8, "big") for at in range(16)] for run in range(5)]
    for run in keys:
        index.remember(HERE, 0, 1, [(key, found()) for key in run])
    assert index.nbytes == 4 * each and len(index) == 64
    assert index.find(HERE, 0, [1], keys[0], 0) is None, "the oldest"
    assert index.find(HERE, 0, [1], keys[1], 0) is not None
    index.remember(HERE, 0, 1, [(key, found()) for key in keys[0]])
    assert index.find(HERE, 0, [1], keys[2], 0) is None, "not asked for since"
    assert index.find(HERE, 0, [1], keys[1], 0) is not None
    index.remember(THERE, 0, 1, [(key, found()) for key in keys[0]])
    assert index.find(HERE, 0, [1], keys[3], 0) is None, "of the namespace asked longest ago"
    assert index.find(THERE, 0, [1], keys[0], 0) is not None
    assert index.nbytes == 4 * each
    assert index.find(THERE, 1, [1], keys[0], 0) is None, "another version"
    assert index.find(THERE, 0, [2], keys[0], 0) is None, "another format"
    index.remember(THERE, 1, 1, [(keys[4][0], found())])
    assert index.nbytes == 3 * each + RUN_BYTES + 8 + ENTRY_BYTES, "what another version said is gone"
    nothing = MatchIndex(0)
    nothing.remember(HERE, 0, 1, [(b"k", found())])
    assert len(nothing) == nothing.nbytes == 0


def test_lists_that_part_and_go_on_share_what_they_have_in_common() -> None:
    index = MatchIndex(2**20)
    common = [f"common-{at}".encode() for at in range(10)]
    one, other = ([*common, *(f"{name}-{at}".encode() for at in range(20))] for name in ("one", "other"))
    for asked in (one[:12], other[:13], one, other, one[:25]):
        index.remember(HERE, 0, 1, [(key, found(key)) for key in asked])
        assert ids(index, asked) == [blob(key) for key in asked]
    assert len(index) == 50, "what both have is there once"
    assert [span.length for span in index.find(HERE, 0, [1], one, 0)[0]] == [10, 20], "no more pieces than ways to go"
    for stop in range(1, 31):
        assert ids(index, one[:stop]) == [blob(key) for key in one[:stop]]
    assert ids(index, [*one[:29], other[29]]) is None
    assert ids(index, [*common[:5], *common[6:]]) is None
    assert ids(index, one[3:]) is None, "nobody asked from there on yet"
    assert ids(index, [b"".join(one[:2])]) is None and ids(index, [common[0] + b"c", common[1][1:]]) is None


@pytest.mark.parametrize("seed", range(4))
def test_law2_any_order_of_lists_finds_what_was_last_found_or_nothing(seed: int) -> None:
    rng = random.Random(seed)
    index = MatchIndex(30_000)
    lasts: dict[bytes, int] = {}
    told = 0
    for step in range(600):
        path = [bytes([rng.randrange(3)]) for _ in range(8)]
        keys = [b"/".join(path[: at + 1]) for at in range(8)][rng.randrange(3) : rng.randint(3, 8)]
        if rng.random() < 0.4:
            for key in keys:
                lasts[key] = step
            index.remember(HERE, 0, 1, [(key, found(key, expires_ms=step)) for key in keys])
        now_ms = step - rng.randrange(200)
        spans = index.find(HERE, 0, [1], keys, now_ms)
        if spans is not None:
            told += 1
            assert [one for run, length in spans[0] for one in run.blobs(length)] == [blob(key) for key in keys]
            ends = [one for run, length in spans[0] for one in run.expiries[:length]]
            assert all(now_ms < end <= lasts[key] for end, key in zip(ends, keys, strict=True))
    assert told > 40
    assert index.nbytes == sum(run.nbytes for shelf in index._shelves.values() for run in shelf.runs.values())


def ids(index: MatchIndex, keys: list[bytes]) -> list[bytes] | None:
    spans = index.find(HERE, 0, [1], keys, 0)
    return None if spans is None else [one for run, length in spans[0] for one in run.blobs(length)]


HERE, THERE = (Scope(UUID(int=1), UUID(int=number)) for number in (1, 2))


def blob(key: bytes) -> bytes:
    return key[-16:].rjust(16, b"0")


def found(key: bytes = b"", expires_ms: int = 10) -> FoundChunk:
    values: dict[str, Any] = dict.fromkeys(FoundChunk._fields, 0)
    return FoundChunk(**{**values, "expires_ms": expires_ms, "blob_id": blob(key), "on_nvme": True})


@pytest.mark.parametrize("entries", [10_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_law9_an_entry_takes_no_more_memory_than_is_counted(entries: int) -> None:
    index = MatchIndex(2**30)
    tracemalloc.start()
    try:
        for _ in range(entries // 64):
            keys = [random.randbytes(32) for _ in range(64)]
            index.remember(HERE, 0, 1, [(key, found(key)) for key in keys])
        del keys
        for shelf in index._shelves.values():
            for run in shelf.runs.values():
                run.tiers = tuple(["staging"] * len(run))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == entries // 64 * 64
    assert taken <= index.nbytes <= 128 * len(index), f"{taken / len(index):.1f} bytes an entry"
