"""Statements that go to the driver as text: right rows for lists of any length, and never without a tenant."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest
from sqlalchemy import Dialect, LargeBinary, bindparam, column, create_engine, select, table
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.postgresql import asyncpg

import tenancy
from tenancy.prepared import KeyStatement, Statement, _compiled
from tenancy.schema import chunk, entry
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
    engine.dispose()


def prepared_statements() -> dict[str, Statement]:
    """Every statement of the catalog that is sent as text, with lists of two."""
    found = {}
    for module in pkgutil.walk_packages(tenancy.__path__, "tenancy."):
        for called, one in vars(importlib.import_module(module.name)).items():
            if isinstance(one, KeyStatement):
                lists = len(inspect.signature(one._build).parameters)
                found[f"{module.name}.{called}"] = one.statement(*([2] * lists))
    return found


def test_I08_every_prepared_statement_names_its_tenant() -> None:
    """They do not pass where the suites look at statements: a driver's text tells nothing of its tables."""
    statements = prepared_statements()
    assert len(statements) > 15
    assert {called: wrong for called, one in statements.items() if (wrong := breaches(one))} == {}


@pytest.mark.parametrize("dialect", [sqlite.dialect(), asyncpg.dialect()], ids=["sqlite", "postgresql"])
def test_every_prepared_statement_is_complete_as_text(dialect: Dialect) -> None:
    """Nothing is left for SQLAlchemy to expand, and no state of a row is a parameter (see `tenancy.visible`)."""
    for called, one in prepared_statements().items():
        text = _compiled(one, dialect)
        assert not {"due", "writing", "ok", "live", "deleting", "active"} & set(text.constants.values()), called


def test_I08_a_prepared_statement_without_its_tenant_is_seen() -> None:
    bare = KeyStatement(
        lambda formats, keys: (
            select(chunk.c.blob_id)
            .join(entry, entry.c.blob_id == chunk.c.blob_id)
            .where(entry.c.format_id.in_(formats), entry.c.entry_key.in_(keys))
        ),
        most=4,
    )
    assert len(breaches(bare.statement(1, 4))) == 2, "a join without a tenant is found"
