"""Keys rotate, rise and end while gateways serve: several of them over one PostgreSQL, one S3 and one key store.

Each gateway caches policy for seconds and keys for minutes; none may miss what it could read, or read what it must not.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from kvgw.client import Client
from kvgw.errors import RequestRefused
from kvgw.gateway.directory import POLICY_SECONDS
from kvgw.maintenance.crew import Pace
from kvgw.model import Durability, PutOutcome
from kvgw.reports import Registered
from tenancy.audit.chain import Act
from tenancy.errors import KeyUnavailable
from tenancy.keys.epochs import EpochPolicy
from tests.support.gateways import House, format_of, keys_of, payloads_of, read
from tests.support.manual_clock import ManualClock
from tests.support.several import Footing, on_footing, pass_time

pytestmark = [pytest.mark.s3, pytest.mark.postgres, pytest.mark.timeout(120)]

ACT = Act(actor="owner", action="key.test")
STORED = PutOutcome.STORED


async def epochs_of(shared: Footing) -> dict[int, int]:
    """Live chunks by epoch."""
    return dict(await shared.rows("SELECT epoch, count(*) FROM chunk WHERE state = 'live' GROUP BY epoch"))


async def rotate(gateway: House) -> int:
    """As the admin route does."""
    scope = (await gateway.place()).scope
    epoch = await gateway.opened.custodian.rotate_data_key(scope, ACT)
    gateway.opened.directory.forget(scope.tenant)
    return epoch


@on_footing
async def test_C10_a_rotation_under_traffic_misses_nothing(shared: Footing) -> None:
    """Two gateways write and read without a pause while one rotates: 0 misses, no failed PUT; then only new epochs."""
    async with (
        shared.gateway("a", clock=ManualClock()) as a,
        shared.gateway("b", clock=ManualClock()) as b,
    ):
        registered = await a.client().register(format_of())
        before = payloads_of(registered, 4, seed=1)
        await a.client().put(registered, keys_of(4, "before"), before, durability=Durability.S3)
        done = asyncio.Event()
        turns = dict.fromkeys(("a", "b"), 0)

        async def traffic(name: str, mine: House, theirs: House, seed: int) -> None:
            writer, reader = mine.client(), theirs.client()
            while not done.is_set():
                turn = turns[name]
                keys, payloads = keys_of(2, f"{name}-{turn}"), payloads_of(registered, 2, seed=seed + turn)
                report = await writer.put(registered, keys, payloads, durability=Durability.S3)
                assert report.outcomes == (STORED, STORED)
                assert (await read(reader, registered, keys))[1] == payloads, f"{name} {turn}"
                assert (await read(reader, registered, keys_of(4, "before")))[1] == before
                turns[name] = turn + 1

        async with asyncio.TaskGroup() as group:
            group.create_task(traffic("a", a, b, 1_000))
            group.create_task(traffic("b", b, a, 500_000))
            for number in range(4):
                reached = {name: count + 2 for name, count in turns.items()}
                while any(turns[name] < reached[name] for name in turns):
                    await asyncio.sleep(0.01)
                await rotate((a, b)[number % 2])
            done.set()
        assert (await a.place()).epoch == 5
        for gateway in (a, b):
            gateway.clock.advance(POLICY_SECONDS + 0.1)  # type: ignore[union-attr]
        counts = await epochs_of(shared)
        for gateway, name in ((a, "last-a"), (b, "last-b")):
            await gateway.client().put(registered, keys_of(3, name), payloads_of(registered, 3, seed=hash(name) % 999))
        after = await epochs_of(shared)
        assert after[5] - counts.get(5, 0) == 6, "100 % of what is new is in the new epoch"
        assert {**after, 5: 0} == {**counts, 5: 0}


@on_footing
async def test_C10_another_gateways_new_epoch_is_opened_at_once(shared: Footing) -> None:
    """The reader's keys are in memory for minutes; the epoch that it meets is one that they lack."""
    async with (
        shared.gateway("a", clock=ManualClock()) as a,
        shared.gateway("b", clock=ManualClock()) as b,
    ):
        writer, reader = a.client(), b.client()
        registered = await writer.register(format_of())
        assert (await read(reader, registered, keys_of(1)))[1] == [None]
        await rotate(a)
        payloads = payloads_of(registered, 2)
        await writer.put(registered, keys_of(2), payloads, durability=Durability.S3)
        assert await epochs_of(shared) == {2: 2}
        assert (await read(reader, registered, keys_of(2)))[1] == payloads


@on_footing
async def test_C10_a_put_that_began_before_the_rotation_is_announced_after_it(shared: Footing) -> None:
    async with shared.gateway("a", clock=ManualClock()) as a, shared.gateway("b", clock=ManualClock()) as b:
        client = a.client()
        registered = await client.register(format_of())
        catalog = a.opened.rooms.catalog
        real = catalog.commit

        async def after_a_rotation(*arguments: object, **named: object) -> object:
            catalog.commit = real  # type: ignore[method-assign]
            await rotate(b)
            return await real(*arguments, **named)  # type: ignore[arg-type]

        catalog.commit = after_a_rotation  # type: ignore[method-assign,assignment]
        payloads = payloads_of(registered, 2)
        report = await client.put(registered, keys_of(2), payloads, durability=Durability.S3)
        assert report.outcomes == (STORED, STORED)
        assert await epochs_of(shared) == {1: 2}, "with the epoch that it was sealed in"
        for gateway in (a, b):
            gateway.opened.rooms.keyring.forget((await gateway.place()).scope)
            assert (await read(gateway.client(), registered, keys_of(2)))[1] == payloads


