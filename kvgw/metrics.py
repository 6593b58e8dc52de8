"""Metrics in Prometheus' format. Label values come from closed lists, so that the number of series is bounded."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvgw.errors import KvgwError
from kvgw.model import Request

OK: Final = "ok"
"""Code of a request that was answered and not refused."""

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """All metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._count_requests()
        self._count_chunks()
        self._count_maintenance()
        self._gauge()

    def _count_requests(self) -> None:
        self.requests = self._counter("requests", "Requests by operation and result code.", "op", "code")
        self.request_seconds = Histogram(
            "kvgw_request_seconds", "Time to answer a request.", ["op"], buckets=_SECONDS, registry=self.registry
        )
        self._answers: dict[tuple[type[Request], str], tuple[Counter, Histogram]] = {}
        """Children by request and code, both from closed lists: to find one by its labels costs more than to count."""
        self.limited = self._counter("limited", "Requests turned away by a rate limit, by its kind.", "limit")
        self.match_keys = self._counter("match_keys", "Keys asked for in matches, by outcome.", "outcome")
        self.match_hits, self.match_misses = self.match_keys.labels("hit"), self.match_keys.labels("miss")
        self.held_puts = self._counter(
            "held_puts", "PUTs that waited for a tier's outbox, by tier and outcome.", "tier", "outcome"
        )
        self.shared_windows = self._counter(
            "shared_windows", "Windows that clients of this host asked for, by outcome.", "outcome"
        )
        self.aborts_failed = self._counter("aborts_failed", "Reservations left to their lease as an abort failed.")

    def _count_chunks(self) -> None:
        self.get_chunks = self._counter("get_chunks", "Chunks asked for in GETs, by outcome.", "outcome")
        self.get_bytes = self._counter("get_bytes", "Plaintext bytes delivered, by the tier that had them.", "tier")
        self.put_bytes = self._counter("put_bytes", "Plaintext bytes of chunks stored.")
        self.refused_blobs = self._counter(
            "refused_blobs", "Blobs that were not what their row says, by tier and check.", "tier", "check"
        )
        self.tier_failures = self._counter("tier_failures", "Operations that a tier failed.", "tier", "op")

    def _count_maintenance(self) -> None:
        self.maintenance_failures = self._counter("maintenance_failures", "Maintenance runs that failed.", "task")
        self.written_back = self._counter(
            "written_back_bytes", "Sealed bytes written by write-back and promotion, by tier.", "tier"
        )
        self.swept = self._counter("swept_blobs", "Blobs deleted by the sweep, by tier.", "tier")
        self.orphans = self._counter("orphans", "Blobs left for the orphan sweep, by tier.", "tier")
        self.scrubbed = self._counter("scrubbed_bytes", "Sealed bytes that a scrub read and opened, by tier.", "tier")
        self.scrub_damaged = self._counter(
            "scrub_damaged_blobs", "Blobs that a scrub found damaged or missing, by tier.", "tier"
        )
        self.ended = self._counter("ended_entries", "Entries that ended, by reason.", "reason")
        self.coherence_seconds = Histogram(
            "kvgw_coherence_wait_seconds",
            "Time that ends waited, committed, until no other gateway remembered what they ended.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.coherence_lapsed = self._counter(
            "coherence_lapsed", "Ends that waited until the lease of another gateway was over."
        )

    def _gauge(self) -> None:
        self.outbox = self._gauge_of("outbox_blobs", "Blobs waiting to be written into a tier.", "tier")
        self.outbox_seconds = self._gauge_of("outbox_seconds", "Age of the oldest blob waiting to be written.", "tier")
        self.tier_bytes = self._gauge_of("tier_bytes", "Bytes of blobs in a local tier.", "tier")
        self.tier_up = self._gauge_of("tier_up", "1 when the tier takes writes, 0 when it is full or fails.", "tier")
        self.staging_bytes = self._gauge_of("staging_bytes", "Bytes of staging, by what holds them.", "kind")
        self.shared_window_bytes = self._gauge_of("shared_window_bytes", "Bytes of windows shared with clients.")
        self.match_leases = self._gauge_of("match_leases", "Blobs that a match keeps from eviction for a moment.")
        self.connections = self._gauge_of("connections", "Open client connections.")
        self.turns_waiting = self._gauge_of("turns_waiting", "Requests that were let in and wait for their turn.")
        self.clock_behind = self._gauge_of("clock_behind_seconds", "By how much the clock is behind the catalog's.")
        self.catalog_log_bytes = self._gauge_of(
            "catalog_log_bytes", "Bytes of SQLite's write-ahead log; 0 where the catalog is on PostgreSQL."
        )

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"kvgw_{name}", what, labels, registry=self.registry)

    def _gauge_of(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"kvgw_{name}", what, labels, registry=self.registry)

    @staticmethod
    def total(counter: Counter) -> int:
        """What a counter came to since the start, over all its labels."""
        samples = [sample for family in counter.collect() for sample in family.samples]
        return int(sum(sample.value for sample in samples if sample.name.endswith("_total")))

    def measured(self, request: Request) -> Measured:
        """Count and time one request, as a block: ``with metrics.measured(request): ...``."""
        return Measured(self, type(request))

    def answered(self, kind: type[Request], code: str, seconds: float) -> None:
        """A request of this kind was answered."""
        count, took = self._answer(kind, code)
        count.inc()
        took.observe(seconds)

    def turned_away(self, kind: type[Request], code: str) -> None:
        """A request of this kind was answered before it began; that it took no time says nothing of the others."""
        self._answer(kind, code)[0].inc()

    def _answer(self, kind: type[Request], code: str) -> tuple[Counter, Histogram]:
        known = self._answers.get((kind, code))
        if known is None:
            op = kind.__name__.removesuffix("Request").lower()
            known = self._answers[kind, code] = self.requests.labels(op, code), self.request_seconds.labels(op)
        return known

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


class Measured:
    """One request; see `Metrics.measured`."""

    __slots__ = ("_kind", "_metrics", "_started")

    def __init__(self, metrics: Metrics, kind: type[Request]) -> None:
        self._metrics = metrics
        self._kind = kind

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = OK
        if error is not None:
            code = error.code.value if isinstance(error, KvgwError) else "cancelled"
        self._metrics.answered(self._kind, code, time.perf_counter() - self._started)
