"""The namespace's quota row is its mutex: whoever changes its rows has locked it before anything else is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, event

from tenancy import eviction, formats, placements, putting, registry, repair, sweep
from tenancy.births import Batch, NewChunk
from tenancy.engine import sqlite_engine
from tenancy.errors import NamespaceUnknown
from tenancy.model import Scope
from tenancy.placements import DueWrite, Endings
from tenancy.policy import Policy
from tenancy.registry import KeyRow
from tenancy.schema import metadata
from tests.tenancy.catalog_bench import BOTH, HERE, NOW, PLAIN, SEALED, description, name

SCOPE = Scope(UUID(int=0xA), UUID(int=1))
BLOB, LATE = b"b" * 16, b"l" * 16
WRITE = DueWrite(SCOPE, BLOB, BLOB.hex(), "s3", "", SEALED, 0, frozenset(), NOW)
TIERS = tuple((tier, HERE.node if tier == "nvme" else "") for tier in BOTH)


def batch(key: str, scope: Scope = SCOPE) -> Batch:
    return Batch(scope, 1, (name(key),), (None,), 0, 16, SEALED, 1000, "nvme", (), "w", TIERS)


def chunk(blob: bytes, content: str) -> NewChunk:
    return NewChunk(0, blob, name(content), name("s"), name("r"), 1, 16, PLAIN, NOW, frozenset({"nvme"}), blob.hex())


@pytest.fixture
def connection() -> Iterator[Connection]:
    """One chunk that is stored, and a reservation of another."""
    engine = sqlite_engine(Path(":memory:"))
    with engine.begin() as made:
        metadata.create_all(made)
        registry.create_tenant(made, SCOPE.tenant, "t", NOW)
        registry.create_namespace(made, SCOPE, "n", Policy(), [KeyRow("data", 1, b"k")], NOW)
        formats.register(made, SCOPE, description(), NOW)
        putting.reserve(made, batch("a"), HERE, b"1" * 16, NOW + 9, NOW)
        putting.commit(made, batch("a"), HERE, b"1" * 16, [chunk(BLOB, "x")], NOW)
        putting.reserve(made, batch("b"), HERE, b"2" * 16, NOW + 9, NOW)
        yield made
    engine.dispose()


VERBS: dict[str, Callable[[Connection], Any]] = {
    "reserve": lambda c: putting.reserve(c, batch("c"), HERE, b"3" * 16, NOW + 9, NOW),
    "commit": lambda c: putting.commit(c, batch("b"), HERE, b"2" * 16, [chunk(LATE, "y")], NOW),
    "abort": lambda c: putting.abort(c, SCOPE, b"2" * 16),
    "reclaim": lambda c: putting.reclaim_expired(c, SCOPE, NOW + 10),
    "delete": lambda c: sweep.delete_keys(c, SCOPE, 1, [name("a")], NOW),
    "expire": lambda c: sweep.expire(c, SCOPE, NOW + 2000, 10),
    "purge": lambda c: sweep.purge(c, SCOPE, HERE, [sweep.DoomedPlacement(BLOB, "nvme", "o")], 10),
    "evict": lambda c: eviction.evict_nvme(c, SCOPE, HERE, [BLOB], NOW),
    "settle": lambda c: placements.settle_writes(c, SCOPE, HERE, Endings(done=[WRITE]), None, NOW),
    "quarantine": lambda c: repair.quarantine(c, SCOPE, BLOB, "nvme", HERE.node, NOW),
}


@pytest.mark.parametrize("verb", VERBS)
def test_the_first_thing_that_a_change_asks_is_the_quota_row(connection: Connection, verb: str) -> None:
    """Law 4. SQLite has one writer anyway; on PostgreSQL two of them would see each other's rows half changed."""
    asked: list[str] = []
    event.listen(Engine, "before_cursor_execute", note := lambda *told: asked.append(" ".join(told[2].split())))
    try:
        VERBS[verb](connection)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert " FROM quota" in asked[0], asked
    assert any(one.startswith(("INSERT", "UPDATE", "DELETE")) for one in asked), "and it had something to change"


def test_nothing_changes_in_a_namespace_that_is_gone(connection: Connection) -> None:
    gone = Scope(SCOPE.tenant, UUID(int=9))
    for change in (
        lambda: putting.reserve(connection, batch("a", gone), HERE, b"9" * 16, NOW + 9, NOW),
        lambda: putting.commit(connection, batch("a", gone), HERE, b"9" * 16, [], NOW),
        lambda: putting.abort(connection, gone, b"9" * 16),
        lambda: putting.reclaim_expired(connection, gone, NOW),
        lambda: sweep.expire(connection, gone, NOW, 1),
        lambda: sweep.delete_keys(connection, gone, 1, [name("a")], NOW),
        lambda: sweep.purge(connection, gone, HERE, [], 1),
        lambda: placements.settle_writes(connection, gone, HERE, Endings(), None, NOW),
    ):
        with pytest.raises(NamespaceUnknown):
            change()
