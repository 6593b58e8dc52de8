"""What this gateway did, counted in memory: usage by the hour, totals by the minute for the audit log, refusals.

Counting never waits and never fails a request. Maintenance takes the counts every few seconds and writes them down;
what could not be written comes back. The number of counts is bounded: what does not fit is dropped, and `dropped` says
how much that was.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Final
from uuid import UUID

from kvgw.errors import Code, RequestRefused
from kvgw.model import PutOutcome
from tenancy.births import Batch
from tenancy.metering import HOUR_MS, METERS, Amounts
from tenancy.model import FormatRow, Scope
from tenancy.timekeeping import CatalogTime

CELLS_MAX: Final = 200_000
"""Counts, each of one namespace, hour and meter, that are kept until they are written down."""
MINUTES_MAX: Final = 10_000
"""Namespaces of which a minute's totals are kept."""
REFUSED_MAX: Final = 20_000
"""Keys that a quota refused and that are remembered, to explain why they are missing."""
SOURCES: Final = ("unix", "tcp", "tls", "http", "admin")
"""Where a caller without a valid credential came from."""

_KNOWN: Final = frozenset(METERS)
Refused = tuple[Scope, int, bytes]
"""Namespace, format id, entry key."""


@dataclass(slots=True)
class _Tally:
    """Matches and refusals of one namespace in one hour that are not counted among the rest yet."""

    hour_ms: int
    lookups: int = 0
    matched_keys: int = 0
    missed_keys: int = 0
    matched_tokens: int = 0
    missed_tokens: int = 0
    limit_hits: int = 0


