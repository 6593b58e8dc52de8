"""What matches found lately, in memory: a match of keys that were all there is answered without the catalog.

Only what is visible is remembered, under the catalog's version for its tenant: a change that may have ended anything
makes all of it void before the change is acknowledged (law 5). Where several gateways write, nobody knows the version,
and nothing is remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tenancy.model import FoundChunk, Scope

ENTRIES_MAX: Final = 262_144
"""In all namespaces together; beyond it those of the namespace asked longest ago are forgotten."""


class Known(NamedTuple):
    """A chunk that is visible until it expires, unless the version changes."""

    expires_ms: int
    blob_id: bytes
    object_name: str
    on_nvme: bool
    """Else it is in S3, or in staging alone."""


@dataclass(slots=True)
class _Shelf:
    """What is known of one namespace."""

    version: int
    formats: dict[int, dict[bytes, Known]] = field(default_factory=dict)
    """Format id → engine key → chunk."""
    entries: int = 0


class MatchIndex:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._shelves: OrderedDict[Scope, _Shelf] = OrderedDict()
        self._entries = 0

    def find(
        self, scope: Scope, version: int | None, format_ids: Sequence[int], engine_keys: Sequence[bytes], now_ms: int
    ) -> list[list[Known]] | None:
        """For each format its chunks, one for each key; None unless every one of them is known to be there."""
        shelf = self._shelves.get(scope)
        if shelf is None or shelf.version != version:
            return None
        runs = []
        for format_id in format_ids:
            known = shelf.formats.get(format_id, {})
            run = [one for key in engine_keys if (one := known.get(key)) is not None and one.expires_ms > now_ms]
            if len(run) < len(engine_keys):
                return None
            runs.append(run)
        self._shelves.move_to_end(scope)
        return runs

    def remember(
        self, scope: Scope, version: int | None, format_id: int, found: Sequence[tuple[bytes, str, FoundChunk]]
    ) -> None:
        """Keep what a look-up found that began under `version`: engine key, object name, chunk."""
        if version is None:
            return
        shelf = self._shelves.get(scope)
        if shelf is None or shelf.version != version:
            self._forget(scope)
            shelf = self._shelves[scope] = _Shelf(version)
        known = shelf.formats.setdefault(format_id, {})
        before = len(known)
        for key, object_name, one in found:
            known[key] = Known(one.expires_ms, one.blob_id, object_name, one.on_nvme)
        shelf.entries += len(known) - before
        self._entries += len(known) - before
        self._shelves.move_to_end(scope)
        while self._entries > ENTRIES_MAX:
            self._forget(next(iter(self._shelves)))

    def _forget(self, scope: Scope) -> None:
        shelf = self._shelves.pop(scope, None)
        if shelf is not None:
            self._entries -= shelf.entries
