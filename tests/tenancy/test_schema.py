"""The schema: keys that cannot tell of other tenants, statements that name their tenant, look-ups that use an index."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, event, exists, inspect, select, text

from tenancy import eviction, migrate, placements, putting, quota, registry, repair, sweep, tokens, usage, visible
from tenancy.engine import sqlite_engine
from tenancy.model import Scope
from tenancy.schema import api_token, chunk, entry, metadata, owned, placement, tenant
from tests.tenancy.catalog_bench import HERE, NOW, name
from tests.tenancy.statement_lint import TENANT_TABLES, breaches, known_breaches

SCOPE = Scope(UUID(int=1), UUID(int=2))


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[Connection]:
    engine = sqlite_engine(tmp_path / "catalog.db")
    with engine.begin() as connection:
        migrate.upgrade(connection)
        yield connection
        connection.rollback()
    engine.dispose()


# I10


def test_I10_every_key_of_a_tenants_table_leads_with_the_tenant(connection: Connection) -> None:
    catalog = inspect(connection)
    tables = set(catalog.get_table_names()) - {"alembic_version"}
    assert {
        table for table in tables if "tenant_id" not in {column["name"] for column in catalog.get_columns(table)}
    } == {
        "audit_checkpoint",
        "audit_head",
        "clock_mark",
        "gateway_process",
        "maintenance_lease",
    }
    wrong = []
    for table in sorted(tables & TENANT_TABLES):
        keys = {"primary key": catalog.get_pk_constraint(table)["constrained_columns"]}
        keys |= {str(one["name"]): one["column_names"] for one in catalog.get_unique_constraints(table)}
        keys |= {str(one["name"]): one["column_names"] for one in catalog.get_indexes(table) if one["unique"]}
        for foreign in catalog.get_foreign_keys(table):
            keys[str(foreign["name"])] = foreign["constrained_columns"]
            keys[f"{foreign['name']} (referred)"] = foreign["referred_columns"]
        wrong += [f"{table}: {called} {columns}" for called, columns in keys.items() if columns[0] != "tenant_id"]
    # Names of tenants are the operator's, not a tenant's: only the operator makes and sees them.
    # The audit log is one chain through all tenants, whose numbers are no tenant's to choose or to see.
    assert wrong == ["audit_record: primary key ['seq']", "tenant: uq_tenant_name ['name']"]


# I08: the check itself; that it holds is checked while the catalog's suites run (`linted_statements`)


@pytest.mark.parametrize(
    "statement",
    [
        select(entry.c.entry_key),
        select(entry.c.entry_key).where(entry.c.namespace_id == SCOPE.namespace),
        entry.update().where(entry.c.hits == 1).values(hits=2),
        placement.delete(),
        select(chunk.c.blob_id).where(
            *owned(chunk, SCOPE), exists(select(1).where(entry.c.blob_id == chunk.c.blob_id))
        ),
        select(chunk.c.blob_id).select_from(
            chunk.join(placement, placement.c.blob_id == chunk.c.blob_id)
        ).where(*owned(chunk, SCOPE)),
        select(api_token.c.digest),
        text("DELETE FROM entry WHERE hits = 0"),
    ],
)  # fmt: skip
def test_I08_the_check_sees(statement: Any) -> None:
    assert len(breaches(statement)) == 1
    assert known_breaches(statement) == known_breaches(statement) == breaches(statement)


@pytest.mark.parametrize(
    "statement",
    [
        select(entry.c.entry_key).where(*owned(entry, SCOPE)),
        select(chunk.c.blob_id).where(
            *owned(chunk, SCOPE),
            exists(select(1).where(entry.c.tenant_id == chunk.c.tenant_id, entry.c.blob_id == chunk.c.blob_id)),
        ),
        select(api_token.c.digest).where(api_token.c.token_id == "x"),
        select(tenant.c.name),
        entry.insert(),
        text("SELECT 1"),
    ],
)
def test_I08_the_check_passes(statement: Any) -> None:
    assert breaches(statement) == known_breaches(statement) == []


def test_I08_a_verdict_is_kept_for_other_values_and_not_for_another_statement() -> None:
    for number in range(3):
        assert known_breaches(entry.update().where(*owned(entry, SCOPE)).values(hits=number)) == []
        assert len(known_breaches(entry.update().where(entry.c.hits == number).values(hits=number))) == 1


# Indexes


BATCH = {"entry_keys": [name("a"), name("b")], "blob_ids": [b"1" * 16, b"2" * 16]}

USES = {
    "lookup": lambda c: visible.lookup(c, SCOPE, [1, 2], BATCH["entry_keys"], HERE, NOW),
    "reachable": lambda c: visible.reachable_content(c, SCOPE, 1, 1, BATCH["entry_keys"], HERE),
    "extend": lambda c: usage.extend(c, SCOPE, 1, BATCH["entry_keys"], None, NOW),
    "hits": lambda c: usage.record_hits(c, SCOPE, [(1, name("a"), 1, NOW)]),
    "delete": lambda c: sweep.delete_keys(c, SCOPE, 1, BATCH["entry_keys"], NOW),
    "expire": lambda c: sweep.expire(c, SCOPE, NOW, 10),
    "doomed": lambda c: sweep.doomed(c, SCOPE, HERE, "s3", NOW, 10),
    "purge": lambda c: sweep.purge(c, SCOPE, HERE, [sweep.DoomedPlacement(b"1" * 16, "nvme", "o")], 10),
    "tombstones": lambda c: sweep.forget_tombstones(c, SCOPE, NOW),
    "claim": lambda c: placements.claim_due(c, SCOPE, HERE, "s3", NOW + 1, NOW, 10),
    "outbox": lambda c: placements.outbox_length(c, SCOPE),
    "outstanding": lambda c: placements.outstanding(c, SCOPE, BATCH["blob_ids"]),
    "known": lambda c: placements.known_objects(c, SCOPE, "nvme", "n", BATCH["blob_ids"]),
    "promote": lambda c: repair.promote(c, SCOPE, HERE, BATCH["blob_ids"], NOW),
    "quarantine": lambda c: repair.quarantine(c, SCOPE, b"1" * 16, "nvme", "n", NOW),
    "abandon": lambda c: repair.abandon_unreadable(c, SCOPE, BATCH["blob_ids"], NOW),
    "evict": lambda c: eviction.evict_nvme(c, SCOPE, HERE, BATCH["blob_ids"], NOW),
    "leaving": lambda c: eviction.leaving_nvme(c, SCOPE, HERE),
    "reclaim": lambda c: putting.reclaim_expired(c, SCOPE, NOW),
    "quota": lambda c: quota.lock(c, SCOPE),
    "token": lambda c: tokens.find_token(c, "x" * 16),
    "namespace": lambda c: registry.find_namespace(c, SCOPE.tenant, "n"),
}
"""Everything that a gateway does often, each with what it may touch: rows of its batch, or rows that need work."""

BY_BATCH = {
    "entry": {"entry_key=?", "blob_id=?", "expires_ms<?"},
    "chunk": {"blob_id=?", "chunk_id=?"},
    "placement": {"blob_id=?", "state=?"},
    "tombstone": {"entry_key=?", "at_ms<?"},
}
"""Columns one of which narrows a search in a table that grows with what is stored."""


@pytest.mark.parametrize("use", sorted(USES))
def test_no_statement_goes_through_all_rows_of_a_namespace(connection: Connection, use: str) -> None:
    registry.create_tenant(connection, SCOPE.tenant, "t", NOW)
    keys = [registry.KeyRow("data", 1, b"k")]
    registry.create_namespace(connection, SCOPE, "n", registry.Policy(), keys, NOW)
    plans: list[str] = []

    def explain(here: Connection, _cursor: Any, statement: str, parameters: Any, _context: Any, many: bool) -> None:
        if statement.split(None, 1)[0] in ("SELECT", "UPDATE", "DELETE"):
            first = parameters[0] if many else parameters
            driver = here.connection.dbapi_connection
            assert driver is not None
            rows = driver.cursor().execute(f"EXPLAIN QUERY PLAN {statement}", first).fetchall()
            plans.extend(f"{row[3]}   [{statement[:60]}]" for row in rows)

    event.listen(Engine, "before_cursor_execute", explain)
    try:
        USES[use](connection)
    finally:
        event.remove(Engine, "before_cursor_execute", explain)
    assert plans
    assert [plan for plan in plans if wasteful(plan)] == []


def wasteful(step: str) -> bool:
    """Whether a step of a query plan looks at more rows than it needs."""
    if re.match(r"SCAN \d+ CONSTANT ROW|SCAN CONSTANT ROW", step):
        return False
    if step.startswith("SCAN"):
        return True
    found = re.match(r"SEARCH (\w+) USING (?:COVERING )?INDEX (\w+) \((.*)\)", step)
    if found is None or found[1] not in BY_BATCH:
        return False
    if found[2] == "ix_chunk_deleting":
        return False  # holds dying chunks only
    if found[2] == "ix_placement_work":
        return False  # holds placements that need work only
    return not any(column in found[3] for column in BY_BATCH[found[1]])


@pytest.mark.parametrize(
    "step",
    [
        "SCAN entry",
        "SEARCH entry USING INDEX ix_entry_expiry (tenant_id=? AND namespace_id=? AND expires_ms>?)",
        "SEARCH placement USING INDEX sqlite_autoindex_placement_1 (tenant_id=? AND namespace_id=?)",
    ],
)
def test_a_wasteful_plan_is_seen(step: str) -> None:
    assert wasteful(step)


def test_every_table_is_in_the_metadata(connection: Connection) -> None:
    assert set(inspect(connection).get_table_names()) == set(metadata.tables) | {"alembic_version"}
