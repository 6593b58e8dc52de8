"""Statements that are compiled once and sent to the driver as text: what a gateway does for every batch.

SQLAlchemy compiles a statement once too, but to find that out it builds the statement anew and names it, then expands
each list, names and processes every bind parameter and decorates every row: a transaction of ten small statements takes
ten times as long as the database needs for it. Here the text is kept for each size of list; lists are filled up to the
next power of two by repeating their last member, so that there are few sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any, Final, TypeAlias, TypeVar

from sqlalchemy import (
    BigInteger,
    BindParameter,
    ColumnElement,
    Connection,
    CursorResult,
    Delete,
    Dialect,
    FromClause,
    Insert,
    Integer,
    LargeBinary,
    Select,
    String,
    Table,
    Update,
    bindparam,
    insert,
)

from tenancy.model import Scope

Statement: TypeAlias = "Select[Any] | Insert | Update | Delete"
Parameters: TypeAlias = Sequence[BindParameter[Any]]
Member = TypeVar("Member")

MEMBERS_MOST: Final = 30_000
"""Below the least number of bind parameters that a database allows in one statement (32,766)."""

_PLAIN: Final = (LargeBinary, String, Integer, BigInteger)
"""What drivers take as it is: bytes, text and integers."""


@dataclass(frozen=True)
class _Text:
    """A statement as one driver takes it."""

    sql: str
    order: tuple[str, ...]
    """Names of the parameters, by their place in the text."""
    constants: Mapping[str, object]
    """Values that the statement came with, as the driver takes them."""
    process: Mapping[str, Callable[[Any], Any]]
    """What turns a value into the driver's, for those parameters where something has to."""

    def given(self, values: Mapping[str, object]) -> dict[str, object]:
        """Constants and `values` as the driver takes them."""
        process = self.process
        return {
            **self.constants,
            **{name: process[name](value) if name in process else value for name, value in values.items()},
        }


class KeyStatement:
    """A statement with parameters of its own and lists of keys, none longer than `most`.

    What is in the lists is given to the driver as it is: bytes, text and integers.
    """

    def __init__(self, build: Callable[..., Statement], most: int = MEMBERS_MOST) -> None:
        """`build` makes the statement for parameters that stand for the members of each list, in their order."""
        self._build = build
        self._most = most
        self._texts: dict[tuple[str, tuple[int, ...]], _Listed] = {}

    def statement(self, *sizes: int) -> Statement:
        """The statement for lists of these lengths."""
        return self._build(*(_members(number, size) for number, size in enumerate(sizes)))

    def rows(self, connection: Connection, values: Mapping[str, object], *lists: Sequence[object]) -> Sequence[Any]:
        """Its rows, as the driver gives them. No list may be empty; `values` are the other parameters."""
        return self._sent(connection, values, lists).all()

    def count(self, connection: Connection, values: Mapping[str, object], *lists: Sequence[object]) -> int:
        """Send it and say how many rows it changed."""
        return self._sent(connection, values, lists).rowcount

    def each(self, connection: Connection, values: Mapping[str, object], rows: Sequence[Mapping[str, object]]) -> None:
        """Send it, without lists, for each of `rows`: what varies beside `values`, bytes, text or integers."""
        text = self._text(connection.dialect, ()).text
        given = text.given(values)
        connection.exec_driver_sql(
            text.sql,
            [tuple([row[name] if name in row else given[name] for name in text.order]) for row in rows],
        )

    def _sent(
        self, connection: Connection, values: Mapping[str, object], lists: Sequence[Sequence[object]]
    ) -> CursorResult[Any]:
        filled = [self._filled(keys) for keys in lists]
        listed = self._text(connection.dialect, tuple(len(keys) for keys in filled))
        return connection.exec_driver_sql(listed.text.sql, listed.row(values, filled))

    def _filled(self, keys: Sequence[object]) -> Sequence[object]:
        size = min(self._most, 1 << (len(keys) - 1).bit_length())
        return keys if size == len(keys) else [*keys, *([keys[-1]] * (size - len(keys)))]

    def _text(self, dialect: Dialect, sizes: tuple[int, ...]) -> _Listed:
        key = dialect.name, sizes
        if key not in self._texts:
            self._texts[key] = _Listed(_compiled(self.statement(*sizes), dialect), sizes)
        return self._texts[key]


