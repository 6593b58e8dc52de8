"""The quota's arithmetic and its guard, number by number (law 4, L08)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import Connection, event, update

from tenancy import quota, registry, removal
from tenancy.engine import sqlite_engine
from tenancy.errors import NamespaceUnknown
from tenancy.model import Scope, Usage
from tenancy.policy import Policy
from tenancy.quota import Change, apply, grant, lock
from tenancy.registry import KeyRow
from tenancy.schema import TENANT_SCOPE, metadata
from tenancy.schema import quota as quota_table
from tests.tenancy.catalog_bench import NOW

TENANT = UUID(int=0xA)
SCOPE, OTHER = Scope(TENANT, UUID(int=1)), Scope(TENANT, UUID(int=2))
AMPLE = 10**12
LIMITS = {"limit_bytes": 1000, "limit_objects": 10, "limit_s3_bytes": 500}


@pytest.fixture
def connection() -> Iterator[Connection]:
    """A tenant without limits that matter, and a namespace with `LIMITS`."""
    engine = sqlite_engine(Path(":memory:"))
    with engine.begin() as made:
        metadata.create_all(made)
        registry.create_tenant(made, TENANT, "t", NOW)
        for number, (scope, policy) in enumerate(((SCOPE, Policy(**LIMITS)), (OTHER, Policy()))):
            registry.create_namespace(made, scope, f"n{number}", policy, [KeyRow("data", 1, b"k")], NOW)
        yield made
    engine.dispose()


def usage(objects: int = 0, stored: int = 0, s3: int = 0, **limits: int) -> Usage:
    chosen = {"limit_bytes": AMPLE, "limit_objects": AMPLE, "limit_s3_bytes": AMPLE} | limits
    return Usage(chosen["limit_bytes"], chosen["limit_objects"], chosen["limit_s3_bytes"], stored, objects, s3)


EACH = Change(stored_bytes=100, objects=1, s3_bytes=100)
ONLY_LOCAL = Change(stored_bytes=100, objects=1)


@pytest.mark.parametrize(
    ("tight", "each", "granted"),
    [
        (usage(), EACH, 5),
        (usage(objects=7, limit_objects=10), EACH, 3),
        (usage(objects=10, limit_objects=10), EACH, 0),
        (usage(objects=12, limit_objects=10), EACH, 0),
        (usage(stored=700, limit_bytes=1000), EACH, 3),
        (usage(stored=701, limit_bytes=1000), EACH, 2),
        (usage(stored=1000, limit_bytes=1000), EACH, 0),
        (usage(stored=1300, limit_bytes=1000), EACH, 0),
        (usage(s3=100, limit_s3_bytes=500), EACH, 4),
        (usage(s3=101, limit_s3_bytes=500), EACH, 3),
        (usage(s3=500, limit_s3_bytes=500), EACH, 0),
        (usage(s3=500, limit_s3_bytes=500), ONLY_LOCAL, 5),
        (usage(objects=8, limit_objects=10, stored=900, limit_bytes=1000), EACH, 1),
    ],
)
def test_the_tightest_of_six_limits_is_granted(tight: Usage, each: Change, granted: int) -> None:
    assert grant((usage(), tight), 5, each) == granted
    assert grant((tight, usage()), 5, each) == granted, "the tenant's limits count as the namespace's do"
    assert grant((tight, tight), 5, each) == granted


@pytest.mark.parametrize("field", ["stored_bytes", "objects", "s3_bytes"])
@pytest.mark.parametrize("whose", [TENANT_SCOPE, SCOPE.namespace], ids=["tenant", "namespace"])
def test_the_guard_holds_even_if_a_callers_arithmetic_is_wrong(connection: Connection, field: str, whose: UUID) -> None:
    limit = f"limit_{field.replace('stored_bytes', 'bytes')}"
    ample = dict.fromkeys(("limit_bytes", "limit_objects", "limit_s3_bytes"), AMPLE)
    connection.execute(update(quota_table).values(**ample))
    connection.execute(update(quota_table).where(quota_table.c.scope_id == whose).values(**{limit: 10}))
    apply(connection, SCOPE, Change(**{field: 7}))
    apply(connection, SCOPE, Change(**{field: 3}))
    full = lock(connection, SCOPE)
    assert [getattr(one, field) for one in full] == [10, 10], "to the limit"
    for more in (1, 11):
        with pytest.raises(AssertionError, match="quota guard refused"), connection.begin_nested():
            apply(connection, SCOPE, Change(**{field: more}))
    connection.execute(update(quota_table).where(quota_table.c.scope_id == whose).values(**{limit: 5}))
    apply(connection, SCOPE, Change(**{field: -1}))
    assert [getattr(one, field) for one in lock(connection, SCOPE)] == [9, 9], "what is over a limit can go down"
    others = {"stored_bytes": 1, "objects": 1, "s3_bytes": 1} | {field: 0}
    apply(connection, SCOPE, Change(**others))
    assert [getattr(one, field) for one in lock(connection, SCOPE)] == [9, 9]


def test_a_change_counts_for_its_namespace_and_its_tenant_and_for_nobody_else(connection: Connection) -> None:
    apply(connection, SCOPE, Change(stored_bytes=3, objects=2, s3_bytes=1))
    tenant, mine = lock(connection, SCOPE)
    again, other = lock(connection, OTHER)
    assert (tenant.stored_bytes, tenant.objects, tenant.s3_bytes) == (3, 2, 1)
    assert (mine.stored_bytes, mine.objects, mine.s3_bytes) == (3, 2, 1)
    assert again == tenant
    assert (other.stored_bytes, other.objects, other.s3_bytes) == (0, 0, 0)
    assert (mine.limit_bytes, mine.limit_objects, mine.limit_s3_bytes) == tuple(LIMITS.values())


def test_a_namespace_that_is_gone_has_no_quota_to_lock(connection: Connection) -> None:
    for gone in (Scope(TENANT, UUID(int=9)), Scope(UUID(int=9), SCOPE.namespace)):
        with pytest.raises(NamespaceUnknown, match="does not exist"):
            lock(connection, gone)


def test_nothing_to_change_or_to_remove_asks_the_database_nothing(connection: Connection) -> None:
    asked: list[str] = []
    event.listen(connection, "before_cursor_execute", lambda *told: asked.append(told[2]))
    quota.apply(connection, SCOPE, Change())
    assert removal.doom_unused(connection, SCOPE, []) == []
    removal.doom_placements(connection, SCOPE, [])
    assert asked == []
    quota.apply(connection, SCOPE, Change(objects=1))
    assert len(asked) == 1
