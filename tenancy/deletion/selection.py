"""What a deletion is about: selectors, kept as JSON in the job and in its receipt, and the entries that they find.

A selector holds no engine key and no label: those are kept as their keyed names, which say nothing without the
namespace's id key. Entries are found in the order of their primary key, so that a job goes through a namespace once,
in bounded transactions, and meets every entry that was there when it began.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, func, select, tuple_

from tenancy.errors import DeletionUnsupported
from tenancy.model import Scope
from tenancy.removal import EntryName
from tenancy.schema import entry, entry_label, kv_format, owned

FormatField: TypeAlias = Literal["model", "weights", "tokenizer", "adapter", "adapter_digest"]
Moment: TypeAlias = Literal["created", "last_hit"]

WALK_MAX: Final = 200_000
"""Most entries of a KV format among which those that follow a key are sought."""


class Keys(msgspec.Struct, frozen=True, tag="keys"):
    """These entries of one KV format."""

    format_id: int
    fingerprint: str
    entry_keys: list[str]


class Prefix(msgspec.Struct, frozen=True, tag="prefix"):
    """An entry, and every one that follows it in its chain or branches off there."""

    format_id: int
    fingerprint: str
    entry_key: str


class Label(msgspec.Struct, frozen=True, tag="label"):
    """Every entry that carries a label."""

    label_mac: str


class Format(msgspec.Struct, frozen=True, tag="format"):
    """Every entry of the KV formats of which a field has this value."""

    field: FormatField
    value: str


class Age(msgspec.Struct, frozen=True, tag="age"):
    """Every entry that was made, or read last, before a moment."""

    moment: Moment
    before_ms: int


class Namespace(msgspec.Struct, frozen=True, tag="namespace"):
    """All of a namespace, with its keys and its name."""

    name: str


class Tenant(msgspec.Struct, frozen=True, tag="tenant"):
    """All of a tenant: a deletion of each of its namespaces, then the tenant itself."""

    name: str


Selector: TypeAlias = Keys | Prefix | Label | Format | Age | Namespace | Tenant

_Link: TypeAlias = tuple[bytes, bytes | None, int]
"""An entry's key, its parent, and its depth."""

_DECODER: Final = msgspec.json.Decoder(Selector)


def encode(selector: Selector) -> str:
    """As the job keeps it: JSON, keys sorted."""
    return msgspec.json.encode(selector, order="sorted").decode()


def decode(text: str) -> Selector:
    return _DECODER.decode(text)


def kind_of(selector: Selector) -> str:
    """The selector's kind, as in the table of jobs."""
    return str(type(selector).__struct_config__.tag)


def find(
    connection: Connection, scope: Scope, selector: Selector, after: EntryName | None, limit: int
) -> list[EntryName]:
    """Up to `limit` entries that `selector` means, those after `after`, in the order of format and key."""
    rows = connection.execute(_ordered(_selected(scope, selector), selector, after).limit(limit))
    return [(row.format_id, row.entry_key) for row in rows]


def _selected(scope: Scope, selector: Selector) -> Select[tuple[int, bytes]]:
    if isinstance(selector, Label):
        return select(entry_label.c.format_id, entry_label.c.entry_key).where(
            *owned(entry_label, scope), entry_label.c.label_mac == bytes.fromhex(selector.label_mac)
        )
    return select(entry.c.format_id, entry.c.entry_key).where(*owned(entry, scope), *_condition(scope, selector))


def _condition(scope: Scope, selector: Selector) -> Sequence[ColumnElement[bool]]:
    match selector:
        case Keys():
            keys = [bytes.fromhex(key) for key in selector.entry_keys]
            return (entry.c.format_id == selector.format_id, entry.c.entry_key.in_(keys))
        case Format():
            formats = select(kv_format.c.format_id).where(
                *owned(kv_format, scope), kv_format.c[selector.field] == selector.value
            )
            return (entry.c.format_id.in_(formats),)
        case Age():
            moment = entry.c.created_ms if selector.moment == "created" else entry.c.last_hit_ms
            return (moment < selector.before_ms,)
        case Namespace():
            return ()
        case Label() | Prefix() | Tenant():
            raise AssertionError(f"a {kind_of(selector)} is not found by a condition on entries")


def _ordered(
    query: Select[tuple[int, bytes]], selector: Selector, after: EntryName | None
) -> Select[tuple[int, bytes]]:
    columns = entry_label.c if isinstance(selector, Label) else entry.c
    if after is not None:
        query = query.where(tuple_(columns.format_id, columns.entry_key) > tuple_(*after))
    return query.order_by(columns.format_id, columns.entry_key)


def follow(connection: Connection, scope: Scope, selector: Prefix) -> list[EntryName]:
    """The prefix's entry and all that follow it, the last first: what is left of a chain always leads back to it.

    Raises `DeletionUnsupported` when entries are there that may follow it, but whose chain is not known: an engine
    told no parent for them, or their predecessor is gone already.
    """
    start = bytes.fromhex(selector.entry_key)
    first = connection.execute(
        select(entry.c.depth).where(
            *owned(entry, scope), entry.c.format_id == selector.format_id, entry.c.entry_key == start
        )
    ).first()
    in_format = (*owned(entry, scope), entry.c.format_id == selector.format_id)
    _check_walk(connection, in_format)
    found_rows = connection.execute(select(entry.c.entry_key, entry.c.parent, entry.c.depth).where(*in_format))
    rows: list[_Link] = [(row.entry_key, row.parent, row.depth) for row in found_rows]
    _check_chain(rows, start, 0 if first is None else first.depth)
    children: defaultdict[bytes | None, list[bytes]] = defaultdict(list)
    for key, parent, _ in rows:
        children[parent].append(key)
    found = [start] if first is not None else []
    wave = [start]
    while wave:
        wave = [child for key in wave for child in children.pop(key, ())]
        found += wave
    return [(selector.format_id, key) for key in reversed(found)]


def _check_walk(connection: Connection, in_format: Sequence[ColumnElement[bool]]) -> None:
    count = connection.scalar(select(func.count()).select_from(entry).where(*in_format)) or 0
    if count > WALK_MAX:
        raise DeletionUnsupported(
            f"unsupported: this KV format has {count} entries, more than the {WALK_MAX} among which a chain is "
            "followed: delete by label, by age or by format"
        )


def _check_chain(rows: Sequence[_Link], start: bytes, depth: int) -> None:
    there = {key for key, _, _ in rows}
    there.add(start)
    # The depth of an entry of unknown descent says nothing: it may follow any other.
    loose = sum(
        1
        for key, parent, behind in rows
        if key != start and parent not in there and (behind > depth or (parent is None and behind > 0))
    )
    if loose:
        raise DeletionUnsupported(
            f"unsupported: {loose} entries of this KV format may follow the key, but their predecessor is not known "
            "(no parent was told, or it is gone): delete them by key, by label, by age or by format"
        )
