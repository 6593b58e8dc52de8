"""What the gateway's verbs leave for maintenance to do, remembered in memory only.

The catalog knows all of it too; this is merely where to look first. After a restart maintenance looks everywhere.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from tenancy.model import Scope

HITS_GATHERED_MAX: Final = 100_000
"""Entries whose hits are gathered; beyond it a hit is served but not counted towards the entry's value."""


class Backlog:
    """Namespaces with writes due or bytes to delete, chunks to promote, and hits not yet written down."""

    def __init__(self) -> None:
        self.work = asyncio.Event()
        """Set when there is something to do."""
        self._writes: set[Scope] = set()
        self._dead: set[Scope] = set()
        self._deletions = False
        self._promotions: defaultdict[Scope, set[bytes]] = defaultdict(set)
        self._hits: defaultdict[Scope, dict[tuple[int, bytes], tuple[int, int]]] = defaultdict(dict)
        self._gathered = 0

    def note_writes(self, scope: Scope) -> None:
        """The namespace has placements to be written."""
        self._writes.add(scope)
        self.work.set()

    def note_dead(self, scope: Scope) -> None:
        """The namespace has bytes that nothing points at any more."""
        self._dead.add(scope)
        self.work.set()

    def note_deletion(self) -> None:
        """There is a deletion job to go on with."""
        self._deletions = True
        self.work.set()

    def note_promotion(self, scope: Scope, blob_id: bytes) -> None:
        """The chunk was read from below and should be on this node's NVMe too."""
        self._promotions[scope].add(blob_id)
        self.work.set()

    def note_hits(self, scope: Scope, format_id: int, entry_keys: Iterable[bytes], now_ms: int) -> None:
        """The entries of one KV format were read."""
        hits = self._hits[scope]
        for entry_key in entry_keys:
            entry = format_id, entry_key
            known = hits.get(entry)
            if known is None:
                if self._gathered >= HITS_GATHERED_MAX:
                    return
                self._gathered += 1
            hits[entry] = ((known[0] if known else 0) + 1, now_ms)

    def take_writes(self) -> set[Scope]:
        taken, self._writes = self._writes, set()
        return taken

    def take_dead(self) -> set[Scope]:
        taken, self._dead = self._dead, set()
        return taken

    def take_deletions(self) -> bool:
        taken, self._deletions = self._deletions, False
        return taken

    def take_promotions(self) -> dict[Scope, set[bytes]]:
        taken = dict(self._promotions)
        self._promotions.clear()
        return taken

    def take_hits(self) -> dict[Scope, list[tuple[int, bytes, int, int]]]:
        """Per namespace: format id, entry key, number of hits, time of the last."""
        taken = {
            scope: [(format_id, key, count, last) for (format_id, key), (count, last) in hits.items()]
            for scope, hits in self._hits.items()
        }
        self._hits.clear()
        self._gathered = 0
        return taken
