"""S21: whatever is done to any record of the audit log is found, and the first record that is wrong is named."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from unittest import mock
from uuid import UUID

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from tenancy import metering
from tenancy.audit.auditing import Wanted, newest
from tenancy.audit.chain import Act, Record, record
from tenancy.audit.checkpoints import sign
from tenancy.errors import CatalogUnavailable, RegistryRefused
from tenancy.metering import HOUR_MS, METERS
from tests.support.aio import aio
from tests.tenancy.audit_bench import OTHER_SIGNER, OURS, SIGNER, THEIRS, Log, acts
from tests.tenancy.catalog_bench import ELSEWHERE, HERE, NOW, BenchSuite

ROWS = 200
WHOLE, TAMPERED, TRUNCATED = 0, 1, 2

FLIPS = {
    "at_ms": "at_ms + 1",
    "actor": "'token:other'",
    "action": "'namespace.delete'",
    "target": "target || 'x'",
    "result": "'refused'",
    "detail": "detail || ' '",
    "previous": "hash",
    "hash": "previous",
}


def flip(log: Log, seq: int, column: str) -> None:
    """Change one column of one record."""
    if column.endswith("_id"):
        other = UUID(int=0xCC)
        value = str(other) if log.connection.dialect.name == "postgresql" else other.hex
        log.run(f"UPDATE audit_record SET {column} = '{value}' WHERE seq = {seq}")
    else:
        log.run(f"UPDATE audit_record SET {column} = {FLIPS[column]} WHERE seq = {seq}")


def forged(before: Record) -> Record:
    """A record that continues `before` rightly."""
    one = replace(before, seq=before.seq + 1, tenant=None, namespace=None, actor="forger", previous=before.hash)
    return replace(one, hash=one.expected_hash())


def rewrite(log: Log, first: int) -> None:
    """Change record `first` and make every hash after it, and the head's, right again."""
    records = log.records()
    previous = records[first - 1].previous
    for one in records[first - 1 :]:
        changed = replace(one, target="rewritten", previous=previous)
        previous = changed.expected_hash()
        log.run(
            "UPDATE audit_record SET target = 'rewritten', previous = :previous, hash = :hash WHERE seq = :seq",
            previous=changed.previous,
            hash=previous,
            seq=one.seq,
        )
    log.set_head(log.length, previous)


def check_every_record(log: Log) -> None:
    columns = [*FLIPS, "tenant_id", "namespace_id"]
    records = log.records()
    for seq in range(1, log.length + 1):
        check_record(log, records, seq, columns[seq % len(columns)])
    assert log.verify().finding == WHOLE, "and all of it was taken back"


def check_record(log: Log, records: list[Record], seq: int, column: str) -> None:
    """Record `seq` flipped in `column`, deleted, followed by a forged one, swapped, and the log truncated before it."""

    def delete() -> None:
        log.run(f"DELETE FROM audit_record WHERE seq = {seq}")

    def insert() -> None:
        log.renumber(seq + 1, 1)
        log.put(forged(records[seq - 1]))

    def truncate() -> None:
        log.run(f"DELETE FROM audit_record WHERE seq >= {seq}")
        log.set_head(seq - 1, records[seq - 1].previous)

    def swap() -> None:
        log.run(
            f"UPDATE audit_record SET seq = -seq WHERE seq = {seq}",
            f"UPDATE audit_record SET seq = {seq} WHERE seq = {seq + 1}",
            f"UPDATE audit_record SET seq = {seq + 1} WHERE seq = -{seq}",
        )

    def replace_one() -> None:
        changed = replace(records[seq - 1], target="replaced")
        values = {"hash": changed.expected_hash(), "seq": seq}
        log.run("UPDATE audit_record SET target = 'replaced', hash = :hash WHERE seq = :seq", **values)

    last = seq == log.length
    assert log.after(lambda: flip(log, seq, column)) == (TAMPERED, seq), (column, seq)
    # Without its last record a log is one that was truncated.
    assert log.after(delete) == (TRUNCATED if last else TAMPERED, seq), seq
    # The forged record continues its predecessor: what is wrong is the next, or what the checkpoint of the end says.
    assert log.after(insert) == (TAMPERED, seq + 1 if last else min(seq + 2, log.length)), seq
    # Changed together with its hash: what is wrong is the next one's link, or what the checkpoint of the end says.
    assert log.after(replace_one) == (TAMPERED, min(seq + 1, log.length)), seq
    assert log.after(truncate) == (TRUNCATED, seq), seq
    assert last or log.after(swap) == (TAMPERED, seq), seq


