"""Several gateways over one PostgreSQL and one S3: who reads what from where, and what a dead one leaves behind."""

from __future__ import annotations

import asyncio
from itertools import chain
from unittest import mock

import pytest

from kvgw.client import Client
from kvgw.fence import FENCED_AFTER_SECONDS, LEASE_SECONDS
from kvgw.maintenance import crew
from kvgw.model import Durability, Outcome, PutOutcome
from kvgw.reports import Registered
from storage.tier import blob_name
from tenancy.errors import CatalogUnavailable
from tests.support.gateways import House, format_of, keys_of, payloads_of, read, take_up_backlog, until
from tests.support.manual_clock import ManualClock
from tests.support.proxy import Proxy
from tests.support.several import Footing, crash, on_footing, pass_time
from tests.tenancy.statement_lint import linted_statements

pytestmark = [pytest.mark.s3, pytest.mark.postgres, pytest.mark.timeout(120)]

Found = list[bytes | None]
STORED, HAVE = PutOutcome.STORED, PutOutcome.HAVE
NOBODY_HEARD = 2 * LEASE_SECONDS


@on_footing
async def test_what_is_in_s3_every_gateway_reads_at_once(shared: Footing) -> None:
    async with shared.gateway("a", clock=ManualClock()) as a, shared.gateway("b", clock=ManualClock()) as b:
        writer, reader = a.client(), b.client()
        registered = await writer.register(format_of())
        assert await reader.register(format_of()) == registered, "one namespace, one format, one fingerprint"
        keys, payloads = keys_of(4), payloads_of(registered, 4)
        assert (await writer.put(registered, keys, payloads, durability=Durability.S3)).stored == 4
        assert (await reader.match(registered, keys)).count == 4
        report, found = await read(reader, registered, keys)
        assert found == payloads, "law 3"
        assert {hit.tier for hit in report.hits} == {"s3"}
        assert (await reader.put(registered, keys, payloads, durability=Durability.S3)).outcomes == (HAVE,) * 4
        await take_up_backlog(b.opened.crew)
        node = b.opened.rooms.catalog.node.node
        promoted = await shared.rows(f"SELECT count(*) FROM placement WHERE node = '{node}' AND state = 'ok'")
        assert promoted == [(4,)], "what was read from S3 is on the reader's disk too"
        await shared.check_quota()


@on_footing
async def test_a_chunk_of_one_node_is_read_elsewhere_once_it_is_written_back(shared: Footing) -> None:
    async with shared.gateway("a", clock=ManualClock()) as a, shared.gateway("b", clock=ManualClock()) as b:
        writer, reader = a.client(), b.client()
        await a.namespace("fast", durability=Durability.STAGED)
        fast, other = a.client("fast"), b.client("fast")
        registered, staged = await writer.register(format_of()), await fast.register(format_of())
        keys, payloads = keys_of(2), payloads_of(registered, 2)
        await writer.put(registered, keys, payloads)
        await fast.put(staged, keys, payloads)
        for client, one in ((reader, registered), (other, staged)):
            assert (await client.match(one, keys)).count == 0, "it is only where its own gateway can read it"
            assert (await read(client, one, keys))[1] == [None, None]
        for client, one in ((writer, registered), (fast, staged)):
            assert (await read(client, one, keys))[1] == payloads
        await a.opened.crew.drain_everywhere()
        for client, one in ((reader, registered), (other, staged)):
            assert (await client.match(one, keys)).count == 2
            assert (await read(client, one, keys))[1] == payloads
        await shared.check_quota()


@on_footing
async def test_what_another_is_writing_back_is_had_until_its_lease_is_over(shared: Footing) -> None:
    here = ManualClock()
    async with shared.gateway("b", clock=here) as b:
        async with shared.gateway("a", clock=ManualClock()) as a:
            registered = await a.client().register(format_of())
            keys, payloads = keys_of(3), payloads_of(registered, 3)
            await a.client().put(registered, keys, payloads)
            client = b.client()
            assert (await client.put(registered, keys, payloads)).outcomes == (HAVE,) * 3
            assert (await client.match(registered, keys)).count == 0, "had is not yet readable from here"
            strong = await client.put(registered, keys[:1], payloads[:1], durability=Durability.S3)
            assert strong.outcomes == (STORED,), "have promises as much as stored: S3 was asked for"
            await pass_time(b, LEASE_SECONDS - 5)
            assert (await client.put(registered, keys[1:], payloads[1:])).outcomes == (HAVE,) * 2
            await crash(a)
        await pass_time(b, LEASE_SECONDS)
        assert (await client.put(registered, keys[1:], payloads[1:])).outcomes == (STORED,) * 2
        assert (await read(client, registered, keys))[1] == payloads
        await shared.check_quota()


