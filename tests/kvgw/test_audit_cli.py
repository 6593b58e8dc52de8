"""``kvgw audit``, ``kvgw usage`` and ``kvgw explain`` as an operator runs them, and what tenants get to see of it."""

from __future__ import annotations

import csv
import io
import json
import logging
import sqlite3
from pathlib import Path

import pytest

from kvgw.cli.logs import FORM, OneLine
from kvgw.model import Outcome
from tenancy.metering import METERS
from tests.kvgw.maintenance_bench import CHUNK, works
from tests.support.admin import Admin
from tests.support.aio import aio, run
from tests.support.gateways import keys_of
from tests.support.served import SMALL_TOML, answer, kvgw


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder with something in its log, its usage and its checkpoints."""
    data = tmp_path / "data"

    async def fill() -> None:
        async with works(data) as one:
            await one.put(3)
            await one.hits(4)
            await one.client.delete(one.registered, keys_of(1))
            await one.client.match(one.registered, keys_of(2))
            await one.crew.books.write_down_totals(now=True)
            one.clock.advance(61)
            await one.crew.books.checkpoint(leads=True)

    run(fill())
    (data / "kvgw.toml").write_text(SMALL_TOML)
    return data


def tamper(folder: Path, *statements: str) -> None:
    """As whoever may write the database's file."""
    connection = sqlite3.connect(folder / "catalog.db")
    for act in ("update", "delete"):
        connection.execute(f"DROP TRIGGER IF EXISTS audit_record_no_{act}")
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def verified(*arguments: str) -> tuple[int, str]:
    """Exit code and what was said."""
    done = kvgw("audit", "verify", *arguments)
    return done.returncode, done.stdout + done.stderr


def test_S21_the_exit_code_says_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    where = ("--data", str(folder))
    code, said = verified(*where)
    assert (code, "whole" in said) == (0, True), said
    copy = tmp_path / "log"
    assert kvgw("audit", "export", str(copy), *where).returncode == 0
    assert verified(str(copy))[0] == 0
    assert kvgw("audit", "export", str(copy), *where).returncode == 1, "an export is never written over"

    checkpoints = folder / "audit" / "checkpoints"
    kept = checkpoints.read_bytes()
    checkpoints.unlink()
    code, said = verified(*where)
    assert (code, "no copy outside" in said) == (2, True), said
    checkpoints.write_bytes(kept.replace(b"time 1", b"time 2"))
    assert verified(*where)[0] == 1
    checkpoints.write_bytes(b"{}\n")
    assert verified(*where)[0] == 3
    checkpoints.write_bytes(kept)

    tamper(folder, "UPDATE audit_record SET actor = 'nobody' WHERE seq = 2")
    code, said = verified(*where)
    assert (code, "tampered at record 2" in said) == (1, True), said
    assert verified(*where, "--json")[0] == 1
    tamper(folder, "UPDATE audit_record SET actor = 'gateway' WHERE seq = 2")
    assert verified(*where)[0] == 0
    tamper(folder, "DELETE FROM audit_record WHERE seq > 3", "DELETE FROM audit_checkpoint",
           "UPDATE audit_head SET seq = 3, hash = (SELECT hash FROM audit_record WHERE seq = 3)")  # fmt: skip
    code, said = verified(*where)
    assert (code, "truncated at record 4" in said) == (2, True), said

    code, said = verified("--data", str(tmp_path / "nowhere"))
    assert (code, "Traceback" in said) == (3, False), said
    assert verified(str(tmp_path / "nothing"))[0] == 3
    assert verified(str(copy), "--public-key", "zz")[0] == 3
    assert verified(str(copy), "--public-key", "ab" * 32)[0] == 1
    assert verified(str(copy), "--checkpoints", str(checkpoints))[0] == 0
    copy.write_bytes(copy.read_bytes()[:-20])
    assert verified(str(copy))[0] == 3


def test_the_log_is_listed_with_filters(folder: Path) -> None:
    where = ("--data", str(folder))
    found = answer("audit", "list", *where)
    assert [one["action"] for one in found][-3:] == ["token.create", "namespace.create", "tenant.create"]
    assert [one["action"] for one in answer("audit", "list", "--action", "chunk", *where)] == [
        "chunk.totals",
        "chunk.delete",
    ]
    assert answer("audit", "list", "--actor", "nobody", *where) == []
    assert len(answer("audit", "list", "--limit", "1", "--before", "3", *where)) == 1
    shown = kvgw("audit", "list", *where)
    assert (shown.returncode, "token.create" in shown.stdout) == (0, True)