@on_footing
async def test_C11_raising_the_least_epoch_makes_misses_on_every_gateway(shared: Footing) -> None:
    """Four gateways whose policy and keys are in memory: the next request of each misses, not one in 5 s."""
    async with AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(shared.gateway(name, clock=ManualClock())) for name in ("a", "b", "c", "d")
        ]
        registered = await gateways[0].client().register(format_of())
        payloads = payloads_of(registered, 3)
        await gateways[0].client().put(registered, keys_of(3), payloads, durability=Durability.S3)
        for gateway in gateways:
            assert (await read(gateway.client(), registered, keys_of(3)))[1] == payloads
        await rotate(gateways[1])
        new = payloads_of(registered, 1, seed=9)
        await gateways[1].client().put(registered, [b"new"], new, durability=Durability.S3)
        scope = (await gateways[0].place()).scope
        await gateways[1].opened.custodian.change_epochs(scope, EpochPolicy(min_decrypt_epoch=2), ACT)
        for gateway in gateways:
            client = gateway.client()
            assert (await client.match(registered, keys_of(3))).count == 0
            assert (await read(client, registered, keys_of(3)))[1] == [None] * 3
            assert (await read(client, registered, [b"new"]))[1] == new
        await gateways[2].opened.crew.tend_keys()
        assert await epochs_of(shared) == {2: 1}, "and what nobody may open makes room"
        await shared.check_quota()
        stale = gateways[3]
        with pytest.raises(RequestRefused, match="send it again"):  # its policy is seconds old
            await stale.client().put(registered, keys_of(3), payloads, durability=Durability.S3)
        stale.clock.advance(POLICY_SECONDS + 0.1)  # type: ignore[union-attr]
        stored = await stale.client().put(registered, keys_of(3), payloads, durability=Durability.S3)
        assert stored.outcomes == (STORED,) * 3
        assert await epochs_of(shared) == {2: 4}


@on_footing
async def test_C13_a_shred_stops_every_gateway_and_ends_what_is_under_way(shared: Footing) -> None:
    """The other gateway has the keys in memory and chunks in staging: not one more is served, and no new one stored."""
    async with shared.gateway("a", clock=ManualClock()) as a, shared.gateway("b", clock=ManualClock()) as b:
        place = await a.namespace("doomed")
        client, other = a.client("doomed"), b.client("doomed")
        registered = await client.register(format_of())
        payloads = payloads_of(registered, 3)
        await client.put(registered, keys_of(3), payloads, durability=Durability.S3)
        assert (await read(other, registered, keys_of(3)))[1] == payloads
        held = await b.opened.rooms.keyring.keys(place.scope)
        await shred_in_the_middle_of_a_put(shared, a, b, other, registered)
        assert await answer_of(other, registered) in ("miss", "refused")
        assert await answer_of(client, registered) in ("miss", "refused")
        with pytest.raises(RequestRefused):
            await other.put(registered, keys_of(1, "late"), payloads[:1], durability=Durability.S3)
        await b.opened.crew.keys.watch()
        with pytest.raises(KeyUnavailable):
            held.data_key(1).reveal()
        assert place.scope not in b.opened.rooms.keyring.held()
        assert Pace().watch + POLICY_SECONDS < 5, "law 5: within five seconds"
        await a.opened.crew.tend_keys()
        await pass_time(a, 60)  # the interrupted PUT's reservation ends with its lease
        await a.opened.crew.sweep_everywhere()
        await b.opened.crew.sweep_everywhere()
        assert await epochs_of(shared) == {}, "its bytes go too"
        assert await shared.rows("SELECT stored_bytes, objects FROM quota WHERE stored_bytes > 0") == []
        await shared.check_quota()


async def shred_in_the_middle_of_a_put(
    shared: Footing, a: House, b: House, other: Client, registered: Registered
) -> None:
    place, catalog = await a.place("doomed"), b.opened.rooms.catalog
    real = catalog.commit

    async def after_the_shred(*arguments: object, **named: object) -> object:
        catalog.commit = real  # type: ignore[method-assign]
        await a.opened.custodian.shred(place.scope, ACT)
        return await real(*arguments, **named)  # type: ignore[arg-type]

    catalog.commit = after_the_shred  # type: ignore[method-assign,assignment]
    with pytest.raises(RequestRefused):
        await other.put(registered, keys_of(1, "mid"), payloads_of(registered, 1, seed=5), durability=Durability.S3)
    assert await shared.rows("SELECT count(*) FROM chunk WHERE state = 'live'") == [(3,)], "it was not announced"


async def answer_of(client: Client, registered: Registered) -> str:
    try:
        _, found = await read(client, registered, keys_of(3))
    except RequestRefused:
        return "refused"
    return "miss" if found == [None] * 3 else "hit"