class Meter:
    """Counts what verbs did. Belongs to one event loop."""

    def __init__(self, time: CatalogTime) -> None:
        self._time = time
        self._usage: defaultdict[UUID, dict[tuple[UUID, int, str], int]] = defaultdict(dict)
        self._cells = 0
        self._minutes: dict[Scope, Counter[str]] = {}
        self._tallies: dict[Scope, _Tally] = {}
        self._strangers: Counter[str] = Counter()
        self._refused: OrderedDict[Refused, int] = OrderedDict()
        self.dropped = 0
        """Counts that did not fit."""

    # What the verbs say

    def matched(self, scope: Scope, asked: int, count: int, tokens_per_chunk: int) -> None:
        """A match of `asked` keys found the leading `count`."""
        tally = self._tally(scope)
        tally.lookups += 1
        tally.matched_keys += count
        tally.missed_keys += asked - count
        tally.matched_tokens += count * tokens_per_chunk
        tally.missed_tokens += (asked - count) * tokens_per_chunk

    def read(self, scope: Scope, asked: int, tiers: Iterable[str], chunk_bytes: int) -> None:
        """A GET of `asked` keys delivered a chunk from each of `tiers`."""
        served = Counter(tiers)
        hits = served.total()
        self._add(scope, {"gets": 1, "get_chunks": hits, "get_missed": asked - hits})
        self._add(scope, {f"get_bytes_{tier}": count * chunk_bytes for tier, count in served.items()})
        self._merge(scope, {"gets": asked, "hits": hits, "get_bytes": hits * chunk_bytes})

    def wrote(self, batch: Batch, outcomes: Sequence[PutOutcome], kv_format: FormatRow) -> None:
        """A PUT ended with these outcomes, one for each key of `batch`."""
        stored = outcomes.count(PutOutcome.STORED)
        refused = outcomes.count(PutOutcome.OVER_QUOTA)
        moved = stored * kv_format.chunk_bytes
        self._add(batch.scope, {"puts": 1, "put_chunks": stored, "put_bytes": moved, "limit_hits": refused})
        self._merge(batch.scope, {"puts": stored, "put_bytes": moved, "over_quota": refused})
        for key, outcome in zip(batch.entry_keys, outcomes, strict=True):
            name = (batch.scope, batch.format_id, key)
            if outcome is PutOutcome.OVER_QUOTA:
                self._refused[name] = self._time.now_ms()
                self._refused.move_to_end(name)
            else:
                self._refused.pop(name, None)
        while len(self._refused) > REFUSED_MAX:
            self._refused.popitem(last=False)

    def deleted(self, scope: Scope, count: int) -> None:
        """A DELETE ended `count` entries."""
        self._add(scope, {"deleted_chunks": count})
        self._merge(scope, {"deletes": count})

    def limited(self, scope: Scope) -> None:
        """A rate limit refused a request."""
        self._tally(scope).limit_hits += 1

    @contextmanager
    def strangers_from(self, source: str) -> Iterator[None]:
        """Count whoever comes, in this block, without a valid credential; `source` is one of `SOURCES`."""
        try:
            yield
        except RequestRefused as error:
            if error.code is Code.UNAUTHENTICATED:
                self._strangers[source if source in SOURCES else "other"] += 1
            raise

    # What explains a miss

    def refused_ms(self, scope: Scope, format_id: int, entry_key: bytes) -> int | None:
        """When a quota last refused this key here, unless it was stored since."""
        return self._refused.get((scope, format_id, entry_key))

    # What maintenance takes

    def take_usage(self) -> dict[UUID, Amounts]:
        """Counts since the last time, by tenant."""
        self._end_tallies()
        taken: dict[UUID, Amounts] = dict(self._usage)
        self._usage.clear()
        self._cells = 0
        return taken

    def give_back(self, tenant: UUID, amounts: Amounts) -> None:
        """Counts that could not be written down now."""
        for (namespace, hour_ms, meter), amount in amounts.items():
            self._put(tenant, (namespace, hour_ms, meter), amount)

    def take_minutes(self) -> dict[Scope, Mapping[str, int]]:
        """Totals since the last time, by namespace; only of those where anything happened."""
        self._end_tallies()
        taken: dict[Scope, Mapping[str, int]] = dict(self._minutes)
        self._minutes = {}
        return taken

    def give_back_minutes(self, totals: Mapping[Scope, Mapping[str, int]]) -> None:
        """Totals that could not be written down now."""
        for scope, counts in totals.items():
            self._merge(scope, counts)

    def take_strangers(self) -> Counter[str]:
        """Callers without a valid credential since the last time, by where they came from."""
        taken, self._strangers = self._strangers, Counter()
        return taken

    def give_back_strangers(self, counts: Mapping[str, int]) -> None:
        """Callers that could not be written down now."""
        self._strangers.update(counts)

    def _tally(self, scope: Scope) -> _Tally:
        now_ms = self._time.now_ms()
        tally = self._tallies.get(scope)
        if tally is None or tally.hour_ms != now_ms - now_ms % HOUR_MS:
            tally = self._begin_tally(scope, now_ms - now_ms % HOUR_MS)
        return tally

    def _begin_tally(self, scope: Scope, hour_ms: int) -> _Tally:
        if scope in self._tallies or len(self._tallies) >= MINUTES_MAX:
            self._end_tallies()
        tally = self._tallies[scope] = _Tally(hour_ms)
        return tally

    def _end_tallies(self) -> None:
        tallies, self._tallies = self._tallies, {}
        for scope, tally in tallies.items():
            counts = asdict(tally)
            hour_ms = counts.pop("hour_ms")
            self._add(scope, counts, hour_ms)
            self._merge(scope, {"matches": tally.lookups, "limited": tally.limit_hits})

    def _add(self, scope: Scope, counts: Mapping[str, int], hour_ms: int | None = None) -> None:
        if hour_ms is None:
            now_ms = self._time.now_ms()
            hour_ms = now_ms - now_ms % HOUR_MS
        for meter, count in counts.items():
            if count and meter in _KNOWN:  # a tier that a test brought has no meter
                self._put(scope.tenant, (scope.namespace, hour_ms, meter), count)

    def _put(self, tenant: UUID, cell: tuple[UUID, int, str], count: int) -> None:
        cells = self._usage[tenant]
        if cell not in cells:
            if self._cells >= CELLS_MAX:
                self.dropped += 1
                return
            self._cells += 1
        cells[cell] = cells.get(cell, 0) + count

    def _merge(self, scope: Scope, counts: Mapping[str, int]) -> None:
        known = self._minutes.get(scope)
        if known is None:
            if len(self._minutes) >= MINUTES_MAX:
                self.dropped += 1
                return
            known = self._minutes[scope] = Counter()
        known.update(counts)
