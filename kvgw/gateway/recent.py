"""Rows of chunks that were read lately, in memory: what is read again and again is not asked of the catalog each time.

As with matches (`kvgw.gateway.index`), rows are remembered under the catalog's version for their tenant: a change that
may have ended anything makes all of them void before it is acknowledged (law 5). Where a chunk lies may change without
that: rows are good for chunks that staging has now, and for no others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from tenancy.model import FoundChunk, Scope

ROWS_MOST: Final = 16_384
"""Of all namespaces together: 0.7 KiB each."""


class _Shelf:
    """Rows of one namespace by entry key, those read longest ago first."""

    __slots__ = ("rows", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.rows: OrderedDict[bytes, FoundChunk] = OrderedDict()


class RecentRows:
    """Belongs to one event loop."""

    def __init__(self, most: int = ROWS_MOST) -> None:
        """Beyond `most` rows, those read longest ago in the namespace read longest ago are forgotten."""
        self._most = most
        self._count = 0
        self._shelves: OrderedDict[Scope, _Shelf] = OrderedDict()

    def __len__(self) -> int:
        """Rows of all namespaces together."""
        return self._count

    def find(
        self, scope: Scope, version: int | None, entry_keys: Sequence[bytes], now_ms: int
    ) -> dict[bytes, FoundChunk] | None:
        """The rows of all these keys; None unless each is known, visible still and not expired."""
        shelf = self._shelves.get(scope)
        if version is None or shelf is None or shelf.version != version:
            return None
        rows = shelf.rows
        found: dict[bytes, FoundChunk] = {}
        for key in entry_keys:
            one = rows.get(key)
            if one is None or one.expires_ms <= now_ms:
                return None
            found[key] = one
        for key in entry_keys:
            rows.move_to_end(key)
        self._shelves.move_to_end(scope)
        return found

    def remember(self, scope: Scope, version: int | None, found: Mapping[bytes, FoundChunk]) -> None:
        """Keep what a look-up found that began under `version`."""
        if version is None or not found:
            return
        shelf = self._shelves.get(scope)
        if shelf is None or shelf.version != version:
            self._count -= 0 if shelf is None else len(shelf.rows)
            shelf = self._shelves[scope] = _Shelf(version)
        before = len(shelf.rows)
        shelf.rows.update(found)
        self._count += len(shelf.rows) - before
        self._shelves.move_to_end(scope)
        while self._count > self._most:
            self._forget_one()

    def forget(self, scope: Scope, entry_keys: Sequence[bytes]) -> None:
        """Their rows have changed."""
        shelf = self._shelves.get(scope)
        if shelf is not None:
            self._count -= sum(shelf.rows.pop(key, None) is not None for key in entry_keys)

    def _forget_one(self) -> None:
        scope, shelf = next(iter(self._shelves.items()))
        if shelf.rows:
            shelf.rows.popitem(last=False)
            self._count -= 1
        if not shelf.rows:
            del self._shelves[scope]
