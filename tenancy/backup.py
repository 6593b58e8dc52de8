"""A copy of the catalog without what it caches: tenants, namespaces, tokens, wrapped keys, formats, limits.

Chunks, entries, placements and salts are left out on purpose: a restored catalog is a cold cache, nothing that was
deleted can come back with it, and no salt outlives its chunk in a backup. Keys are not in the catalog either.

A copy is text: a first line that says what it is, then one JSON object a row, in an order in which they can be put
back. It fits SQLite and PostgreSQL alike.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct
from sqlalchemy import Connection, LargeBinary, Table, Uuid, insert, select

from tenancy.errors import RegistryRefused
from tenancy.schema import api_token, kv_format, namespace, namespace_key, quota, tenant

FORMAT: Final = "kvgw-backup"
VERSION: Final = 1

TABLES: Final[tuple[Table, ...]] = (tenant, namespace, namespace_key, api_token, kv_format, quota)
"""Parents first."""

_COUNTERS: Final = ("stored_bytes", "objects", "s3_bytes")
_BY_NAME: Final = {str(table.name): table for table in TABLES}


class Header(Struct, frozen=True, forbid_unknown_fields=True):
    """The first line."""

    format: str
    version: int
    revision: str
    created_ms: int


class Row(Struct, frozen=True, forbid_unknown_fields=True):
    """Every further line."""

    table: str
    values: dict[str, Any]


def header(revision: str, created_ms: int) -> str:
    """The first line of a copy."""
    return msgspec.json.encode(Header(FORMAT, VERSION, revision, created_ms)).decode()


def rows_of(connection: Connection, tenant_id: UUID) -> list[str]:
    """One tenant's lines, read in one transaction."""
    lines: list[str] = []
    for table in TABLES:
        for found in connection.execute(select(table).where(table.c.tenant_id == tenant_id)).mappings():
            values = {str(column.name): _plain(found[column.name]) for column in table.columns}
            if table is quota:
                values |= dict.fromkeys(_COUNTERS, 0)
            lines.append(msgspec.json.encode(Row(str(table.name), values)).decode())
    return lines


def read(lines: Iterable[str], revision: str) -> Iterator[tuple[UUID, Callable[[Connection], None]]]:
    """The rows of a copy, each with its tenant and the transaction body that puts it back.

    Raises `RegistryRefused` naming the line that cannot be read, or what the copy is not.
    """
    numbered = enumerate(lines, start=1)
    first = next(numbered, (1, ""))[1]
    try:
        head = msgspec.json.decode(first, type=Header)
    except msgspec.MsgspecError as error:
        raise RegistryRefused(f"this is no copy of a kvgw catalog: {error}") from error
    if (head.format, head.version) != (FORMAT, VERSION):
        raise RegistryRefused(f"the copy is {head.format!r} of version {head.version}; this release reads {VERSION}")
    if head.revision != revision:
        raise RegistryRefused(
            f"the copy was made at schema revision {head.revision}, this catalog has {revision}: restore it with the "
            "release that made it, then run kvgw migrate"
        )
    for number, line in numbered:
        if line.strip():
            yield _restorer(number, line)


def _restorer(number: int, line: str) -> tuple[UUID, Callable[[Connection], None]]:
    try:
        row = msgspec.json.decode(line, type=Row)
        table = _BY_NAME[row.table]
        values = {str(column.name): _typed(column.type, row.values[column.name]) for column in table.columns}
    except (msgspec.MsgspecError, KeyError, ValueError, TypeError) as error:
        raise RegistryRefused(f"line {number} of the copy cannot be read: {error}") from error
    return values["tenant_id"], lambda connection: _insert(connection, table, values)


def _insert(connection: Connection, table: Table, values: dict[str, Any]) -> None:
    connection.execute(insert(table), values)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value) if isinstance(value, UUID) else value


def _typed(kind: Any, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(kind, Uuid):
        return UUID(value)
    return base64.b64decode(value, validate=True) if isinstance(kind, LargeBinary) else value