def check_ends_and_checkpoints(log: Log) -> None:
    verdict = log.verify()
    assert (verdict.finding, verdict.records, verdict.checkpoints) == (WHOLE, log.length, 2)
    # The head alone.
    assert log.after(lambda: log.set_head(log.length, b"x" * 32)) == (TAMPERED, log.length)
    assert log.after(lambda: log.set_head(log.length + 1, b"x" * 32)) == (TRUNCATED, log.length + 1)
    assert log.after(lambda: log.run("DELETE FROM audit_record")) == (TRUNCATED, 1)
    # Whoever rewrites all that is in the database is found by what is outside, and by the note inside.
    for first in (1, log.length // 2, log.length):
        assert log.after(lambda first=first: rewrite(log, first)) == (TAMPERED, log.length)

    def rewrite_and_sign(signer: Any) -> None:
        rewrite(log, 7)
        digest = log.records()[-1].hash
        log.run("UPDATE audit_checkpoint SET note = :note", note=sign(signer, log.length, digest, NOW).note)

    assert log.after(lambda: rewrite_and_sign(OTHER_SIGNER))[0] == TAMPERED, "another key is no key"
    assert log.after(lambda: rewrite_and_sign(SIGNER)) == (TAMPERED, log.length), "the copy outside still says so"

    def nothing() -> None: ...

    ahead = sign(SIGNER, log.length + 3, b"x" * 32, NOW).note
    assert log.after(nothing, [log.checkpoint.note, ahead]) == (TRUNCATED, log.length + 1)
    earlier = sign(SIGNER, 50, log.records()[49].hash, NOW).note
    assert log.after(nothing, [log.checkpoint.note, earlier]) == (TRUNCATED, 50), "the log was once set back"
    assert log.after(nothing, [earlier, log.checkpoint.note]) == (WHOLE, 0)
    assert log.after(nothing, [earlier]) == (TRUNCATED, log.length), "a copy outside is missing"
    dropped = "DELETE FROM audit_checkpoint"
    assert log.after(lambda: log.run(dropped), [log.checkpoint.note]) == (WHOLE, 0), "one may have been cut short"
    assert log.after(lambda: log.run(dropped), [earlier, log.checkpoint.note]) == (TRUNCATED, 50)
    assert log.after(nothing, [log.checkpoint.note.replace("time 1", "time 2")])[0] == TAMPERED
    assert log.after(nothing, ["garbage\n"])[0] == TAMPERED
    moved = "UPDATE audit_checkpoint SET seq = seq - 1"
    assert log.after(lambda: log.run(moved), [log.checkpoint.note]) == (TAMPERED, log.length - 1), "not what is signed"


class AuditContract(BenchSuite):
    """On any database; `raw` gives a connection of one who may do everything."""

    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("rows", [60, pytest.param(ROWS, marks=pytest.mark.slow)])
    @aio
    async def test_S21_every_record_flipped_deleted_inserted_swapped_and_truncated(self, rows: int) -> None:
        async with self.backend() as backend:
            await backend.transact(lambda connection: check_every_record(Log.written(connection, rows)))

    @aio
    async def test_S21_the_head_and_the_checkpoints_are_part_of_it(self) -> None:
        async with self.backend() as backend:
            await backend.transact(lambda connection: check_ends_and_checkpoints(Log.written(connection, ROWS)))

    @aio
    async def test_records_are_only_ever_added(self) -> None:
        async with self.backend() as backend:
            await backend.catalog(HERE).record_all(acts(3), NOW)
            for change in ("UPDATE audit_record SET target = ''", "DELETE FROM audit_record WHERE seq = 2"):

                def body(connection: Connection, change: str = change) -> None:
                    connection.execute(text(change))

                with pytest.raises((CatalogUnavailable, DBAPIError, IntegrityError), match="only ever added"):
                    await backend.transact(body)
            assert len(await backend.catalog(HERE).audit_newest(Wanted(), None, 10)) == 3

    @aio
    async def test_a_tenant_reads_its_own_records_and_filters_hold(self) -> None:
        async with self.backend() as backend:
            catalog = backend.catalog(HERE)
            await catalog.record_all(acts(9), NOW)
            own = await catalog.audit_newest(Wanted(tenant=OURS), None, 100)
            assert [one.seq for one in own] == [7, 4, 1], "I09"
            assert [one.seq for one in (await catalog.audit_page(THEIRS, 0, 100)).records] == [2, 5, 8]
            assert len((await catalog.audit_page(None, 0, 100)).records) == 9
            for wanted, found in (
                (Wanted(actor="token:3"), [4]),
                (Wanted(action="namespace"), [9, 8, 7, 6, 5, 4, 3, 2, 1]),
                (Wanted(action="namespace.create", tenant=THEIRS), [8, 5, 2]),
                (Wanted(action="name"), []),
                (Wanted(action="%"), []),
                (Wanted(since_ms=NOW + 1), []),
                (Wanted(until_ms=NOW), []),
                (Wanted(namespace=own[0].namespace), [7]),
            ):
                assert [one.seq for one in await catalog.audit_newest(wanted, None, 100)] == found, wanted
            assert [one.seq for one in await catalog.audit_newest(Wanted(), 4, 2)] == [3, 2]

    @aio
    async def test_F10_no_record_holds_what_a_terminal_or_a_log_would_obey(self) -> None:
        async with self.backend() as backend:
            evil = "a\nb\x1b[31m\x9b2J\u202e\r"
            act = Act(actor="owner", action="token.create", target=evil, detail={evil: evil})

            def body(connection: Connection) -> Any:
                record(connection, act, NOW)
                return newest(connection, Wanted(), None, 1)

            (one,) = await backend.transact(body)
            for told in (one.target, one.detail):
                assert told.isprintable()
                assert "\\u202e" in told
                assert "\\x1b" in told

    @aio
    async def test_usage_that_many_gateways_add_at_once_is_summed(self) -> None:
        async with self.bench() as bench:
            one, other = bench.backend.catalog(HERE), bench.backend.catalog(ELSEWHERE)
            cells = [
                (scope.namespace, hour * HOUR_MS, meter)
                for scope in (bench.scope, bench.other)
                for hour in range(3)
                for meter in METERS
            ]
            # In opposite orders: whoever locked row by row as they came would wait for the other in a circle.
            orders = [dict.fromkeys(cells, 2), dict.fromkeys(reversed(cells), 3)]
            nobodys = {(UUID(int=77), 0, "lookups"): 5}
            await asyncio.gather(
                *(catalog.add_usage(OURS, order) for catalog in (one, other) for order in orders for _ in range(10)),
                one.add_usage(OURS, nobodys),
            )
            found = await one.usage_sums(OURS, None, 0, 2**50, "hour")
            assert len(found) == 6
            assert all(each.amounts == dict.fromkeys(METERS, 100) for each in found)
            (day,) = await one.usage_sums(OURS, bench.scope.namespace, 0, 2**50, "day")
            assert day.amounts == dict.fromkeys(METERS, 300)
            assert await one.usage_sums(OURS, None, 3 * HOUR_MS, 2**50, "hour") == []
            assert await one.usage_sums(THEIRS, None, 0, 2**50, "hour") == [], "law 6"
            with mock.patch.object(metering, "ROWS_MAX", 5), pytest.raises(RegistryRefused, match="more than 5 sums"):
                await one.usage_sums(OURS, None, 0, 2**50, "hour")
            assert await one.forget_usage(bench.scope, 2 * HOUR_MS) == 2 * len(METERS)
            assert await other.usage_sums(OURS, bench.scope.namespace, 0, 2**50, "hour") == found[2:3]
