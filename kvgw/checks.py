"""Checks of a caller's arguments before anything is sent: each refusal names the value and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvgw.durations import duration_ms
from kvgw.errors import Code, FormatError
from kvgw.model import DEADLINE_MS_MAX, KEYS_MAX, PUBLIC_MAX
from kvgw.reports import Registered

_KEY_BYTES_MAX: Final = 64
_BYTES: Final = {bytes}


def check_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Refuse a batch of keys that no gateway would take. Raises `FormatError` naming the key and the limit."""
    if not 1 <= len(keys) <= KEYS_MAX:
        raise FormatError(f"a request takes 1 to {KEYS_MAX} keys, not {len(keys)}; split it", Code.TOO_MANY_KEYS)
    if set(map(type, keys)) == _BYTES:
        lengths = set(map(len, keys))
        if min(lengths) >= 1 and max(lengths) <= _KEY_BYTES_MAX and len(set(keys)) == len(keys):
            return list(keys)
    seen: dict[bytes, int] = {}
    for index, key in enumerate(keys):  # one is wrong, or of a kind of bytes of its own
        if not isinstance(key, bytes) or not 1 <= len(key) <= _KEY_BYTES_MAX:
            raise FormatError(f"key {index} must be 1 to {_KEY_BYTES_MAX} bytes, not {key!r:.80}")
        if key in seen:
            raise FormatError(f"key {index} repeats key {seen[key]}; name each chunk once in a request")
        seen[key] = index
    return list(keys)


def check_references(references: Sequence[str]) -> list[str]:
    """Refuse what cannot name public namespaces. Raises `FormatError` naming the value and the limit."""
    if isinstance(references, str):
        raise FormatError(f"public takes a list of namespaces, not the string {references!r:.80}")
    if len(references) > PUBLIC_MAX:
        raise FormatError(f"a request looks into at most {PUBLIC_MAX} public namespaces, not {len(references)}")
    for reference in references:
        tenant, slash, name = reference.partition("/")
        if not (tenant and slash and name) or "/" in name or len(reference) > 129:
            raise FormatError(f"{reference!r:.160} names no public namespace; write tenant/namespace")
    return list(references)


def one_namespace(chosen: Sequence[Registered]) -> str:
    if not chosen:
        raise FormatError("match needs at least one registered format")
    namespaces = {one.namespace for one in chosen}
    if len(namespaces) > 1:
        raise FormatError(f"all formats of one match must be of one namespace, not of {sorted(namespaces)}")
    return chosen[0].namespace


def check_counts(keys: Sequence[bytes], buffers: Sequence[memoryview], what: str) -> None:
    if len(keys) != len(buffers):
        raise FormatError(f"{len(keys)} keys but {len(buffers)} {what}; give one for each key")


def as_bytes(buffer: bytes | bytearray | memoryview, what: str) -> memoryview:
    """The bytes of a buffer. Raises `FormatError` for one that is not a single run of memory."""
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise FormatError(f"{what} is not contiguous in memory; copy it into a buffer that is")
    return view.cast("B")


def writable(buffer: bytearray | memoryview, index: int) -> memoryview:
    view = as_bytes(buffer, f"buffer {index}")
    if view.readonly:
        raise FormatError(f"buffer {index} is read-only")
    return view


def life_ms(ttl: float | str) -> int:
    """Whole milliseconds of a TTL in seconds, or written as ``5m``, ``1h``, ``24h``. Raises `FormatError`."""
    return duration_ms(ttl) if isinstance(ttl, str) else milliseconds(ttl)


def milliseconds(seconds: float) -> int:
    """Whole milliseconds. Raises `FormatError` for what is no number of seconds between 1 ms and ten years."""
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 1 <= seconds * 1000 <= 10 * 366 * 86_400_000:
        raise FormatError(f"a time must be between 1 ms and ten years in seconds, not {seconds!r:.80}")
    return int(seconds * 1000)


def deadline(seconds: float) -> float:
    """Seconds that a call may take. Raises `FormatError` for what cannot be a deadline."""
    milliseconds(seconds)
    if seconds * 1000 > DEADLINE_MS_MAX:
        raise FormatError(f"a deadline must be at most {DEADLINE_MS_MAX // 1000} seconds, not {seconds!r}")
    return seconds


def check_buffers(buffers: Sequence[memoryview], lengths: int, what: str) -> None:
    """Refuse buffers that cannot hold whole chunks, before a byte moves. Raises `FormatError` with both numbers."""
    for index, buffer in enumerate(buffers):
        if len(buffer) != lengths:
            raise FormatError(
                f"{what} {index} has {len(buffer)} bytes, but a chunk of this format has {lengths}",
                Code.LENGTH_MISMATCH,
            )
