"""Prefix keys: names of chunks that are chained over the whole prefix (``docs/formats.md``, "Canonical KV format").

``h_0 = BLAKE3(derive-key "kvgw prefix v1", LP(canonical, salt))`` and chunk i has
``h_i = BLAKE3(key = h_{i-1}, LP(its tokens as u32 each) ‖ LP(u32 offset ‖ digest) per multimodal item it covers)``.
An equal key therefore means an equal format, salt, and equal tokens and items from the first token on.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from kvgw.canonical import length_prefixed
from kvgw.errors import FormatError
from kvgw.kvformat import KVFormat

_ROOT_CONTEXT = "kvgw prefix v1"
_DIGEST_BYTES_MAX = 64


@dataclass(frozen=True, slots=True, order=True)
class MultimodalItem:
    """An image, sound or other item whose embedding starts at token `offset`; `digest` is of its content."""

    offset: int
    length: int
    """Tokens that the item's placeholder covers; a chunk that holds any of them depends on the digest."""
    digest: bytes

    def __post_init__(self) -> None:
        if type(self.offset) is not int or not 0 <= self.offset < 2**32:
            raise FormatError(f"multimodal offset must be a token position from 0 to 2**32-1, not {self.offset!r}")
        if type(self.length) is not int or not 1 <= self.length < 2**32:
            raise FormatError(f"multimodal length must be at least one token, not {self.length!r}")
        if not isinstance(self.digest, bytes) or not 16 <= len(self.digest) <= _DIGEST_BYTES_MAX:
            raise FormatError(
                f"multimodal digest must be 16 to {_DIGEST_BYTES_MAX} bytes of a content hash, not {self.digest!r:.80}"
            )


def prefix_keys(
    kv_format: KVFormat, tokens: Sequence[int], *, salt: bytes = b"", items: Sequence[MultimodalItem] = ()
) -> list[bytes]:
    """Keys (32 bytes each) of the whole chunks of `tokens`; a last chunk that is not full has no key.

    `salt` separates users inside one namespace. `items` may come in any order.
    Raises `FormatError` for a token outside u32 or a malformed item.
    """
    per_chunk = kv_format.tokens_per_chunk
    packed = _pack_tokens(tokens)
    ordered = sorted(items)
    previous = blake3(length_prefixed(kv_format.canonical(), salt), derive_key_context=_ROOT_CONTEXT).digest()
    keys: list[bytes] = []
    for start in range(0, len(tokens) - per_chunk + 1, per_chunk):
        hasher = blake3(key=previous)
        hasher.update(length_prefixed(packed[4 * start : 4 * (start + per_chunk)]))
        for item in ordered:
            if item.offset < start + per_chunk and start < item.offset + item.length:
                hasher.update(length_prefixed(item.offset.to_bytes(4, "big") + item.digest))
        previous = hasher.digest()
        keys.append(previous)
    return keys


def _pack_tokens(tokens: Sequence[int]) -> bytes:
    if isinstance(tokens, bytes | bytearray | memoryview | str):
        raise FormatError(f"tokens must be a sequence of integers, not {type(tokens).__name__}")
    try:
        packed = array.array("I", tokens)
    except (TypeError, OverflowError) as error:
        raise FormatError(f"tokens must be integers from 0 to 2**32-1: {error}") from error
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()
