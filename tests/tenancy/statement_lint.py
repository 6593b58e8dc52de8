"""I08: finds statements that touch a tenant's table without saying which tenant's rows they mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Delete, Engine, Insert, Join, Select, Table, Update, event
from sqlalchemy.sql import operators, visitors
from sqlalchemy.sql.elements import BinaryExpression, ColumnClause
from sqlalchemy.sql.selectable import Alias, FromClause, TextClause

from tenancy.schema import metadata

TENANT_TABLES = frozenset(table.name for table in metadata.tables.values() if "tenant_id" in table.c)

ALLOWED = (
    # Before a token is found no tenant is known; its id is unique and says nothing.
    ("api_token", "token_id"),
    # Maintenance goes through every tenant, and a tenant is found by its name when the gateway starts.
    ("tenant", None),
    # The audit log is verified as a whole, by a sight of its own: its chain runs through the records of all tenants.
    ("audit_record", None),
    # A gateway drops its own word, or that of one that is gone, in all tenants at once.
    ("version_seen", None),
)
"""Tables that may be read without a tenant: by this column, or (None) at all."""


def breaches(statement: Any) -> list[str]:
    """What is wrong with a statement; nothing for one that a tenant's predicate is part of."""
    if isinstance(statement, TextClause | str):
        text = str(statement).lower()
        return [f"raw SQL on {table}" for table in TENANT_TABLES if f" {table} " in f" {text} "]
    if isinstance(statement, Insert):
        return []  # a row says itself whose it is: tenant_id is NOT NULL and without a default
    return list(_unguarded(statement, frozenset()))


def _unguarded(statement: Any, satisfied: frozenset[FromClause]) -> Iterator[str]:
    """Tables of `statement` whose rows no predicate ties to a tenant. `satisfied` are those of the outer statements."""
    if isinstance(statement, Select):
        tables = [part for source in statement.get_final_froms() for part in _flat(source)]
    elif isinstance(statement, Update | Delete):
        tables = [statement.table]
    else:
        return
    guarded = set(satisfied)
    columns: set[tuple[Any, str]] = set()
    inner: list[Select[Any]] = []
    for element in _own_elements(statement, inner):
        if isinstance(element, BinaryExpression) and element.operator is operators.eq:
            for side in (element.left, element.right):
                if isinstance(side, ColumnClause) and side.table is not None:
                    columns.add((side.table, side.name))
                    if side.name == "tenant_id":
                        guarded.add(side.table)
    for table in tables:
        called = table.element.name if isinstance(table, Alias) else getattr(table, "name", "")
        if called not in TENANT_TABLES or table in guarded:
            continue
        if any(called == name and (column is None or (table, column) in columns) for name, column in ALLOWED):
            continue
        yield f"{type(statement).__name__.lower()} on {called} without its tenant: {statement}"
    for select in inner:
        yield from _unguarded(select, frozenset(guarded))


def _own_elements(statement: Any, inner: list[Select[Any]]) -> Iterator[Any]:
    """All elements of a statement but those of the selects inside it, which are put into `inner`."""
    stack = list(statement.get_children())
    while stack:
        element = stack.pop()
        if isinstance(element, Select):
            inner.append(element)
            continue
        yield element
        stack.extend(element.get_children())


def _flat(source: Any) -> Iterator[Any]:
    if isinstance(source, Join):
        yield from _flat(source.left)
        yield from _flat(source.right)
    elif isinstance(source, Table | Alias):
        yield source
    else:
        yield from (element for element in visitors.iterate(source) if isinstance(element, Table))


_VERDICTS: dict[Any, list[str]] = {}


def known_breaches(statement: Any) -> list[str]:
    """`breaches`, which are looked for once for all statements that differ in their values only.

    The suites send a few hundred statements tens of thousands of times. What SQLAlchemy itself takes for the same
    statement, it compiles once; so are they judged here. A statement without such a key is looked at each time.
    """
    key = statement._generate_cache_key() if isinstance(statement, Select | Update | Delete) else None
    if key is None:
        return breaches(statement)
    if key.key not in _VERDICTS:
        _VERDICTS[key.key] = breaches(statement)
    return _VERDICTS[key.key]


@contextmanager
def linted_statements() -> Iterator[None]:
    """Fails if any engine of this process is meanwhile given a statement that names no tenant."""
    found: list[str] = []

    def look(_connection: Any, statement: Any, *_: Any) -> None:
        found.extend(known_breaches(statement))

    event.listen(Engine, "before_execute", look)
    try:
        yield
    finally:
        event.remove(Engine, "before_execute", look)
    assert found == []
