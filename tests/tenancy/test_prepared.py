"""Statements that go to the driver as text: right rows for lists of any length, and never without a tenant."""

from __future__ import annotations

import pytest
from sqlalchemy import LargeBinary, bindparam, column, create_engine, select, table

from tenancy.prepared import KeyStatement
from tenancy.schema import chunk, entry
from tenancy.visible import LOOKUP
from tests.tenancy.statement_lint import breaches

THINGS = table("things", column("kind"), column("name", LargeBinary))
FIND = KeyStatement(
    lambda kinds, names: select(THINGS.c.kind, THINGS.c.name, (THINGS.c.kind + 1).label("more")).where(
        THINGS.c.kind.in_(kinds), THINGS.c.name.in_(names), THINGS.c.kind > bindparam("least")
    ),
    most=65,
)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 64, 65])
def test_lists_of_any_length_find_exactly_their_members(count: int) -> None:
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE TABLE things (kind, name)")
        rows = [(kind, b"%d" % number) for kind in (1, 2, 3) for number in range(2 * count)]
        connection.exec_driver_sql("INSERT INTO things VALUES (?, ?)", rows)
        names = [b"%d" % number for number in range(0, 2 * count, 2)]
        found = [tuple(row) for row in FIND.rows(connection, {"least": 1}, [1, 2, 3], names)]
        assert sorted(found) == sorted((kind, name, kind + 1) for kind in (2, 3) for name in names)
        assert sum(1 for row in FIND.rows(connection, {"least": 0}, [3], [*names, b"none"])) == count


def test_I08_the_lookup_names_its_tenant() -> None:
    assert breaches(LOOKUP.statement(1, 4)) == []
    bare = KeyStatement(
        lambda formats, keys: (
            select(chunk.c.blob_id)
            .join(entry, entry.c.blob_id == chunk.c.blob_id)
            .where(entry.c.format_id.in_(formats), entry.c.entry_key.in_(keys))
        ),
        most=4,
    )
    assert len(breaches(bare.statement(1, 4))) == 2, "a join without a tenant is found"
