"""What a deletion is to delete, as a request says it."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from kvgw.admin.bodies import Body, Duration
from kvgw.admin.seat import Seat
from kvgw.durations import duration_ms
from tenancy import naming
from tenancy.deletion import selection
from tenancy.deletion.selection import Selector
from tenancy.errors import FormatUnknown
from tenancy.model import FormatRow, Namespace

KEYS_MAX: Final = 400

Fingerprint: TypeAlias = Annotated[
    str, Field(pattern="^[0-9a-f]{64}$", description="Of a KV format, as its registration answered; hexadecimal.")
]
EngineKey: TypeAlias = Annotated[str, Field(pattern="^([0-9a-f]{2}){1,64}$", description="Hexadecimal.")]
Word: TypeAlias = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f\x7f]+$")]


class KeysBody(Body):
    """Entries by their engine keys."""

    format: Fingerprint
    keys: Annotated[list[EngineKey], Field(min_length=1, max_length=KEYS_MAX)]


class PrefixBody(Body):
    """An engine key and everything that follows it."""

    format: Fingerprint
    key: EngineKey


class LabelBody(Body):
    """Every entry that carries a label."""

    kind: Annotated[str, Field(min_length=1, max_length=256)]
    value: Annotated[str, Field(min_length=1, max_length=256)]


class FormatBody(Body):
    """Every entry of the KV formats of which a field has this value."""

    field: selection.FormatField
    value: Word


class AgeBody(Body):
    """Every entry that was made, or read last, longer ago than this."""

    moment: selection.Moment
    older_than: Duration


class DeletionBody(Body):
    """What to delete: exactly one of these. `everything` is the whole namespace, with its keys and its name."""

    keys: KeysBody | None = None
    prefix: PrefixBody | None = None
    label: LabelBody | None = None
    format: FormatBody | None = None
    age: AgeBody | None = None
    everything: Literal[True] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        named = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(named) != 1:
            raise ValueError(f"name exactly one of {', '.join(type(self).model_fields)}")
        return self


async def selector_of(seat: Seat, namespace: Namespace, body: DeletionBody) -> Selector:
    """The selector, with keyed names in place of keys and labels. Raises `FormatUnknown` or as the keyring does."""
    if body.everything:
        return selection.Namespace(namespace.name)
    if body.format is not None:
        return selection.Format(body.format.field, body.format.value)
    if body.age is not None:
        return selection.Age(body.age.moment, seat.now_ms - duration_ms(body.age.older_than))
    names = (await seat.opened.rooms.keyring.keys(namespace.scope)).names
    if body.label is not None:
        return selection.Label(naming.label_mac(names.label, body.label.kind, body.label.value).hex())
    if body.prefix is not None:
        row = await _format(seat, namespace, body.prefix.format)
        (key,) = naming.entry_keys(names.entry, row.fingerprint, [bytes.fromhex(body.prefix.key)])
        return selection.Prefix(row.format_id, body.prefix.format, key.hex())
    assert body.keys is not None
    row = await _format(seat, namespace, body.keys.format)
    keys = naming.entry_keys(names.entry, row.fingerprint, [bytes.fromhex(key) for key in body.keys.keys])
    return selection.Keys(row.format_id, body.keys.format, [key.hex() for key in keys])


async def _format(seat: Seat, namespace: Namespace, fingerprint: str) -> FormatRow:
    found = await seat.opened.rooms.catalog.format(namespace.scope, bytes.fromhex(fingerprint))
    if found is None:
        raise FormatUnknown("this KV format is not registered in the namespace")
    return found
