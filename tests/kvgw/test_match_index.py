"""The index of matches never says more than the catalog does, whatever happens in between (laws 2 and 5)."""

from __future__ import annotations

import random
from dataclasses import fields
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from kvgw.client import Client
from kvgw.errors import RequestRefused
from kvgw.gateway.index import ENTRIES_MAX, Known, MatchIndex
from kvgw.model import Durability, Label
from kvgw.reports import Registered
from tenancy.model import FoundChunk, Scope
from tests.support.admin import Admin
from tests.support.aio import aio
from tests.support.gateways import House, format_of, house, keys_of, payloads_of, read
from tests.support.manual_clock import ManualClock
from tests.support.several import Footing, on_footing

ENDS = ("delete", "label", "expiry", "epochs", "suspend", "shred", "evict", "quarantine", "room")
CLOSING = ("suspend", "shred")
"""The namespace takes no requests after these."""


def remembered(made: House) -> int:
    return made.opened.rooms.index._entries


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


@pytest.mark.parametrize("end", ENDS)
@aio
async def test_law5_what_ended_is_not_remembered(tmp_path: Path, end: str) -> None:
    async with house("embedded", tmp_path / "gw", clock=ManualClock(), check=False) as made:
        admin, client = Admin(made.opened), made.client()
        registered = await client.register(format_of())
        keys = keys_of(4)
        await client.put(registered, keys, payloads_of(registered, 4), ttl="1h", labels=[Label("user", "u")])
        assert (await client.match(registered, keys)).count == 4
        assert remembered(made) == 4
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
        keys = keys_of(12)
        payloads = payloads_of(registered, 12)
        used = 0
        for _ in range(150):
            start = rng.randrange(12)
            stop = rng.randint(start + 1, 12)
            match rng.randrange(7):
                case 0 | 1:
                    durability = rng.choice([Durability.STAGED, Durability.NVME])
                    await client.put(registered, keys[start:stop], payloads[start:stop], ttl=60, durability=durability)
                case 2:
                    await client.delete(registered, keys[start:stop])
                case 3:
                    await made.wait(rng.uniform(1, 30))
                case 4:
                    await made.opened.crew.sweep_everywhere()
                case 5:
                    await read(client, registered, keys[start:stop])
                case _:
                    await made.opened.crew.drain_everywhere()
            for run in (keys[:stop], keys[start:stop]):
                said = (await client.match(registered, run)).count
                used += said > 0
                assert said == await matched_anew(made, client, registered, run), "law 5"
        assert used > 20, "nothing was ever there"


@on_footing
async def test_where_several_gateways_write_nothing_is_remembered(footing: Footing) -> None:
    async with footing.gateway("a") as made:
        client = made.client()
        registered = await client.register(format_of())
        await client.put(registered, keys_of(3), payloads_of(registered, 3))
        assert (await client.match(registered, keys_of(3))).count == 3
        assert remembered(made) == 0


def test_it_is_bounded_and_forgets_the_namespace_asked_longest_ago() -> None:
    index = MatchIndex()
    scopes = [Scope(UUID(int=1), UUID(int=number)) for number in range(5)]
    each = ENTRIES_MAX // 4
    for scope in scopes:
        index.remember(scope, 0, 1, [(number.to_bytes(8, "big"), "name", found()) for number in range(each)])
    assert index._entries == 4 * each <= ENTRIES_MAX
    assert index.find(scopes[0], 0, [1], [bytes(8)], 0) is None
    assert index.find(scopes[4], 0, [1], [bytes(8)], 0) == [[Known(10, b"b", "name", True)]]
    assert index.find(scopes[4], 1, [1], [bytes(8)], 0) is None, "another version"
    assert index.find(scopes[4], 0, [1], [bytes(8)], 10) is None, "expired"
    index.remember(scopes[4], 1, 1, [])
    assert index._entries == 3 * each


def found() -> FoundChunk:
    values: dict[str, Any] = dict.fromkeys((one.name for one in fields(FoundChunk)), 0)
    return FoundChunk(**{**values, "expires_ms": 10, "blob_id": b"b", "on_nvme": True})
