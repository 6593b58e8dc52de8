"""A namespace at its quota: rejects, or makes room by its own least valuable entries (law 4 either way)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvgw.client import Client
from kvgw.model import PutOutcome
from kvgw.reports import Registered
from tests.support.admin import Admin
from tests.support.aio import aio
from tests.support.gateways import House, format_of, house, payloads_of

SEALED = 4096 + 256 + 16
CHUNKS = 20


async def full(made: House, **policy: Any) -> tuple[Client, Registered]:
    """A client of a namespace of `CHUNKS` chunks that are all taken."""
    await Admin(made.opened).own(
        "POST", "/tenants/-/namespaces", {"name": "small", "limit_bytes": CHUNKS * SEALED, **policy}
    )
    client = made.client("small")
    registered = await client.register(format_of())
    for number in range(CHUNKS):
        report = await client.put(registered, [b"old-%d" % number], payloads_of(registered, 1, seed=number))
        assert report.outcomes == (PutOutcome.STORED,)
    return client, registered


async def used(made: House) -> int:
    (found,) = [one for one in await Admin(made.opened).own("GET", "/tenants/-/namespaces") if one["name"] == "small"]
    assert found["stored_bytes"] <= CHUNKS * SEALED, "law 4"
    return int(found["stored_bytes"])


@aio
async def test_reject_keeps_what_is_there(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as made:
        client, registered = await full(made)
        report = await client.put(registered, [b"new"], payloads_of(registered, 1, seed=99))
        assert report.outcomes == (PutOutcome.OVER_QUOTA,)
        assert (await client.match(registered, [b"old-0"])).count == 1


@pytest.mark.parametrize("durability", ["staged", "nvme"])
@aio
async def test_make_room_takes_what_is_new_and_gives_up_the_longest_unused(tmp_path: Path, durability: str) -> None:
    async with house("unix", tmp_path / "gw") as made:
        client, registered = await full(made, over_quota="make_room", durability=durability)
        stored = 0
        for number in range(CHUNKS):
            report = await client.put(registered, [b"new-%d" % number], payloads_of(registered, 1, seed=1000 + number))
            stored += report.outcomes == (PutOutcome.STORED,)
            await used(made)
        assert stored == CHUNKS, "a PUT waits for the room that is made for it"
        assert (await client.match(registered, [b"old-0"])).count == 0
        assert (await client.match(registered, [b"new-%d" % (CHUNKS - 1)])).count == 1


@aio
async def test_a_batch_larger_than_the_room_gets_its_leading_run(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as made:
        client, registered = await full(made, over_quota="make_room")
        keys = [b"new-%d" % number for number in range(2 * CHUNKS)]
        report = await client.put(registered, keys, payloads_of(registered, len(keys), seed=5), deadline_s=5)
        outcomes = list(report.outcomes)
        assert PutOutcome.STORED in outcomes
        granted = outcomes.count(PutOutcome.STORED)
        assert outcomes == [PutOutcome.STORED] * granted + [PutOutcome.OVER_QUOTA] * (2 * CHUNKS - granted)
        await used(made)


@aio
async def test_what_is_held_makes_no_room(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as made:
        client, registered = await full(made, over_quota="make_room", hold_bytes=2 * CHUNKS * SEALED)
        for number in range(CHUNKS):
            assert await client.hold(registered, [b"old-%d" % number], "30m") == 1
        report = await client.put(registered, [b"new"], payloads_of(registered, 1, seed=99), deadline_s=5)
        assert report.outcomes == (PutOutcome.OVER_QUOTA,)
        assert await client.hold(registered, [b"old-3", b"old-4", b"old-5"], None) == 3
        report = await client.put(registered, [b"new"], payloads_of(registered, 1, seed=99))
        assert report.outcomes == (PutOutcome.STORED,)
        assert (await client.match(registered, [b"old-0"])).count == 1, "what is held stays"
