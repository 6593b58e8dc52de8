"""What is measured, in which order, and what comes out. Pure. Sizes in bytes; GB are 10**9 bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from msgspec import Struct

from kvgw.bench.plan import KIB, MATCH_KEYS, MATCH_STORED_BYTES, MIB, Case, Limit, TransportName

Tier = Literal["memory", "postgres", "nvme", "s3"]
"""Where chunks lie: what a PUT has reached when it returns, and what a GET reads from. And where the catalog lies when
several gateways have it; elsewhere it is SQLite."""

TRANSPORTS: Final = tuple(name for name in ("unix", "shm", "tcp") if name in get_args(TransportName))
"""The gateway's, as far as `kvgw bench` knows them."""

CASES: Final[Mapping[Tier, tuple[Case, ...]]] = {
    "memory": (
        Case(4 * MIB, 16, 4, ("put", "get")),
        Case(64 * KIB, 64, 16, ("put", "get")),
        Case(MATCH_STORED_BYTES, MATCH_KEYS, 1, ("match64",)),
    ),
    "postgres": (Case(MATCH_STORED_BYTES, MATCH_KEYS, 1, ("match64",)),),
    "nvme": (Case(4 * MIB, 16, 4, ("put", "get")),),
    "s3": (Case(16 * MIB, 8, 3, ("put", "get")),),
}
"""By tier, what each system there stores, reads and finds in one round."""


@dataclass(frozen=True)
class Step:
    """One system doing one case in one round. Round 0 warms up and is not counted."""

    round: int
    case: Case
    system: str


def schedule(rounds: int, tiers: Mapping[Tier, Sequence[str]]) -> Iterator[Step | int]:
    """All steps, systems side by side inside each case; after each round its number: then the machine is measured.

    Who comes first changes from round to round, and so does the direction: whatever a neighbour leaves in caches and
    queues meets each system.
    """
    for number in range(rounds + 1):
        for tier, systems in tiers.items():
            for case in CASES[tier]:
                yield from (Step(number, case, system) for system in turned(systems, number))
        yield number


def turned(systems: Sequence[str], number: int) -> list[str]:
    """The systems from another one on in each round, every second round backwards."""
    at = (number // 2) % len(systems) if systems else 0
    order = [*systems[at:], *systems[:at]]
    return order[::-1] if number % 2 else order


class Row(Struct, frozen=True):
    """One system, one operation, one chunk length. None where a figure has no meaning or cannot be had."""

    system: str
    version: str
    op: str
    transport: str
    tier: str
    chunk_bytes: int
    """0 for match64, which moves no chunk."""
    batch: int
    rounds: int
    calls: int
    """Calls in all rounds: what the percentiles are of."""
    gb_per_s: float | None
    """Median of the rounds."""
    p50_us: float
    p99_us: float
    gateway_cpu_s_per_gb: float | None
    """The server's until it answered. None where nothing stands between the client and S3."""
    later_cpu_s_per_gb: float | None
    """The server's own after the PUTs returned, until it was quiet: write-back that was still due."""
    client_cpu_s_per_gb: float | None
    limit: str | None
    """What bounds the operation: a name in `limits` or, for match64, in `round_trips_us`."""
    limit_share: float | None
    """Of the limit's GB/s; for match64 the round trip over the median call."""
    cpu_share: float | None
    """CPU time that the building blocks alone would cost the server, over what it used."""


class Report(Struct, frozen=True):
    """What ``--json`` writes."""

    rows: list[Row]
    limits: dict[str, Limit]
    round_trips_us: dict[str, float]
    machine: dict[str, str | int | float | list[float]]
    load_by_round: list[float]
    """Load average over the last minute, after each round."""
    rounds: int
    seconds: float
    """The whole run, environments and servers included."""
    notes: list[str]
    """What is absent, and why."""
