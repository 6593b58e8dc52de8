"""What an adapter counts, and the reasons for what it could not do: each logged once, and counted every time."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Final

_REASONS_MAX: Final = 64
"""Different sentences that are logged; behind them a reason is only counted."""


COUNTERS: Final = {
    "lookups": "prompts that the gateway was asked for",
    "waits": "lookups that waited for chunks that another engine computes",
    "waits_over": "waits that ended before all chunks were there",
    "lookups_late": "lookups that were given up at their deadline",
    "lookups_failed": "lookups that ended in an error of the adapter",
    "lookup_outages": "lookups that the gateway did not answer",
    "lookups_cut_short": "lookups whose run ended for a reason that the gateway gave",
    "requests_short": "prompts shorter than a chunk",
    "requests_not_served": "requests of a kind that the adapter does not serve",
    "adapters_refused": "requests whose LoRA adapter cannot be identified",
    "hits_declined": "hits that were not loaded, because to compute them is faster",
    "tokens_planned": "tokens that were to be loaded",
    "tokens_loaded": "tokens that were loaded",
    "tokens_public": "tokens, among those that were loaded, that came from a public namespace",
    "tokens_lost": "tokens that did not arrive and were computed",
    "tokens_stored": "tokens that the gateway has after a store",
    "load_outages": "loads that the gateway did not answer",
    "loads_failed": "loads that ended in an error of the adapter",
    "chunks_lost": "chunks that were found, and gone or damaged when they were read",
    "store_outages": "stores that the gateway did not answer",
    "stores_cut_short": "stores that the end of the engine cut short",
    "chunks_refused": "chunks that the gateway did not take",
    "chunks_dropped": "chunks that found no memory on their way out",
}
"""Every counter, and what it counts."""

GAUGES: Final = {
    "load_bytes_per_second": "bytes of chunks that arrive in a second of a load, waiting included",
    "prefill_tokens_per_second": "tokens of a prompt that the engine computes in a second",
}
"""Every gauge, and what it shows. Those of the guard `kvgw.engines.breakeven`, once it can decide."""


class Counters:
    """Counts and gauges of one process, by the names in `COUNTERS` and `GAUGES`. Any thread may call it."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._total: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()
        self._shown: dict[str, float] = {}
        self._told: set[tuple[str, str]] = set()

    def add(self, name: str, count: int = 1) -> None:
        """Add `count` to the counter `name`."""
        assert name in COUNTERS, name
        with self._lock:
            self._total[name] += count

    def reason(self, name: str, sentence: str, count: int = 1) -> None:
        """Add to the counter `name`, and log `sentence` as a warning if it was not logged before."""
        assert name in COUNTERS, name
        with self._lock:
            self._total[name] += count
            new = (name, sentence) not in self._told and len(self._told) < _REASONS_MAX
            if new:
                self._told.add((name, sentence))
        if new:
            self._logger.warning("kvgw: %s: %s", name, sentence)

    def show(self, name: str, value: float | None) -> None:
        """Set the gauge `name`; None leaves it as it is."""
        assert name in GAUGES, name
        if value is not None:
            with self._lock:
                self._shown[name] = value

    @property
    def gauges(self) -> dict[str, float]:
        """Every gauge that was set."""
        with self._lock:
            return dict(self._shown)

    def total(self, name: str) -> int:
        """Everything that was added to a counter."""
        with self._lock:
            return self._total[name]

    def take(self) -> dict[str, int]:
        """What was added since the last call, without zeros."""
        with self._lock:
            new = self._total - self._taken
            self._taken = self._total.copy()
        return dict(new)
