"""What a replay measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from kvgw.bench.report import percentile
from kvgw.replay.ideal import Ideal
from kvgw.replay.trace import BLOCK_TOKENS


@dataclass(slots=True)
class Tally:
    """What one tenant's replay counted; seconds are of calls."""

    requests: int = 0
    tokens: int = 0
    blocks: int = 0
    matched: int = 0
    read: int = 0
    stored: int = 0
    refused: int = 0
    wrong: int = 0
    outages: int = 0
    late_s: float = 0.0
    """How far the replay was behind the trace's own time at most."""
    tiers: Counter[str] = field(default_factory=Counter)
    match_s: list[float] = field(default_factory=list)
    get_s: list[float] = field(default_factory=list)
    put_s: list[float] = field(default_factory=list)


class Latency(Struct, frozen=True):
    """Of one kind of call, in milliseconds."""

    calls: int
    p50_ms: float
    p99_ms: float


class ReplayReport(Struct, frozen=True):
    """What ``--json`` writes. Shares are of blocks, a block being 512 tokens."""

    requests: int
    tokens: int
    blocks: int
    reused: int
    """Blocks that were read back whole."""
    share: float
    infinite_share: float
    """What a cache without end would have reused, of the same requests divided in the same way."""
    stored: int
    refused: int
    """Blocks that the gateway did not take: over quota, or busy."""
    wrong: int
    """Blocks that came back with other bytes. Anything but 0 is a fault of the gateway."""
    outages: int
    evicted: int
    bytes_by_tier: dict[str, int]
    """Bytes read, by the tier that had them."""
    calls: dict[str, Latency]
    seconds: float
    late_s: float
    prefill_seconds_saved: float
    """At the rate that was given, less the time of the look-ups and reads that brought them."""


def report_of(
    tallies: Sequence[Tally],
    ideals: Iterable[Ideal],
    *,
    evicted: int,
    seconds: float,
    chunk_bytes: int,
    prefill_tokens_per_s: float,
) -> ReplayReport:
    """All tenants together."""
    perfect = [(one.blocks, one.reused) for one in ideals]
    blocks = sum(one.blocks for one in tallies)
    reused = sum(one.read for one in tallies)
    tiers: Counter[str] = Counter()
    for one in tallies:
        tiers.update(one.tiers)
    spent = sum(sum(one.match_s) + sum(one.get_s) for one in tallies)
    return ReplayReport(
        requests=sum(one.requests for one in tallies),
        tokens=sum(one.tokens for one in tallies),
        blocks=blocks,
        reused=reused,
        share=reused / blocks if blocks else 0.0,
        infinite_share=sum(found for _, found in perfect) / max(1, sum(asked for asked, _ in perfect)),
        stored=sum(one.stored for one in tallies),
        refused=sum(one.refused for one in tallies),
        wrong=sum(one.wrong for one in tallies),
        outages=sum(one.outages for one in tallies),
        evicted=evicted,
        bytes_by_tier={tier: count * chunk_bytes for tier, count in sorted(tiers.items())},
        calls={
            "match": _latency([second for one in tallies for second in one.match_s]),
            "get": _latency([second for one in tallies for second in one.get_s]),
            "put": _latency([second for one in tallies for second in one.put_s]),
        },
        seconds=seconds,
        late_s=max((one.late_s for one in tallies), default=0.0),
        prefill_seconds_saved=reused * BLOCK_TOKENS / prefill_tokens_per_s - spent,
    )


def _latency(seconds: list[float]) -> Latency:
    if not seconds:
        return Latency(0, 0.0, 0.0)
    ordered = sorted(seconds)
    return Latency(len(ordered), percentile(ordered, 0.50) * 1000, percentile(ordered, 0.99) * 1000)
