"""Statements over lists of keys and of rows, compiled once and sent to the driver as text.

SQLAlchemy compiles a statement once too, but then expands each list, names and processes every bind parameter and
decorates every row: for 64 keys that takes longer than the database needs to find them. Here the text is kept for each
size of list; lists are filled up to the next power of two by repeating their last key, so that there are few sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BindParameter,
    Connection,
    Dialect,
    Insert,
    Integer,
    LargeBinary,
    Select,
    String,
    Table,
    bindparam,
    insert,
)


@dataclass(frozen=True, slots=True)
class _Text:
    """A statement as one driver takes it."""

    sql: str
    order: tuple[str, ...]
    """Names of the parameters, by their place in the text."""
    constants: Mapping[str, object]
    process: Mapping[str, Callable[[Any], Any]]
    """What turns a value into the driver's, for those parameters where something has to."""


class KeyStatement:
    """A select with parameters of its own and two lists of keys, neither longer than `most`."""

    def __init__(
        self, build: Callable[[Sequence[BindParameter[Any]], Sequence[BindParameter[Any]]], Select[Any]], most: int
    ) -> None:
        """`build` makes the statement for parameters that stand for the members of the two lists."""
        self._build = build
        self._most = most
        self._texts: dict[tuple[str, int, int], _Text] = {}

    def statement(self, first: int, second: int) -> Select[Any]:
        """The statement for lists of these lengths."""
        return self._build(_members("first", first), _members("second", second))

    def rows(
        self, connection: Connection, values: Mapping[str, object], first: Sequence[object], second: Sequence[object]
    ) -> Sequence[Any]:
        """Its rows, as the driver gives them. Neither list may be empty; `values` are the other parameters."""
        first, second = self._filled(first), self._filled(second)
        text = self._text(connection.dialect, len(first), len(second))
        given = {**text.constants, **values, **_named("first", first), **_named("second", second)}
        process = text.process
        row = tuple([process[name](given[name]) if name in process else given[name] for name in text.order])
        return connection.exec_driver_sql(text.sql, row).all()

    def _filled(self, keys: Sequence[object]) -> Sequence[object]:
        size = min(self._most, 1 << (len(keys) - 1).bit_length())
        return [*keys, *([keys[-1]] * (size - len(keys)))]

    def _text(self, dialect: Dialect, first: int, second: int) -> _Text:
        key = dialect.name, first, second
        if key not in self._texts:
            self._texts[key] = _compiled(self.statement(first, second), dialect)
        return self._texts[key]


class RowsInsert:
    """An insert of many rows that differ in some columns only: the rest is turned into the driver's values once."""

    def __init__(self, table: Table, shared: Sequence[str], varying: Sequence[str]) -> None:
        """`shared` and `varying`: names of columns. A column that is in neither gets its default.

        What varies is given to the driver as it is: bytes, text and integers.
        """
        assert all(isinstance(table.c[name].type, LargeBinary | String | Integer) for name in varying)
        self._table = table
        self._shared = tuple(shared)
        self._varying = tuple(varying)
        self._texts: dict[str, _Text] = {}

    def run(self, connection: Connection, shared: Mapping[str, object], rows: Sequence[Sequence[object]]) -> None:
        """Insert `rows`: values of the varying columns, in their order, beside those that all of them share."""
        if not rows:
            return
        text = self._text(connection.dialect)
        process = text.process
        base = [
            process[name](shared[name]) if name in process and name in shared else shared.get(name)
            for name in text.order
        ]
        places = [text.order.index(name) for name in self._varying]
        made = []
        for row in rows:
            values = base.copy()
            for place, value in zip(places, row, strict=True):
                values[place] = value
            made.append(tuple(values))
        connection.exec_driver_sql(text.sql, made)

    def _text(self, dialect: Dialect) -> _Text:
        if dialect.name not in self._texts:
            named = {name: bindparam(name, type_=self._table.c[name].type) for name in (*self._shared, *self._varying)}
            self._texts[dialect.name] = _compiled(insert(self._table).values(named), dialect)
        return self._texts[dialect.name]


def _compiled(statement: Select[Any] | Insert, dialect: Dialect) -> _Text:
    compiled = statement.compile(dialect=dialect)
    order = compiled.positiontup
    assert order is not None, f"the driver of {dialect.name} takes its parameters by name"
    constants = {name: value for name, value in compiled.params.items() if value is not None}
    process = {
        name: processor
        for parameter, name in compiled.bind_names.items()
        if (processor := parameter.type.dialect_impl(dialect).bind_processor(dialect)) is not None
    }
    return _Text(compiled.string, tuple(order), constants, process)


def _members(name: str, size: int) -> list[BindParameter[Any]]:
    return [bindparam(f"{name}_{at}") for at in range(size)]


def _named(name: str, values: Sequence[object]) -> dict[str, object]:
    return {f"{name}_{at}": value for at, value in enumerate(values)}
