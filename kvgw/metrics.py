"""Metrics in Prometheus' format. Label values come from closed lists, so that the number of series is bounded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvgw.errors import KvgwError
from kvgw.model import Request

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """All metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvgw_requests", "Requests by operation and result code.", ["op", "code"], registry=self.registry
        )
        self.request_seconds = Histogram(
            "kvgw_request_seconds", "Time to answer a request.", ["op"], buckets=_SECONDS, registry=self.registry
        )
        self.match_keys = Counter(
            "kvgw_match_keys", "Keys asked for in matches, by outcome.", ["outcome"], registry=self.registry
        )
        self.get_chunks = Counter(
            "kvgw_get_chunks", "Chunks asked for in GETs, by outcome.", ["outcome"], registry=self.registry
        )
        self.get_bytes = Counter(
            "kvgw_get_bytes", "Plaintext bytes delivered, by the tier that had them.", ["tier"], registry=self.registry
        )
        self.put_bytes = Counter("kvgw_put_bytes", "Plaintext bytes of chunks stored.", registry=self.registry)
        self.refused_blobs = Counter(
            "kvgw_refused_blobs",
            "Blobs that were not what their row says, by tier and check.",
            ["tier", "check"],
            registry=self.registry,
        )
        self.tier_failures = Counter(
            "kvgw_tier_failures",
            "Operations that a tier failed, by tier and operation.",
            ["tier", "op"],
            registry=self.registry,
        )
        self.orphans = Counter(
            "kvgw_orphans", "Blobs left for the orphan sweep, by tier.", ["tier"], registry=self.registry
        )
        self.aborts_failed = Counter(
            "kvgw_aborts_failed", "Reservations left to their lease because an abort failed.", registry=self.registry
        )
        self.maintenance_failures = Counter(
            "kvgw_maintenance_failures",
            "Maintenance runs that ended in an error, by job.",
            ["job"],
            registry=self.registry,
        )
        self.written_back = Counter(
            "kvgw_written_back_bytes",
            "Sealed bytes written by write-back and promotion, by tier.",
            ["tier"],
            registry=self.registry,
        )
        self.swept = Counter(
            "kvgw_swept_blobs", "Blobs deleted by the sweep, by tier.", ["tier"], registry=self.registry
        )
        self.ended = Counter("kvgw_ended_entries", "Entries that ended, by reason.", ["reason"], registry=self.registry)
        self.outbox = Gauge(
            "kvgw_outbox_blobs", "Blobs waiting to be written into a tier.", ["tier"], registry=self.registry
        )
        self.outbox_seconds = Gauge(
            "kvgw_outbox_seconds", "Age of the oldest blob waiting to be written.", ["tier"], registry=self.registry
        )
        self.tier_bytes = Gauge("kvgw_tier_bytes", "Bytes of blobs in a local tier.", ["tier"], registry=self.registry)
        self.tier_up = Gauge(
            "kvgw_tier_up",
            "1 when the tier takes writes, 0 when it is full or fails.",
            ["tier"],
            registry=self.registry,
        )
        self.staging_bytes = Gauge(
            "kvgw_staging_bytes", "Bytes of staging, by what holds them.", ["kind"], registry=self.registry
        )
        self.connections = Gauge("kvgw_connections", "Open client connections.", registry=self.registry)
        self.clock_behind = Gauge(
            "kvgw_clock_behind_seconds", "By how much the clock is behind the catalog's.", registry=self.registry
        )

    @contextmanager
    def measured(self, request: Request) -> Iterator[None]:
        """Count and time one request."""
        op = type(request).__name__.removesuffix("Request").lower()
        started = time.perf_counter()
        code = "ok"
        try:
            yield
        except KvgwError as error:
            code = error.code.value
            raise
        except BaseException:
            code = "cancelled"
            raise
        finally:
            self.requests.labels(op, code).inc()
            self.request_seconds.labels(op).observe(time.perf_counter() - started)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)
