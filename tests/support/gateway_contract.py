"""One contract for every transport: what a client may count on, whatever lies between it and the gateway."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock
from unittest.mock import AsyncMock

import pytest

from kvgw.client import Client
from kvgw.errors import Outage, RequestRefused
from kvgw.gateway.core import Gateway
from kvgw.model import Durability, Label, Outcome, PutOutcome, Why
from kvgw.reports import Registered
from tenancy import sweep
from tenancy.errors import CatalogUnavailable
from tenancy.sealing import sealed_length
from tests.support.aio import aio
from tests.support.gateways import House, Kind, format_of, house, keys_of, payloads_of, read
from tests.support.manual_clock import ManualClock

STORED, HAVE, CONFLICT = PutOutcome.STORED, PutOutcome.HAVE, PutOutcome.CONFLICT
DAY_S = 86_400
MEASURED = 3
"""A machine that stands still for a moment proves nothing; a call that overstays does so each time."""
ON_DISK = "SELECT state FROM placement WHERE tier = 'nvme'"


class GatewayContract:
    """Inherit, and name the transport."""

    kind: ClassVar[Kind]

    def house(self, tmp_path: Path, **options: Any) -> AbstractAsyncContextManager[House]:
        return house(self.kind, tmp_path / "gw", **options)

    # The life of a chunk

    @aio
    async def test_what_was_put_is_matched_and_read(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client = gateway.client()
            registered = await client.register(format_of())
            keys, payloads = keys_of(5), payloads_of(registered, 5)
            assert (await client.match(registered, keys)).count == 0
            report = await client.put(registered, keys, payloads)
            assert report.outcomes == (STORED,) * 5
            assert report.stored == 5
            match = await client.match(registered, [*keys, b"other"])
            assert (match.count, match.tiers, match.outcome) == (5, ("staging",) * 5, Outcome.OK)
            found, read_back = await read(client, registered, keys)
            assert read_back == payloads, "law 3: exactly what was put"
            assert found.leading == 5
            assert {hit.tier for hit in found.hits} <= {"staging", "nvme"}

    @aio
    async def test_registering_again_is_the_same(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client, other = gateway.client(), gateway.client()
            first = await client.register(format_of())
            assert await other.register(format_of()) == first
            assert (await client.stat()).formats == 1

    @aio
    async def test_a_get_is_a_miss_for_what_is_not_there(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client = gateway.client()
            registered = await client.register(format_of())
            keys, payloads = keys_of(4), payloads_of(registered, 4)
            await client.put(registered, keys[:1], payloads[:1])
            await client.put(registered, keys[3:], payloads[3:])
            report, read_back = await read(client, registered, keys)
            assert report.outcome is Outcome.OK, "a miss is a value, not an outage"
            assert read_back == [payloads[0], None, None, payloads[3]]
            assert report.leading == 1
            assert (await client.match(registered, keys)).count == 1, "match counts the leading run only"
            assert (await client.match(registered, keys[1:])).count == 0

    @aio
    async def test_only_wanted_payloads_travel(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client = gateway.client()
            registered = await client.register(format_of())
            keys, payloads = keys_of(6), payloads_of(registered, 6)
            await client.put(registered, keys[:4], payloads[:4])
            travelled: list[int] = []
            with mock.patch.object(Gateway, "put", _spying_put(travelled)):
                report = await client.put(registered, keys, payloads)
            assert report.outcomes == (HAVE,) * 4 + (STORED,) * 2
            assert travelled == [4, 5]

    @aio
    async def test_entries_form_an_ordered_chain(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client = gateway.client()
            registered = await client.register(format_of())
            keys, payloads = keys_of(5), payloads_of(registered, 5)
            await client.put(registered, keys[:3], payloads[:3])
            await client.put(registered, keys[3:], payloads[3:], parent=keys[2], depth=3)
            rows = await gateway.rows("SELECT entry_key, parent, depth FROM entry ORDER BY depth")
            assert [row[2] for row in rows] == [0, 1, 2, 3, 4]
            assert [row[1] for row in rows] == [None, *(row[0] for row in rows[:-1])]

    @aio
    async def test_match_over_formats_is_the_shortest_run(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client = gateway.client()
            ranks = [await client.register(format_of(parallel=(2, rank, 1, 0, 1, 0))) for rank in (0, 1)]
            keys = keys_of(4)
            await client.put(ranks[0], keys, payloads_of(ranks[0], 4))
            assert (await client.match(ranks, keys)).count == 0
            await client.put(ranks[1], keys[:3], payloads_of(ranks[1], 3))
            assert (await client.match(ranks, keys)).count == 3

    @aio
    async def test_an_entry_ends_with_its_ttl_to_the_millisecond(self, tmp_path: Path) -> None:
        clock = ManualClock()
        async with self.house(tmp_path, clock=clock) as gateway:
            client = gateway.client()
            registered = await client.register(format_of())
            key, payload = keys_of(1), payloads_of(registered, 1)
            put = await client.put(registered, key, payload, ttl=60)
            assert put.expires_ms == gateway.now_ms() + 60_000
            await gateway.wait(59.999)
            assert (await client.match(registered, key)).count == 1
            await gateway.wait(0.001)
            assert (await client.match(registered, key)).count == 0, "law 5: expires_at > now, no margin"
            assert (await read(client, registered, key))[1] == [None]
            assert (await client.touch(registered, key)).count == 0, "law 5: what expired is not revived"
            assert (await client.put(registered, key, payload)).outcomes == (STORED,)

    @aio
    async def test_touch_and_get_extend_and_never_shorten(self, tmp_path: Path) -> None:
        clock = ManualClock()
        async with self.house(tmp_path, clock=clock) as gateway:
            client = gateway.client()
            registered = await client.register(format_of())
            key, payload = keys_of(1), payloads_of(registered, 1)
            await client.put(registered, key, payload, ttl=60)
            assert (await client.touch(registered, [*key, b"none"], ttl=10)).count == 1
            await gateway.wait(40)
            report, read_back = await read(client, registered, key)
            assert read_back == payload, "touch never shortens"
            assert report.hits[0].expires_ms == gateway.now_ms() + 60_000, "a sliding TTL starts anew"
            await client.touch(registered, key, ttl=DAY_S)
            await gateway.wait(DAY_S - 1)
            assert (await client.match(registered, key)).count == 1

    @aio
    async def test_delete_is_all_at_once(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client, reader = gateway.client(), gateway.client()
            registered = await client.register(format_of())
            keys, payloads = keys_of(4), payloads_of(registered, 4)
            await client.put(registered, keys, payloads)
            assert await client.delete(registered, [*keys[1:3], b"none"]) == 2
            assert (await read(reader, registered, keys))[1] == [payloads[0], None, None, payloads[3]], "law 5"
            assert await client.delete(registered, keys[1:3]) == 0
            await gateway.opened.crew.sweep_everywhere()
            assert (await client.stat()).objects == 2

    @aio
    async def test_explain_says_what_became_of_each_key(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client = gateway.client()
            registered = await client.register(format_of())
            keys = keys_of(3)
            await client.put(registered, keys[:2], payloads_of(registered, 2))
            await client.delete(registered, keys[1:2])
            reply = await client.explain(registered, keys)
            assert [one.why for one in reply.answers] == [Why.VISIBLE, Why.DELETED, Why.UNKNOWN]
            other = replace(registered, kv_format=replace(registered.kv_format, model="another"))
            reply = await client.explain(other, keys)
            assert [(one.field, one.asked) for one in reply.differences] == [("model", "another")]

    @aio
    async def test_a_delete_that_fails_deletes_nothing(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client = gateway.client()
            registered = await client.register(format_of())
            keys, payloads = keys_of(3), payloads_of(registered, 3)
            await client.put(registered, keys, payloads)
            # Between the entries, which are gone by then, and their chunks.
            with mock.patch.object(sweep, "doom_unused", _broken), pytest.raises(Outage, match="no"):
                await client.delete(registered, keys)
            assert (await read(client, registered, keys))[1] == payloads, "all or nothing"

    @aio
    async def test_Q13_equal_content_is_charged_once(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client = gateway.client()
            registered = await client.register(format_of())
            payload = payloads_of(registered, 1)[0]
            await client.put(registered, [b"a"], [payload])
            once = await client.stat()
            assert (await client.put(registered, [b"b"], [payload])).outcomes == (STORED,)
            assert (await client.put(registered, [b"c", b"d"], [payload, payload])).outcomes == (STORED,) * 2
            now = await client.stat()
            assert (now.entries, now.chunks, now.objects) == (4, 1, 1)
            assert now.stored_bytes == once.stored_bytes == sealed_length(registered.chunk_bytes)
            assert await client.delete(registered, [b"a", b"b", b"c"]) == 3
            assert (await read(client, registered, [b"d"]))[1] == [payload], "the last entry keeps the chunk"

    @aio
    async def test_the_first_writer_of_a_key_wins(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client = gateway.client()
            registered = await client.register(format_of())
            mine, other = payloads_of(registered, 1, seed=1), payloads_of(registered, 1, seed=2)
            reports = await asyncio.gather(*(client.put(registered, [b"k"], one) for one in (mine, other)))
            assert sorted(report.outcomes[0] for report in reports) in ([CONFLICT, STORED], [HAVE, STORED])
            winner = mine if reports[0].outcomes[0] is STORED else other
            assert (await read(client, registered, [b"k"]))[1] == winner
            assert (await client.put(registered, [b"k"], mine)).outcomes == (HAVE,)
            assert (await read(client, registered, [b"k"]))[1] == winner
            assert (await client.stat()).objects == 1, "Q13: the loser is charged nothing"

    @aio
    async def test_over_quota_grants_a_leading_run(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            each = sealed_length(format_of().chunk_bytes)
            await gateway.namespace("small", limit_bytes=3 * each + 1)
            client = gateway.client("small")
            registered = await client.register(format_of())
            keys, payloads = keys_of(5), payloads_of(registered, 5)
            report = await client.put(registered, keys, payloads)
            assert report.outcomes == (STORED,) * 3 + (PutOutcome.OVER_QUOTA,) * 2, "law 4"
            assert report.stored == 3
            assert "quota" in report.reason
            with mock.patch.object(gateway.opened.crew.sweep, "collect", AsyncMock(return_value=0)):  # else it races
                await client.delete(registered, keys[:1])
                assert (await client.put(registered, keys[3:4], payloads[3:4])).stored == 0, "charged until swept"
            await gateway.opened.crew.sweep_everywhere()
            assert (await client.put(registered, keys[3:4], payloads[3:4])).stored == 1
            assert (await client.stat()).stored_bytes == 3 * each

    @aio
    async def test_labels_attach_to_new_entries_and_to_those_there(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client = gateway.client()
            registered = await client.register(format_of())
            keys, payloads = keys_of(2), payloads_of(registered, 2)
            await client.put(registered, keys[:1], payloads[:1], labels=[Label("user", "somebody")])
            labels = [Label("user", "somebody"), Label("session", "s"), Label("session", "s")]
            report = await client.put(registered, keys, payloads, labels=labels)
            assert report.outcomes == (HAVE, STORED)
            counts = await gateway.rows("SELECT count(*) FROM entry_label GROUP BY entry_key")
            assert counts == [(2,), (2,)]
            values = await gateway.rows("SELECT label_mac FROM entry_label")
            assert all(len(value) == 32 and b"somebody" not in value for (value,) in values), (
                "labels are kept as keyed hashes only"
            )

    @aio
    async def test_durability_says_where_the_bytes_are(self, tmp_path: Path) -> None:
        clock = ManualClock()  # write-back happens when the clock is moved, not before
        async with self.house(tmp_path, clock=clock) as gateway:
            await gateway.namespace("fast", durability=Durability.STAGED)
            client = gateway.client("fast")
            registered = await client.register(format_of())
            payloads = payloads_of(registered, 2)
            await client.put(registered, [b"staged"], payloads[:1])
            assert (await client.match(registered, [b"staged"])).tiers == ("staging",)
            assert await gateway.rows(ON_DISK) == [("due",)], "law 8: staged promises nothing"
            await client.put(registered, [b"nvme"], payloads[1:], durability=Durability.NVME)
            assert sorted(await gateway.rows(ON_DISK)) == [("due",), ("ok",)]
            assert len(_blobs(gateway)) == 1, "law 8: an nvme chunk is on the disk when it is acknowledged"
            await self.check_s3(gateway, client, registered)
            await gateway.opened.crew.drain_everywhere()
            assert len(_blobs(gateway)) == 2
            assert (await client.match(registered, [b"staged"])).count == 1

    async def check_s3(self, gateway: House, client: Client, registered: Registered) -> None:
        """What a PUT with durability s3 means for a house without that tier."""
        with pytest.raises(RequestRefused, match="durability s3"):
            await client.put(registered, [b"s3"], payloads_of(registered, 1), durability=Durability.S3)

    @aio
    async def test_R07_the_deadline_holds_and_nothing_pends(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client = gateway.client(read_deadline_s=0.2)
            registered = await client.register(format_of())
            keys, payloads = keys_of(2), payloads_of(registered, 2)
            await client.put(registered, keys, payloads)
            slow = mock.patch.object(type(gateway.opened.rooms.catalog), "lookup", _never)
            with slow:
                for _ in range(MEASURED):
                    started = time.monotonic()
                    answers = [await client.match(registered, keys)]
                    answers += await asyncio.gather(*(client.match(registered, keys) for _ in range(5)))
                    took = time.monotonic() - started
                    if took < 2 * 0.2 + 0.25:
                        break
                else:
                    pytest.fail(f"two calls, one after the other, took {took:.2f} s: each ends with its own deadline")
                assert {(one.count, one.outcome) for one in answers} == {(0, Outcome.OUTAGE)}
                with pytest.raises(Outage):
                    await client.match(registered, keys, on_error="raise")
            recovered = gateway.client()
            assert (await recovered.match(registered, keys)).count == 2

    @aio
    async def test_a_closed_client_answers_with_an_outage(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client = gateway.client()
            registered = await client.register(format_of())
            await client.aclose()
            await client.aclose()
            match = await client.match(registered, [b"k"])
            assert (match.count, match.outcome) == (0, Outcome.OUTAGE)
            assert "closed" in match.reason
            with pytest.raises(Outage, match="closed"):
                await client.delete(registered, [b"k"])


async def _never(*_: object) -> None:
    await asyncio.Event().wait()


def _spying_put(travelled: list[int]) -> Any:
    real = Gateway.put

    async def put(self: Gateway, caller: Any, request: Any, source: Any) -> Any:
        wanted, shared, receive = source.wanted, source.shared, source.receive
        asked: list[int] = []

        async def spied_wanted(indices: Any) -> None:
            asked.extend(indices)
            await wanted(indices)

        async def spied_shared(most: int, nbytes: int) -> Any:
            lying = await shared(most, nbytes)
            travelled.extend(asked[len(travelled) : len(travelled) + len(lying)])
            return lying

        async def spied_receive(chunks: Any) -> None:
            travelled.extend(index for index, _ in chunks)
            await receive(chunks)

        with mock.patch.multiple(source, wanted=spied_wanted, shared=spied_shared, receive=spied_receive):
            return await real(self, caller, request, source)

    return put


def _broken(*_: object) -> None:
    raise CatalogUnavailable("no")


def _blobs(gateway: House) -> list[Path]:
    return [file for file in (gateway.opened.folder / "nvme" / "v1").rglob("*") if file.is_file()]