def test_usage_is_printed_for_people_spreadsheets_and_programs(folder: Path) -> None:
    where = ("--data", str(folder), "--since", "3650d")
    (found,) = json.loads(kvgw("usage", "--format", "json", *where).stdout)
    assert found["namespace"] == "default"
    assert (found["meters"]["put_bytes"], found["meters"]["get_missed"]) == (3 * CHUNK, 1)
    head, line = csv.reader(io.StringIO(kvgw("usage", "--format", "csv", "--by", "hour", *where).stdout))
    assert head == ["namespace", "start_utc", *METERS]
    assert dict(zip(head, line, strict=True))["get_bytes_staging"] == str(3 * CHUNK)
    table = kvgw("usage", "--by", "month", *where)
    assert (table.returncode, "2023-11" in table.stdout) == (0, True)
    wrong = kvgw("usage", "--since", "yesterday", "--data", str(folder))
    assert (wrong.returncode, "no duration" in wrong.stderr) == (1, True)
    assert kvgw("usage", "--namespace", "nobodys", *where).returncode == 1


def test_explain_is_printed(folder: Path) -> None:
    done = kvgw("explain", "aabb", "--fingerprint", "ab" * 32, "--data", str(folder))
    assert (done.returncode, "format unknown" in done.stdout) == (0, True)
    assert kvgw("explain", "xyz", "--fingerprint", "ab" * 32, "--data", str(folder)).returncode == 1


@aio
async def test_I03_a_tenant_sees_its_own_records_and_usage_and_no_others(tmp_path: Path) -> None:
    """Law 6."""
    async with works(tmp_path) as one:
        await one.put(1)
        await one.crew.books.write_down_usage()
        admin = Admin(one.gateway)
        await admin.own("POST", "/tenants", {"name": "theirs"})
        body = {"name": "auditor", "permissions": ["audit:read", "ns:read"]}
        token = (await admin.own("POST", "/tenants/theirs/tokens", body))["token"]

        async def seen(path: str, query: dict[str, str] | None = None) -> tuple[int, str]:
            found = await admin.ask("GET", f"/v1{path}", token=token, query=query)
            return found.status_code, found.text

        code, text = await seen("/audit")
        assert code == 200
        tenant = {record["tenant"] for record in json.loads(text)}
        assert len(tenant) == 1
        assert str(one.scope.tenant) not in text
        assert json.loads((await seen("/audit/records"))[1])["whole"] is False
        assert json.loads((await seen("/audit/records"))[1])["checkpoints"] == []
        assert (await seen("/audit", {"tenant": "*"}))[0] == 403
        assert (await seen("/audit/records", {"tenant": "*"}))[0] == 403
        assert await seen("/audit", {"tenant": "default"}) == await seen("/audit", {"tenant": "nobody"})
        assert await seen("/tenants/default/usage") == await seen("/tenants/nobody/usage")
        assert (await seen("/tenants/default/usage"))[0] == 404
        assert json.loads((await seen("/tenants/-/usage"))[1]) == []
        whole = await admin.own("GET", "/audit", query={"tenant": "*"})
        assert len({record["tenant"] for record in whole}) == 2


@aio
async def test_what_a_rate_limit_refused_is_counted(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        await Admin(one.gateway).own("PATCH", "/tenants/-/namespaces/default", {"requests_per_second": 1})
        await one.wait(3)  # until the policy is in force
        outcomes = [(await one.client.match(one.registered, keys_of(1))).outcome for _ in range(4)]
        refused = outcomes.count(Outcome.OUTAGE)
        assert 0 < refused < 4
        await one.crew.books.write_down_usage()
        (found,) = await one.rooms.catalog.usage_sums(one.scope.tenant, None, 0, 2**50, "day")
        assert (found.amounts["limit_hits"], found.amounts["lookups"]) == (refused, 4 - refused)


def test_F10_a_log_line_is_one_line() -> None:
    record = logging.LogRecord("kvgw", logging.WARNING, "f", 1, "it said %s", ("a\nFAKE INFO kvgw: \x1b[2J",), None)
    told = OneLine(FORM).format(record)
    assert told.isprintable()
    assert "a\\nFAKE INFO kvgw: \\x1b[2J" in told
    try:
        raise ValueError("evil \x1b[31m")
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    record.exc_text = None
    assert "\x1b" not in OneLine(FORM).format(record)
