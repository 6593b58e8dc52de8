"""The books of a gateway: usage, totals of each minute, checkpoints; on a clock that the test moves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
from sqlalchemy import Connection

from kvgw.errors import Outage, RequestRefused
from kvgw.gateway import meter as meters
from kvgw.gateway.meter import Meter
from kvgw.maintenance.books import CHECKPOINT_RECORDS, Books
from kvgw.verify import verify_catalog
from kvgw.witness import Witness, notes_from, notes_in
from storage.errors import TierUnavailable
from storage.s3 import S3Objects, S3Options
from tenancy.audit import chain
from tenancy.audit.auditing import Wanted
from tenancy.audit.chain import Act, Record
from tenancy.audit.checkpoints import sign
from tenancy.audit.verifying import Finding
from tenancy.catalog import Catalog
from tenancy.errors import AuditBroken, CatalogUnavailable
from tenancy.metering import DAY_MS, HOUR_MS, KEPT_DAYS
from tenancy.model import FormatRow, Scope
from tests.kvgw.maintenance_bench import CHUNK, Works, works
from tests.support.admin import Admin
from tests.support.aio import aio
from tests.support.gateways import keys_of
from tests.support.seaweed import S3Server
from tests.tenancy.audit_bench import SIGNER, lift_triggers


async def sums(one: Works, by: Any = "hour") -> dict[str, int]:
    """All sums of the namespace, added up."""
    found = await one.rooms.catalog.usage_sums(one.scope.tenant, None, 0, 2**50, by)
    return {name: sum(each.amounts.get(name, 0) for each in found) for each in found for name in each.amounts}


async def records(one: Works, action: str) -> list[Record]:
    return await one.rooms.catalog.audit_newest(Wanted(action=action), None, 100)


def books_of(one: Works) -> Books:
    return one.crew.books


def unavailable(*_: Any, **__: Any) -> Any:
    raise CatalogUnavailable("the database is away")


# Usage


@aio
async def test_what_clients_did_is_added_to_its_hour(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        await one.put(4)
        assert await one.hits(6) == [0, 1, 2, 3]
        assert (await one.client.match(one.registered, keys_of(5))).count == 4
        assert await one.client.delete(one.registered, keys_of(1)) == 1
        await books_of(one).write_down_usage()
        assert await sums(one) == {
            "puts": 1,
            "put_chunks": 4,
            "put_bytes": 4 * CHUNK,
            "gets": 1,
            "get_chunks": 4,
            "get_missed": 2,
            "get_bytes_staging": 4 * CHUNK,
            "lookups": 1,
            "matched_keys": 4,
            "missed_keys": 1,
            "matched_tokens": 64,
            "missed_tokens": 16,
            "deleted_chunks": 1,
        }
        one.clock.advance(3600)
        await one.crew.heartbeat()
        await one.put(1, "later")
        await books_of(one).write_down_usage()
        found = await one.rooms.catalog.usage_sums(one.scope.tenant, one.scope.namespace, 0, 2**50, "hour")
        assert [each.amounts.get("puts") for each in found] == [1, 1]
        assert found[1].bucket_ms - found[0].bucket_ms == HOUR_MS
        assert (await sums(one, "month"))["puts"] == (await sums(one, "day"))["puts"] == 2
        await books_of(one).write_down_usage()
        assert (await sums(one))["puts"] == 2, "nothing is added twice"


@aio
async def test_sums_survive_the_end_of_a_gateway(tmp_path: Path) -> None:
    for run in range(1, 4):
        async with works(tmp_path) as one:
            await one.put(2, f"run-{run}")
            before = await sums(one)
            assert before.get("put_chunks", 0) == 2 * (run - 1), "the last counts were written when the gateway ended"


@aio
async def test_counts_that_the_catalog_did_not_take_are_neither_lost_nor_doubled(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        await one.put(3)
        books = books_of(one)
        for _ in range(3):
            with mock.patch.object(Catalog, "add_usage", unavailable), pytest.raises(CatalogUnavailable):
                await books.write_down_usage()
            with mock.patch.object(Catalog, "record_all", unavailable), pytest.raises(CatalogUnavailable):
                await books.write_down_totals(now=True)
        await Admin(one.gateway).own("POST", "/tenants", {"name": "theirs"})
        theirs = await one.rooms.catalog.tenant("theirs")
        assert theirs is not None
        (other,) = await one.rooms.catalog.namespaces(theirs)
        one.rooms.meter.deleted(other.scope, 7)
        writing = asyncio.create_task(books.write_down_usage())
        while one.rooms.meter._usage:
            await asyncio.sleep(0)  # it has taken the counts, and is writing those of the first tenant
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        await books.write_down_usage()
        await books.write_down_totals(now=True)
        assert (await sums(one))["put_chunks"] == 3
        (found,) = await one.rooms.catalog.usage_sums(theirs, None, 0, 2**50, "day")
        assert found.amounts == {"deleted_chunks": 7}, "the one after the one that was being written"
        totals = [json.loads(each.detail) for each in await records(one, "chunk.totals")]
        assert sorted((each.get("puts", 0), each.get("deletes", 0)) for each in totals) == [(0, 7), (3, 0)]


def test_counts_are_bounded_and_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "CELLS_MAX", 4)
    monkeypatch.setattr(meters, "MINUTES_MAX", 2)
    monkeypatch.setattr(meters, "REFUSED_MAX", 2)
    meter = Meter(cast("Any", mock.Mock(now_ms=lambda: 5)))
    scopes = [Scope(*(mock.sentinel.tenant, number)) for number in range(9)]
    for scope in scopes:
        meter.deleted(scope, 1)
    assert (len(meter.take_minutes()), meter.dropped) == (2, 5 + 7)
    assert sum(len(its) for its in meter.take_usage().values()) == 4
    batch = mock.Mock(scope=scopes[0], format_id=1, entry_keys=tuple(keys_of(5)))
    meter.wrote(batch, [meters.PutOutcome.OVER_QUOTA] * 5, FormatRow(1, b"", 1, 1, b""))
    remembered = [meter.refused_ms(scopes[0], 1, key) for key in keys_of(5)]
    assert remembered == [None, None, None, 5, 5], "the last"
    meter.wrote(batch, [meters.PutOutcome.STORED] * 5, FormatRow(1, b"", 1, 1, b""))
    assert meter.refused_ms(scopes[0], 1, keys_of(5)[4]) is None


@aio
async def test_what_is_kept_is_sampled_over_time_by_the_leader_alone(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        await one.put(3)
        usage, *_ = await one.rooms.catalog.usage(one.scope)
        books, other = books_of(one), Books(one.rooms)
        for _ in range(60):
            await books.sample([one.scope, one.scope], leads=True)
            await other.sample([one.scope], leads=False)
            one.clock.advance(60)
        await books.sample([one.scope], leads=True)
        kept = (await sums(one))["kv_byte_hours"]
        assert usage.stored_bytes - 60 <= kept <= usage.stored_bytes, "bytes × one hour"
        one.clock.advance(7 * 86_400)
        await books.sample([one.scope], leads=True)
        assert (await sums(one))["kv_byte_hours"] < 1.1 * kept, "a time without a sample was no time of service"


@aio
async def test_sums_older_than_four_hundred_days_are_dropped(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        now_ms = one.rooms.time.now_ms()
        hours = [now_ms - now_ms % HOUR_MS - days * DAY_MS for days in (0, KEPT_DAYS - 1, KEPT_DAYS + 1)]
        await one.rooms.catalog.add_usage(
            one.scope.tenant, {(one.scope.namespace, hour, "lookups"): 1 for hour in hours}
        )
        await books_of(one).sample([one.scope], leads=True)
        one.clock.advance(10)
        await books_of(one).sample([one.scope], leads=True)
        assert (await sums(one))["lookups"] == 2


# What is recorded


@aio
async def test_a_minute_of_a_namespace_is_one_record_and_an_idle_one_is_none(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        books = books_of(one)
        await one.put(4)
        await one.hits(6)
        await books.write_down_totals()
        assert await records(one, "chunk.totals") == [], "the minute is not over"
        one.clock.advance(61)
        await books.write_down_totals()
        one.clock.advance(61)
        await books.write_down_totals()
        (found,) = await records(one, "chunk.totals")
        assert (found.tenant, found.namespace) == (one.scope.tenant, one.scope.namespace)
        detail = json.loads(found.detail)
        assert detail.pop("since_ms") == found.at_ms - 61_000
        assert detail == {
            "gets": 6,
            "hits": 4,
            "get_bytes": 4 * CHUNK,
            "puts": 4,
            "put_bytes": 4 * CHUNK,
            "over_quota": 0,
        }


@aio
async def test_a_delete_is_recorded_in_its_own_transaction_and_without_keys(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        await one.put(3, "secret")
        with mock.patch.object(chain, "record", unavailable), pytest.raises(Outage):
            await one.client.delete(one.registered, keys_of(3, "secret"))
        assert await one.hits(3, "secret") == [0, 1, 2], "not recorded, not done"
        assert await one.client.delete(one.registered, keys_of(4, "secret")) == 3
        (found,) = await records(one, "chunk.delete")
        assert json.loads(found.detail) == {"asked": 4, "deleted": 3, "format": 1}
        assert (found.actor, found.target, found.namespace) == ("owner", "", one.scope.namespace)
        assert b"secret" not in repr(await records(one, "")).encode()


@aio
async def test_those_without_a_credential_are_counted_by_where_they_came_from(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        for source in ("tcp", "tcp", "http", "of their choosing"):
            with pytest.raises(RequestRefused), one.rooms.meter.strangers_from(source):
                await one.gateway.authenticator.token("kvgw_" + "a" * 16 + "_secret")
        await books_of(one).write_down_totals(now=True)
        await books_of(one).write_down_totals(now=True)
        found = {each.target: json.loads(each.detail)["count"] for each in await records(one, "caller.refuse")}
        assert found == {"tcp": 2, "http": 1, "other": 1}
        assert "secret" not in repr(await records(one, "caller"))


# Checkpoints


async def verdict(one: Works, *more: Callable[[], AsyncIterator[str]]) -> Any:
    file = one.gateway.folder / "audit" / "checkpoints"
    outside = {"in the file": each_of(notes_in(file)), **{f"in {n}": notes() for n, notes in enumerate(more)}}
    return await verify_catalog(one.rooms.catalog._database, one.rooms.signer.public_key, outside)


async def each_of(notes: Iterator[str]) -> AsyncIterator[str]:
    for note in notes:
        yield note


async def change(one: Works, statement: str) -> None:
    """What the owner of the database file can do."""

    def body(connection: Connection) -> None:
        lift_triggers(connection)
        connection.exec_driver_sql(statement)

    await one.rooms.catalog._database.write(body)


@aio
async def test_a_checkpoint_is_signed_after_a_minute_or_a_thousand_records_and_copied(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        books, file = books_of(one), one.gateway.folder / "audit" / "checkpoints"
        await books.checkpoint(leads=False)
        assert not file.exists(), "another gateway leads"
        await books.checkpoint(leads=True)
        assert len(list(notes_in(file))) == 1, "the first start made records"
        await books.checkpoint(leads=True)
        one.clock.advance(61)
        await books.checkpoint(leads=True)
        assert len(list(notes_in(file))) == 1, "nothing new"
        await one.client.delete(one.registered, keys_of(1))
        await books.checkpoint(leads=True)
        one.clock.advance(59)
        await books.checkpoint(leads=True)
        assert len(list(notes_in(file))) == 2, "61 s after the last"
        await one.client.delete(one.registered, keys_of(1))
        await books.checkpoint(leads=True)
        assert len(list(notes_in(file))) == 2, "60 s are not over"
        act = Act(actor="owner", action="token.create")
        await one.rooms.catalog.record_all([act] * CHECKPOINT_RECORDS, one.rooms.time.now_ms())
        await books.checkpoint(leads=True)
        assert len(list(notes_in(file))) == 3, "a thousand records"
        assert [note for _, note in await one.rooms.catalog.audit_notes(0, 10)] == list(notes_in(file))
        found = await verdict(one)
        assert (found.finding, found.checkpoints) == (Finding.WHOLE, 6)


@aio
async def test_a_log_that_was_changed_is_not_signed_any_more(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        books = books_of(one)
        await books.checkpoint(leads=True)
        for _ in range(5):
            await one.client.delete(one.registered, keys_of(1))
        one.clock.advance(61)
        await change(one, "UPDATE audit_record SET detail = '{}' WHERE seq = 6")
        with pytest.raises(AuditBroken, match="record 6 was changed"):
            await books.checkpoint(leads=True)
        assert len(await one.rooms.catalog.audit_notes(0, 10)) == 1
        found = await verdict(one)
        assert (found.finding, found.seq) == (Finding.TAMPERED, 6)


@pytest.mark.parametrize("name", ["in a file, which is read before the database", "in the file, read after it"])
@aio
async def test_checkpoints_signed_while_the_log_is_verified_are_no_sign_of_tampering(name: str, tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        books, file = books_of(one), one.gateway.folder / "audit" / "checkpoints"

        async def sign_more() -> None:
            for _ in range(2):
                await one.client.delete(one.registered, keys_of(1))
                one.clock.advance(61)
                await books.checkpoint(leads=True)

        async def notes() -> AsyncIterator[str]:
            before = list(notes_in(file))
            for note in before:
                yield note
            await sign_more()
            if "after" in name:  # the database has said that it has no more
                for note in list(notes_in(file))[len(before) :]:
                    yield note

        await sign_more()
        found = await verify_catalog(one.rooms.catalog._database, one.rooms.signer.public_key, {name: notes()})
        assert (found.finding, found.sentence) == (Finding.WHOLE, "the log is whole")
        assert len(list(notes_in(file))) == 4


@aio
async def test_a_database_set_back_is_found_by_the_copies_outside(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        books = books_of(one)
        for _ in range(3):
            await one.client.delete(one.registered, keys_of(1))
        one.clock.advance(61)
        await books.checkpoint(leads=True)
        head = await one.rooms.catalog.audit_head()
        await change(
            one,
            f"DELETE FROM audit_record WHERE seq > {head.seq - 2}",
        )
        for statement in (
            "DELETE FROM audit_checkpoint",
            f"UPDATE audit_head SET seq = {head.seq - 2}, "
            f"hash = (SELECT hash FROM audit_record WHERE seq = {head.seq - 2})",
        ):
            await one.rooms.catalog._database.write(
                lambda connection, statement=statement: connection.exec_driver_sql(statement)
            )
        found = await verdict(one)
        assert (found.finding, found.seq) == (Finding.TRUNCATED, head.seq - 1)


class _Objects:
    """S3 objects in memory, which fail as they are told."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.away = False

    async def put(self, name: str, data: bytes) -> None:
        if self.away:
            raise TierUnavailable("S3 is away")
        self.stored[name] = data