@on_footing
async def test_law_5_a_delete_through_one_holds_on_every_other(shared: Footing) -> None:
    async with shared.gateway("a", clock=ManualClock()) as a, shared.gateway("b", clock=ManualClock()) as b:
        writer, reader = a.client(), b.client(read_deadline_s=30.0)
        registered = await writer.register(format_of())
        for attempt in range(5):
            keys, payloads = keys_of(3, f"round-{attempt}"), payloads_of(registered, 3, attempt)
            await writer.put(registered, keys, payloads, durability=Durability.S3)
            assert (await read(reader, registered, keys))[1] == payloads
            acknowledged = asyncio.Event()
            readers = [asyncio.create_task(read_on(b.client(), registered, keys, acknowledged)) for _ in range(3)]
            await asyncio.sleep(0.02 * attempt)  # the deletion meets the readers elsewhere each time
            assert await writer.delete(registered, keys) == 3
            acknowledged.set()
            before, after = zip(*[await one for one in readers], strict=True)
            assert all(chunk in (None, payloads[at]) for found in chain(*before) for at, chunk in enumerate(found))
            asked_later = [*chain(*after)]
            assert len(asked_later) >= 9
            assert all(found == [None] * 3 for found in asked_later), "law 5: acknowledged, yet read"
            blobs = await shared.rows("SELECT namespace_id, blob_id FROM chunk WHERE state = 'deleting'")
            staged = [one for one in blobs if b.opened.rooms.staging.holds(blob_name(one[0], one[1]))]
            assert attempt or staged, "the other gateway's staging still holds it: the catalog alone must refuse"
            assert (await reader.match(registered, keys)).count == 0
            assert (await reader.touch(registered, keys)).count == 0, "nor is it revived"
            await a.opened.crew.sweep_everywhere()
            await b.opened.crew.sweep_everywhere()
        assert await shared.rows("SELECT count(*) FROM chunk") == [(0,)]
        assert (await writer.stat()).objects == 0
        await shared.check_quota()


async def read_on(
    client: Client, registered: Registered, keys: list[bytes], acknowledged: asyncio.Event
) -> tuple[list[Found], list[Found]]:
    """Read until three reads began after the acknowledgement; what those before it found, and those after."""
    before: list[Found] = []
    after: list[Found] = []
    while len(after) < 3:
        results = after if acknowledged.is_set() else before
        results.append((await read(client, registered, keys))[1])
    return before, after


@on_footing
async def test_a_read_in_flight_while_its_chunk_is_deleted_ends_whole_or_as_a_miss(shared: Footing) -> None:
    async with shared.gateway("a", clock=ManualClock()) as a, shared.gateway("b", clock=ManualClock()) as b:
        writer, reader = a.client(), b.client()
        registered = await writer.register(format_of())
        keys, payloads = keys_of(1), payloads_of(registered, 1)
        await writer.put(registered, keys, payloads, durability=Durability.S3)
        tier = b.opened.rooms.tiers["s3"]
        reached, go_on = asyncio.Event(), asyncio.Event()
        fetch = tier.get_into

        async def slowly(name: str, view: memoryview) -> None:
            reached.set()
            await go_on.wait()
            await fetch(name, view)

        with mock.patch.object(type(tier), "get_into", lambda _, name, view: slowly(name, view)):
            reading = asyncio.create_task(read(reader, registered, keys))
            await reached.wait()
            assert await writer.delete(registered, keys) == 1
            await a.opened.crew.sweep_everywhere()
            go_on.set()
            report, found = await reading
        assert (report.outcome, found) == (Outcome.OK, [None]), "its bytes are gone: a miss, no outage"
        assert (await read(b.client(), registered, keys))[1] == [None]
        await b.opened.crew.sweep_everywhere()
        assert await shared.rows("SELECT count(*) FROM chunk") == [(0,)]
        await shared.check_clean(b)


