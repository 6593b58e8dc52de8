"""What the bench tells its client processes, and what they answer: one JSON line each, one answer to a command."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from kvgw.bench.plan import Limit, Op, SystemName, TransportName
from kvgw.model import Durability


class Open(Struct, frozen=True, tag_field="do", tag="open"):
    """First command: connect, and take the memory that the largest case needs. Answered by `Done`."""

    endpoint: str
    token: str | None
    namespace: str
    durability: Durability
    redis: str
    """Endpoint of Redis; empty: none."""
    stored_bytes: int
    """Largest payload of a round."""
    call_bytes: int
    """Largest payload of a call."""
    shared_memory: bool
    """Payloads lie in windows that the gateway lends."""


class Prepare(Struct, frozen=True, tag_field="do", tag="prepare"):
    """New keys and new content for a round of a case. Answered by `Done`."""

    chunk_bytes: int
    batch: int
    calls: int


class Measure(Struct, frozen=True, tag_field="do", tag="measure"):
    """Do an operation with what was prepared. Answered by `Measured`."""

    system: SystemName
    op: Op


class Check(Struct, frozen=True, tag_field="do", tag="check"):
    """Compare a sample of what the last GET read with what was stored. Answered by `Done`."""


class Forget(Struct, frozen=True, tag_field="do", tag="forget"):
    """Delete what was stored in this round. Answered by `Done`."""

    system: SystemName


class MeasureLimits(Struct, frozen=True, tag_field="do", tag="limits"):
    """Measure the machine. Answered by `MachineLimits`."""

    transport: TransportName


Command: TypeAlias = Open | Prepare | Measure | Check | Forget | MeasureLimits


class Done(Struct, frozen=True, tag_field="is", tag="done"):
    """It was done."""


class Measured(Struct, frozen=True, tag_field="is", tag="measured"):
    """Times of the system's monotonic clock, which all processes share, in seconds; one duration for each call."""

    started_s: float
    ended_s: float
    call_us: list[float]


class MachineLimits(Struct, frozen=True, tag_field="is", tag="limits"):
    """By building block."""

    limits: dict[str, Limit]


class Failed(Struct, frozen=True, tag_field="is", tag="failed"):
    """In place of any answer: a sentence that says why."""

    message: str
