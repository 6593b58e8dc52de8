"""Canonical encoding of a KV format's fields: typed, numbered, length-prefixed (``docs/formats.md``).

One byte string for one value: no two different field lists share an encoding, because each value carries its type
and length and each field its number. All integers are big-endian.
"""

from __future__ import annotations

import math
import struct
import unicodedata
from collections.abc import Sequence
from typing import Final, TypeAlias

from kvgw.errors import FormatError

Value: TypeAlias = "int | float | str | bytes | tuple[Value, ...] | None"

MAGIC: Final = b"KVGWF\x01"
FIELD_COUNT: Final = 16

_NONE, _U64, _F64, _TEXT, _BYTES, _LIST = range(6)
_NESTING_MAX: Final = 8
_FIELD = struct.Struct(">HBI")
_ITEM = struct.Struct(">BI")


def encode(values: Sequence[Value]) -> bytes:
    """Encode exactly `FIELD_COUNT` values, the first as field 1."""
    if len(values) != FIELD_COUNT:
        raise FormatError(f"a KV format has {FIELD_COUNT} fields, not {len(values)}")
    parts = [MAGIC]
    for number, value in enumerate(values, start=1):
        kind, body = _encode_value(value, 0)
        parts.append(_FIELD.pack(number, kind, len(body)))
        parts.append(body)
    return b"".join(parts)


def decode(data: bytes) -> tuple[Value, ...]:
    """Decode the fields of a canonical form. Raises `FormatError` on anything malformed."""
    if not data.startswith(MAGIC):
        raise FormatError("not a canonical KV format: wrong magic")
    values: list[Value] = []
    at = len(MAGIC)
    for expected in range(1, FIELD_COUNT + 1):
        if len(data) - at < _FIELD.size:
            raise FormatError(f"canonical KV format ends before field {expected}")
        number, kind, length = _FIELD.unpack_from(data, at)
        at += _FIELD.size
        if number != expected:
            raise FormatError(f"canonical KV format has field {number} where {expected} belongs")
        values.append(_decode_value(kind, _take(data, at, length), 0))
        at += length
    if at != len(data):
        raise FormatError(f"canonical KV format has {len(data) - at} bytes behind its last field")
    return tuple(values)


def length_prefixed(*fields: bytes) -> bytes:
    """LP of the format page: each field preceded by its length as u32."""
    return b"".join(part for field in fields for part in (len(field).to_bytes(4, "big"), field))


def _encode_value(value: Value, depth: int) -> tuple[int, bytes]:
    if depth > _NESTING_MAX:
        raise FormatError(f"lists are nested deeper than {_NESTING_MAX}")
    if value is None:
        return _NONE, b""
    if type(value) is int:
        if not 0 <= value < 2**64:
            raise FormatError(f"integer {value} is outside 0 … 2**64-1")
        return _U64, value.to_bytes(8, "big")
    if type(value) is float:
        if not math.isfinite(value):
            raise FormatError(f"number {value} is not finite")
        return _F64, struct.pack(">d", value)
    if type(value) is str:
        return _TEXT, _encode_text(value)
    if type(value) is bytes:
        return _BYTES, value
    if type(value) is tuple:
        encoded = [_encode_value(item, depth + 1) for item in value]
        return _LIST, b"".join(_ITEM.pack(kind, len(body)) + body for kind, body in encoded)
    raise FormatError(f"{value!r} of type {type(value).__name__} cannot be part of a KV format")


def _encode_text(value: str) -> bytes:
    if not unicodedata.is_normalized("NFC", value):
        raise FormatError(f"text {value!r} is not in Unicode NFC; normalise it before use")
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise FormatError(f"text {value!r} is not valid Unicode: {error.reason}") from error


def _take(data: bytes, at: int, length: int) -> bytes:
    if length > len(data) - at:
        raise FormatError(f"a value of {length} bytes runs past the end of the canonical KV format")
    return data[at : at + length]


def _decode_value(kind: int, body: bytes, depth: int) -> Value:
    if depth > _NESTING_MAX:
        raise FormatError(f"lists are nested deeper than {_NESTING_MAX}")
    if kind == _NONE and not body:
        return None
    if kind == _U64 and len(body) == 8:
        return int.from_bytes(body, "big")
    if kind == _F64 and len(body) == 8:
        return float(struct.unpack(">d", body)[0])
    if kind == _TEXT:
        try:
            return body.decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError("a text value of the canonical KV format is not UTF-8") from error
    if kind == _BYTES:
        return body
    if kind == _LIST:
        return _decode_list(body, depth)
    raise FormatError(f"a value of type {kind} and {len(body)} bytes cannot be part of a KV format")


def _decode_list(body: bytes, depth: int) -> tuple[Value, ...]:
    items: list[Value] = []
    at = 0
    while at < len(body):
        if len(body) - at < _ITEM.size:
            raise FormatError("a list of the canonical KV format breaks off")
        kind, length = _ITEM.unpack_from(body, at)
        at += _ITEM.size
        items.append(_decode_value(kind, _take(body, at, length), depth + 1))
        at += length
    return tuple(items)
