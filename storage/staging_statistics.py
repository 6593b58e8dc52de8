"""What staging tells about itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

from storage.arena import ZoneStatistics
from storage.pool import Pool
from storage.resident import State


@dataclass(frozen=True, slots=True)
class StagingStatistics:
    """Bytes are reserved bytes: what was asked for, rounded up to size classes."""

    windows: ZoneStatistics
    residents: ZoneStatistics
    resident_blobs: int
    """Blobs that can be found by name, those being filled included."""
    draft_bytes: int
    filling_bytes: int
    clean_bytes: int
    dirty_bytes: int
    gone_bytes: int
    """Dropped or failed, and still in use."""
    evictable_bytes: int
    """Part of `clean_bytes` that nobody uses."""
    tenant_bytes: Mapping[UUID, int]
    """What each tenant holds that cannot be evicted: windows, drafts, dirty residents, residents being read."""
    waiters: int
    oldest_wait_s: float
    lingering: int
    """Brackets that have ended while a call still uses their view: not zero for long is a bug."""
    hits: int
    fills: int
    joins: int
    evictions: int


def gather(pool: Pool, *, now_s: float, lingering: int) -> StagingStatistics:
    """Read a pool's books at `now_s` seconds of its clock."""
    bytes_in = pool.residents.bytes_in
    lines = (pool.windows, pool.reads, pool.drafts)
    oldest = [line.oldest for line in lines if line.oldest is not None]
    return StagingStatistics(
        windows=pool.window_zone.statistics(),
        residents=pool.resident_zone.statistics(),
        resident_blobs=len(pool.residents),
        draft_bytes=bytes_in[State.DRAFT],
        filling_bytes=bytes_in[State.FILLING],
        clean_bytes=bytes_in[State.CLEAN],
        dirty_bytes=bytes_in[State.DIRTY],
        gone_bytes=bytes_in[State.GONE],
        evictable_bytes=pool.residents.eviction.candidate_bytes,
        tenant_bytes=Counter(pool.window_ledger.holders()) + Counter(pool.used_ledger.holders()),
        waiters=sum(len(line) for line in lines),
        oldest_wait_s=now_s - min(oldest) if oldest else 0.0,
        lingering=lingering,
        hits=pool.counts.hits,
        fills=pool.counts.fills,
        joins=pool.counts.joins,
        evictions=pool.residents.eviction.evicted,
    )
