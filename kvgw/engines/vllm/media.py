"""Images, sounds and other items in a prompt: their tokens are placeholders, so that keys need their content too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from kvgw.errors import FormatError
from kvgw.keys import MultimodalItem

_HEX: Final = frozenset("0123456789abcdef")
_HASHES: Final = (64, 128)
"""Hexadecimal digits of the hashes that vLLM takes of an item: BLAKE3 and SHA-256, SHA-512."""


class Place(Protocol):
    """vLLM's ``PlaceholderRange``: the tokens of an item."""

    offset: int
    length: int


class Feature(Protocol):
    """vLLM's ``MultiModalFeatureSpec``, as far as it is read here."""

    mm_hash: str | None
    """Of the item's content, of how it is processed, and of the model; or what the caller named it by."""

    @property
    def mm_position(self) -> Place: ...


def items_of(features: Iterable[Feature]) -> tuple[MultimodalItem, ...]:
    """The items of a prompt as prefix keys take them.

    Raises `FormatError` for one that no hash of its content names: a caller's own ``uuid``, or the number that vLLM
    gives where it does not hash.
    """
    items = []
    for feature in features:
        name = feature.mm_hash or ""
        if len(name) not in _HASHES or not _HEX.issuperset(name):
            raise FormatError("a prompt with an image or sound that no hash of its content names")
        place = feature.mm_position
        items.append(MultimodalItem(place.offset, place.length, bytes.fromhex(name)))
    return tuple(items)
