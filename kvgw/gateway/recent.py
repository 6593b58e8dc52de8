"""Rows of chunks that were stored or read lately, in memory: what is read soon after, or again and again, is not asked
of the catalog each time.

As with matches (`kvgw.gateway.index`), rows are remembered under the catalog's version for their tenant: a change that
may have ended anything makes all of them void before it is acknowledged (law 5). Where a chunk lies, and how long it
lives, may change without that: rows are good for chunks that staging has, and for seconds. Who finds no chunk where its
row says asks the catalog.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from storage.tier import blob_name
from tenancy.model import FoundChunk, Scope

ROWS_MOST: Final = 16_384
"""Of all namespaces together: 0.7 KiB each."""
KEPT_MS: Final = 5_000
"""After so long they are read again: another gateway may have made a life longer."""


class _Shelf:
    """Rows of one namespace by entry key, those read longest ago first."""

    __slots__ = ("rows", "since_ms", "version")

    def __init__(self, version: int, since_ms: int) -> None:
        self.version = version
        self.since_ms = since_ms
        self.rows: OrderedDict[bytes, FoundChunk] = OrderedDict()

    def stands(self, version: int, now_ms: int) -> bool:
        """Whether its rows may be used."""
        return self.version == version and 0 <= now_ms - self.since_ms < KEPT_MS


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
        if version is None or shelf is None:
            return None
        if not shelf.stands(version, now_ms):
            self.drop(scope)
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

    def remember(self, scope: Scope, version: int | None, found: Mapping[bytes, FoundChunk], now_ms: int) -> None:
        """Keep what a look-up found, or a PUT announced, that began under `version`, at `now_ms`."""
        if version is None or not found:
            return
        shelf = self._shelves.get(scope)
        if shelf is None or not shelf.stands(version, now_ms):
            self.drop(scope)
            shelf = self._shelves[scope] = _Shelf(version, now_ms)
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

    def drop(self, scope: Scope) -> None:
        """Keep nothing of a namespace: rows hold the salts of their chunks."""
        shelf = self._shelves.pop(scope, None)
        self._count -= 0 if shelf is None else len(shelf.rows)

    def names(self) -> list[str]:
        """Names of all blobs whose rows are remembered."""
        return [
            blob_name(scope.namespace, row.blob_id)
            for scope, shelf in self._shelves.items()
            for row in shelf.rows.values()
        ]

    def _forget_one(self) -> None:
        scope, shelf = next(iter(self._shelves.items()))
        if shelf.rows:
            shelf.rows.popitem(last=False)
            self._count -= 1
        if not shelf.rows:
            del self._shelves[scope]
