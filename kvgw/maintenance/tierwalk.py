"""Walking a tier beside its rows: what rows say is there and is not, and what is there without a row.

Listing and rows are compared in slices of the blob ids, which are random: what is held in memory has a bound, whatever
the tier holds. Nothing is believed on one sighting: PUTs, sweeps and promotions go on meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from uuid import UUID

from kvgw.gateway.rooms import Rooms
from kvgw.maintenance.pacing import Pauses
from storage.tier import BlobInfo, blob_name, parse_name
from tenancy.inspecting import Placed
from tenancy.model import Scope

PAGE: Final = 100
SLICE: Final = 100_000
"""Rows that are compared in one pass over the listing."""
SLICES_MAX: Final = 256
UNSURE_MS: Final = 600_000
"""A blob younger than this may be of a PUT that has not committed yet; clocks may differ."""


@dataclass(frozen=True, slots=True)
class Dangling:
    """Placements of one namespace whose blobs are missing or of another length."""

    scope: Scope
    placements: list[Placed]


@dataclass(frozen=True, slots=True)
class Ownerless:
    """Blobs without a row; `scope` None: of a namespace that the catalog does not know."""

    scope: Scope | None
    blobs: list[BlobInfo]


Sighting: TypeAlias = Dangling | Ownerless
_Page: TypeAlias = defaultdict[UUID, dict[bytes, BlobInfo]]
"""Listed blobs, by namespace and blob id."""
_Known: TypeAlias = defaultdict[UUID, dict[bytes, int]]
"""By namespace: blob id → length, of listed blobs that have a row."""


@dataclass(slots=True)
class TierWalk:
    """One walk through a tier and its rows. `scopes`: every namespace of the catalog, by its id."""

    rooms: Rooms
    label: str
    scopes: Mapping[UUID, Scope]
    blobs: int = 0
    rows: int = 0
    _known: _Known = field(default_factory=lambda: defaultdict(dict))
    _pauses: Pauses = field(init=False)

    def __post_init__(self) -> None:
        self._pauses = Pauses(self.rooms.clock, self.rooms.turns)

    async def sightings(self) -> AsyncIterator[Sighting]:
        """What does not agree, each seen a second time just before. Raises `TierUnavailable`, `TierMisconfigured`."""
        catalog, node = self.rooms.catalog, self._node
        total = sum([await catalog.count_placed(scope, self.label, node) for scope in self.scopes.values()])
        for low, high in _slices(total):
            self._known.clear()
            async for page in self._listed(low, high):
                async for one in self._without_row(page):
                    yield one
            for scope in self.scopes.values():
                async for found in self._without_blob(scope, low, high):
                    yield found

    @property
    def _node(self) -> str:
        return self.rooms.placement_node(self.label)

    async def _listed(self, low: int, high: int) -> AsyncIterator[_Page]:
        """The listing in pages: blobs whose id begins with a byte from `low` up to, not including, `high`."""
        page, count = _Page(dict), 0
        async for info in self.rooms.tiers[self.label].scan():
            namespace, blob_id = parse_name(info.name)
            if low <= blob_id[0] < high:
                page[namespace][blob_id] = info
                count += 1
                await self._pauses.between()
            if count == PAGE:
                self.blobs += count
                yield page
                page, count = _Page(dict), 0
        self.blobs += count
        yield page

    async def _without_row(self, page: _Page) -> AsyncIterator[Ownerless]:
        for namespace, blobs in page.items():
            scope = self.scopes.get(namespace)
            known = await self._rows_of(scope, blobs)
            self._known[namespace].update((one, blobs[one].length) for one in known)
            suspects = {one: info for one, info in blobs.items() if one not in known and self.age_ms(info) >= UNSURE_MS}
            # The row first, then the bytes: a deletion takes the bytes away before the row.
            known = await self._rows_of(scope, suspects)
            names = [info.name for one, info in suspects.items() if one not in known]
            there = await self.rooms.tiers[self.label].stat(names) if names else {}
            found = [info for one, info in suspects.items() if one not in known and info.name in there]
            if found:
                yield Ownerless(scope, found)

    async def _rows_of(self, scope: Scope | None, blobs: Mapping[bytes, BlobInfo]) -> set[bytes]:
        if scope is None or not blobs:
            return set()
        return await self.rooms.catalog.known_objects(scope, self.label, self._node, list(blobs))

    async def _without_blob(self, scope: Scope, low: int, high: int) -> AsyncIterator[Dangling]:
        after, until = bytes([low]), bytes([high]) if high <= 0xFF else None
        listed = self._known[scope.namespace]
        while page := await self.rooms.catalog.placed(scope, self.label, self._node, after, until, PAGE):
            await self._pauses.between()
            self.rows += len(page)
            after = page[-1].blob_id
            wrong = await self._confirmed(scope, [one for one in page if listed.get(one.blob_id) != one.length])
            if wrong:
                yield Dangling(scope, wrong)

    async def _confirmed(self, scope: Scope, suspects: Sequence[Placed]) -> list[Placed]:
        """Those whose bytes are not there now, though the row says so before and after."""
        if not suspects:
            return []
        names = {one.blob_id: blob_name(scope.namespace, one.blob_id) for one in suspects}
        lengths = await self.rooms.tiers[self.label].stat(list(names.values()))
        wrong = [one for one in suspects if lengths.get(names[one.blob_id]) != one.length]
        return await self.rooms.catalog.still_placed(scope, self.label, self._node, wrong) if wrong else []

    def age_ms(self, info: BlobInfo) -> int:
        """How long ago the blob was written, by the catalog's time."""
        return self.rooms.time.now_ms() - info.modified_ms


def _slices(rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of the first byte of a blob id, each of about `SLICE` rows."""
    count = min(SLICES_MAX, max(1, -(-rows // SLICE)))
    for number in range(count):
        yield number * 256 // count, (number + 1) * 256 // count
