"""The books of two gateways over one PostgreSQL and one S3: sums of both, one log, one who signs."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

from kvgw.verify import verify_catalog
from kvgw.wiring.tiers import open_audit_objects
from kvgw.witness import notes_from
from tenancy.audit.auditing import Wanted
from tenancy.audit.verifying import Finding
from tests.support.gateways import House, format_of, keys_of, payloads_of, read
from tests.support.manual_clock import ManualClock
from tests.support.several import Footing, on_footing

pytestmark = [pytest.mark.s3, pytest.mark.postgres, pytest.mark.timeout(120)]


@on_footing
async def test_two_gateways_keep_one_set_of_books(shared: Footing) -> None:
    async with shared.gateway("a", clock=ManualClock()) as a, shared.gateway("b", clock=ManualClock()) as b:
        for number, house in enumerate((a, b)):
            await work(house, f"gateway-{number}")
        await asyncio.gather(*(house.opened.crew.books.write_down_usage() for house in (a, b)))
        (sums,) = await a.opened.rooms.catalog.usage_sums(a.owner.tenant, None, 0, 2**50, "day")
        counted = {name: sums.amounts[name] for name in ("puts", "put_chunks", "get_chunks", "deleted_chunks")}
        assert counted == {"puts": 2, "put_chunks": 8, "get_chunks": 8, "deleted_chunks": 2}
        for house in (a, b):
            await house.wait(61)
        await asyncio.gather(*(house.opened.crew.keep_audit_log() for house in (a, b)))
        totals = await a.opened.rooms.catalog.audit_newest(Wanted(action="chunk.totals"), None, 10)
        assert {one.target for one in totals} == {house.opened.rooms.catalog.node.node for house in (a, b)}
        assert sum(json.loads(one.detail)["puts"] for one in totals) == 8
        await asyncio.gather(*(house.opened.crew.keep_audit_log() for house in (a, b)))

        files = [house.opened.folder / "audit" / "checkpoints" for house in (a, b)]
        assert sorted(file.exists() for file in files) == [False, True], "one of them leads"
        async with AsyncExitStack() as stack:
            for house in (a, b):
                objects = open_audit_objects(stack, shared.settings())
                assert objects is not None
                rooms = house.opened.rooms
                verdict = await verify_catalog(
                    rooms.catalog._database, rooms.signer.public_key, {"in S3": notes_from(objects)}
                )
                assert (verdict.finding, verdict.checkpoints) == (Finding.WHOLE, 2), "the other one can verify it too"
        assert (await shared.rows("SELECT count(*) FROM audit_checkpoint")) == [(1,)]


async def work(house: House, name: str) -> None:
    """Four chunks put and read, one deleted."""
    client = house.client()
    registered = await client.register(format_of())
    keys = keys_of(4, name)
    await client.put(registered, keys, payloads_of(registered, 4, seed=len(name) + hash(name) % 1000))
    assert len((await read(client, registered, keys))[0].hits) == 4
    assert await client.delete(registered, keys[:1]) == 1