@on_footing
async def test_what_only_a_dead_gateways_staging_held_is_lost_and_said_so(shared: Footing) -> None:
    here = ManualClock()
    async with shared.gateway("b", clock=here) as b:
        async with shared.gateway("a", clock=ManualClock()) as a:
            await a.namespace("fast", durability=Durability.STAGED)
            registered = await a.client("fast").register(format_of())
            keys, payloads = keys_of(4), payloads_of(registered, 4)
            await a.client("fast").put(registered, keys[:3], payloads[:3])
            await a.client("fast").put(registered, keys[3:], payloads[3:], durability=Durability.NVME)
            await b.opened.crew.sweep_everywhere()
            assert lost(b) == 0, "its gateway lives"
            await crash(a)
        await pass_time(b, NOBODY_HEARD)
        await b.opened.crew.sweep_everywhere()
        assert lost(b) == 3
        assert await shared.rows("SELECT reason, count(*) FROM tombstone GROUP BY 1") == [("lost", 3)]
        assert await shared.rows("SELECT count(*) FROM entry") == [(1,)], (
            "law 8: what is on its disk comes back with it"
        )
        await shared.check_quota()
        async with shared.gateway("a", clock=ManualClock()) as again:
            assert (await read(again.client("fast"), registered, keys))[1] == [None, None, None, payloads[3]]


def lost(gateway: House) -> float:
    return gateway.opened.rooms.metrics.registry.get_sample_value("kvgw_ended_entries_total", {"reason": "lost"}) or 0.0


@on_footing
async def test_a_shared_job_is_taken_over_when_its_gateway_dies(shared: Footing) -> None:
    here = ManualClock()
    async with shared.gateway("b", clock=here) as b:
        async with shared.gateway("a", clock=ManualClock()) as a:
            assert [await a.opened.crew._leads("sweep", 10.0) for _ in range(2)] == [True, True]
            for passed in (0.0, 20.0, 5.0):
                here.advance(passed)
                assert not await b.opened.crew._leads("sweep", 10.0), "its leader has it for three periods"
            assert await b.opened.crew._leads("orphans", 10.0), "each job for itself"
            await crash(a)
        here.advance(20.0)
        assert await b.opened.crew._leads("sweep", 10.0)
        async with shared.gateway("c", clock=ManualClock()) as c:
            assert not await c.opened.crew._leads("sweep", 10.0)


@on_footing
async def test_of_many_that_ask_at_once_one_leads(shared: Footing) -> None:
    async with shared.gateway("a") as a, shared.gateway("b") as b:
        catalogs = [a.opened.rooms.catalog, b.opened.rooms.catalog]
        for number in range(20):
            answers = await asyncio.gather(*(catalog.lead(f"job-{number}", 2000, 1000) for catalog in catalogs))
            assert sorted(answers) == [False, True]
            later = await asyncio.gather(*(catalog.lead(f"job-{number}", 3000, 1999) for catalog in catalogs))
            assert later == answers
            assert sorted(
                await asyncio.gather(*(catalog.lead(f"job-{number}", 9000, 3000) for catalog in catalogs))
            ) == [False, True]


@on_footing
async def test_N10_a_gateway_that_is_not_heard_announces_nothing(shared: Footing) -> None:
    here = ManualClock()
    async with shared.gateway("a", clock=here) as a:
        client = a.client()
        registered = await client.register(format_of())
        keys, payloads = keys_of(3), payloads_of(registered, 3)
        unheard = mock.patch.object(a.opened.rooms.catalog, "heartbeat", _away)
        with unheard:
            here.advance(FENCED_AFTER_SECONDS - 0.1)
            assert (await client.put(registered, keys[:1], payloads[:1])).outcomes == (STORED,)
            here.advance(0.2)
            with pytest.raises(CatalogUnavailable):
                await a.opened.crew.heartbeat()
            report = await client.put(registered, keys, payloads)
            assert (report.outcome, report.stored) == (Outcome.OUTAGE, 0)
            assert "announces nothing" in report.reason
            assert await shared.rows("SELECT count(*) FROM entry") == [(1,)], "N10: published 0"
            assert await shared.rows("SELECT count(*) FROM reservation") == [(0,)]
            assert (await read(client, registered, keys))[1] == [payloads[0], None, None], "reads go on"
        await a.opened.crew.heartbeat()
        assert (await client.put(registered, keys, payloads)).outcomes == (HAVE, STORED, STORED)
        await shared.check_quota()
        await shared.check_clean(a)


async def _away(*_: object) -> bool:
    raise CatalogUnavailable("planned")