@dataclass(frozen=True)
class _Listed:
    """A text with lists: their members follow the other parameters, and each finds its place in one step."""

    text: _Text
    sizes: tuple[int, ...]

    def row(self, values: Mapping[str, object], lists: Sequence[Sequence[object]]) -> tuple[object, ...]:
        """The parameters, by their place in the text."""
        names, place = self._places
        given = self.text.given(values)
        return place([*(given[name] for name in names), *chain.from_iterable(lists)])

    @cached_property
    def _places(self) -> tuple[Sequence[str], Callable[[Sequence[object]], tuple[object, ...]]]:
        members = dict.fromkeys(name for number, size in enumerate(self.sizes) for name in _names(number, size))
        names = [name for name in dict.fromkeys(self.text.order) if name not in members]
        return names, _picker([*names, *members], self.text.order)


class RowsInsert:
    """An insert of many rows that differ in some columns only: the rest is turned into the driver's values once."""

    def __init__(self, table: Table, shared: Sequence[str], varying: Sequence[str]) -> None:
        """`shared` and `varying`: names of columns. A column that is in neither gets its default.

        What varies is given to the driver as it is: bytes, text and integers.
        """
        assert all(isinstance(table.c[name].type, _PLAIN) for name in varying)
        self._table = table
        self._shared = tuple(shared)
        self._varying = tuple(varying)
        self._texts: dict[str, tuple[_Text, Callable[[Sequence[object]], tuple[object, ...]]]] = {}

    def run(self, connection: Connection, shared: Mapping[str, object], rows: Sequence[tuple[object, ...]]) -> None:
        """Insert `rows`: values of the varying columns, in their order, beside those that all of them share."""
        if not rows:
            return
        text, place = self._text(connection.dialect)
        given = text.given(shared)
        base = tuple([given[name] for name in self._shared])
        connection.exec_driver_sql(text.sql, [place(base + row) for row in rows])

    def _text(self, dialect: Dialect) -> tuple[_Text, Callable[[Sequence[object]], tuple[object, ...]]]:
        if dialect.name not in self._texts:
            columns = (*self._shared, *self._varying)
            named = {name: bindparam(name, type_=self._table.c[name].type) for name in columns}
            text = _compiled(insert(self._table).values(named), dialect)
            self._texts[dialect.name] = text, _picker(columns, text.order)
        return self._texts[dialect.name]


def bound(table: FromClause) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """`tenancy.schema.owned` for a statement that is compiled once: the scope comes as the values of `owner`."""
    return table.c.tenant_id == bindparam("tenant"), table.c.namespace_id == bindparam("namespace")


def owner(scope: Scope) -> dict[str, object]:
    """The values that `bound` asks for."""
    return {"tenant": scope.tenant, "namespace": scope.namespace}


def pieces(members: Sequence[Member]) -> Iterator[Sequence[Member]]:
    """A list of any length in lists that are short enough for one statement."""
    for start in range(0, len(members), MEMBERS_MOST):
        yield members[start : start + MEMBERS_MOST]


def _compiled(statement: Statement, dialect: Dialect) -> _Text:
    compiled = statement.compile(dialect=dialect)
    order = compiled.positiontup
    assert order is not None, f"the driver of {dialect.name} takes its parameters by name"
    assert "POSTCOMPILE" not in compiled.string, "a list of values is expanded anew at each execution: use literals"
    process = {
        name: processor
        for parameter, name in compiled.bind_names.items()
        if not isinstance(parameter.type, _PLAIN)
        and (processor := parameter.type.dialect_impl(dialect).bind_processor(dialect)) is not None
    }
    constants = {
        name: process[name](parameter.value) if name in process else parameter.value
        for parameter, name in compiled.bind_names.items()
        if not parameter.required
    }
    return _Text(compiled.string, tuple(order), constants, process)


def _picker(names: Sequence[str], order: Sequence[str]) -> Callable[[Sequence[object]], tuple[object, ...]]:
    """What brings values of these names into an order."""
    where = {name: at for at, name in enumerate(names)}
    places = [where[name] for name in order]
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[at] for at in places)


def _members(number: int, size: int) -> list[BindParameter[Any]]:
    return [bindparam(name) for name in _names(number, size)]


def _names(number: int, size: int) -> list[str]:
    return [f"key_{number}_{at}" for at in range(size)]