@aio
async def test_a_copy_that_s3_did_not_take_is_owed(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        objects = _Objects()
        rng = one.rooms.rng
        witness = Witness(one.gateway.folder, cast("S3Objects", objects), one.rooms.workers, rng)
        books = books_of(one)
        books._witness = witness
        objects.away = True
        with pytest.raises(TierUnavailable):
            await books.checkpoint(leads=True)
        assert len(await one.rooms.catalog.audit_notes(0, 10)) == 1, "the file has it"
        with pytest.raises(TierUnavailable):
            await books.checkpoint(leads=False)
        objects.away = False
        await books.checkpoint(leads=False)
        await books.checkpoint(leads=False)
        assert [data.decode() for data in objects.stored.values()] == [
            note for _, note in await one.rooms.catalog.audit_notes(0, 10)
        ]


@pytest.mark.s3
@aio
async def test_copies_in_s3_come_back_in_their_order(seaweed: S3Server, tmp_path: Path) -> None:
    options = S3Options(
        bucket=seaweed.bucket,
        prefix=f"books-{tmp_path.name}/audit/",
        endpoint_url=seaweed.endpoint,
        region=seaweed.region,
        addressing_style=seaweed.addressing,
        access_key_id=seaweed.access_key,
        secret_access_key=seaweed.secret_key,
    )
    async with S3Objects(options) as objects, works(tmp_path) as one:
        witness = Witness(tmp_path, objects, one.rooms.workers, one.rooms.rng)
        notes = []
        for seq in (9, 10, 100, 1000):
            await witness.keep(sign(SIGNER, seq, b"x" * 32, 1))
            await witness.settle()
            notes.append(sign(SIGNER, seq, b"x" * 32, 1).note)
        assert [note async for note in notes_from(objects)] == notes
        with mock.patch("kvgw.witness.OBJECTS_READ_MAX", 2):
            assert [note async for note in notes_from(objects)] == notes[-2:], "the newest"