@on_footing
async def test_N10_a_partition_from_the_database_fences_and_heals(shared: Footing) -> None:
    here = ManualClock()
    async with (
        Proxy(shared.server.port) as proxy,
        shared.gateway("b", clock=ManualClock()) as b,
        shared.gateway("a", settings=shared.settings(port=proxy.port), clock=here) as a,
    ):
        client = a.client(write_deadline_s=1.0, read_deadline_s=1.0)
        registered = await client.register(format_of())
        keys, payloads = keys_of(2), payloads_of(registered, 2)
        await client.put(registered, keys[:1], payloads[:1])
        proxy.freeze()
        here.advance(FENCED_AFTER_SECONDS + 1)
        assert a.opened.rooms.fence.closed
        assert (await client.put(registered, keys, payloads)).outcome is Outcome.OUTAGE
        assert (await client.match(registered, keys)).outcome is Outcome.OUTAGE
        with (
            mock.patch.object(crew, "HEARTBEAT_SECONDS", 0.5),
            pytest.raises(CatalogUnavailable, match="heartbeat"),
        ):
            await a.opened.crew.heartbeat()
        assert a.opened.rooms.fence.closed
        assert (await b.client().put(registered, keys[1:], payloads[1:], durability=Durability.S3)).stored == 1
        proxy.heal()  # the connections of before stay dead without a word
        with mock.patch.object(crew, "HEARTBEAT_SECONDS", 4.0):
            await recovers(a)
        later = a.client()
        assert (await read(later, registered, keys))[1] == payloads
        assert (await later.put(registered, keys, payloads)).outcomes == (HAVE,) * 2
        await shared.check_quota()


async def recovers(gateway: House) -> None:
    for _ in range(6):
        try:
            await gateway.opened.crew.heartbeat()
        except CatalogUnavailable:
            continue
        break
    await until(lambda: not gateway.opened.rooms.fence.closed, 1.0)


@on_footing
async def test_a_gateway_that_was_given_up_begins_anew(shared: Footing) -> None:
    async with shared.gateway("a", clock=ManualClock()) as a:
        client = a.client()
        registered = await client.register(format_of())
        keys, payloads = keys_of(1), payloads_of(registered, 1)
        await client.put(registered, keys, payloads)
        await shared.rows("DELETE FROM gateway_process RETURNING 1")
        await a.opened.crew.heartbeat()
        assert await shared.rows("SELECT count(*) FROM gateway_process WHERE left_ms IS NULL") == [(1,)]
        assert (await read(client, registered, keys))[1] == payloads


@on_footing
async def test_hits_of_two_gateways_in_any_order_do_not_wait_for_each_other(shared: Footing) -> None:
    async with shared.gateway("a") as a, shared.gateway("b") as b:
        client = a.client()
        registered = await client.register(format_of(64))
        keys = keys_of(60)
        await client.put(registered, keys, payloads_of(registered, 60), durability=Durability.S3)
        scope = (await a.place()).scope
        names = [row[0] for row in await shared.rows("SELECT entry_key FROM entry")]
        hits = [(1, name, 1, 5) for name in names]
        catalogs = (a.opened.rooms.catalog, b.opened.rooms.catalog)
        for _ in range(10):
            await asyncio.gather(
                catalogs[0].record_hits(scope, hits),
                catalogs[1].record_hits(scope, hits[::-1]),
                catalogs[0].extend(scope, 1, names, None, a.opened.rooms.time.now_ms()),
                catalogs[1].extend(scope, 1, names[::-1], None, b.opened.rooms.time.now_ms()),
            )
        assert await shared.rows("SELECT DISTINCT hits FROM entry") == [(20,)]


@on_footing
async def test_a_storm_on_the_same_keys_through_two_gateways_keeps_the_laws(shared: Footing) -> None:
    async with shared.gateway("a") as a, shared.gateway("b") as b:
        registered = await a.client().register(format_of())
        keys = keys_of(6)
        payloads = payloads_of(registered, 6)

        async def writer(gateway: House, seed: int) -> None:
            client = gateway.client(write_deadline_s=60.0, read_deadline_s=60.0)
            for step in range(12):
                first = (seed + step) % 4
                durability = Durability.S3 if step % 2 else Durability.NVME
                if step % 5 == 4:
                    await client.delete(registered, keys[first : first + 2])
                    continue
                report = await client.put(
                    registered, keys[first : first + 3], payloads[first : first + 3], durability=durability
                )
                assert report.outcome is Outcome.OK, report.reason
                found = (await read(client, registered, keys))[1]
                assert all(one in (None, payloads[at]) for at, one in enumerate(found)), "law 3"

        with linted_statements():  # I08
            await asyncio.gather(*(writer(gateway, seed) for seed in range(3) for gateway in (a, b)))
            for gateway in (a, b):
                for job in ("drain_everywhere", "sweep_everywhere", "evict", "look_for_orphans", "write_down_hits"):
                    await getattr(gateway.opened.crew, job)()
        for gateway in (a, b):
            await shared.check_clean(gateway)
        await shared.check_quota()
        assert await shared.rows("SELECT count(*) FROM placement WHERE state IN ('due', 'writing')") == [(0,)]
