"""What a run tells its own child processes; what they answer is of `kvgw.bench.protocol`."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from kvgw.bench.plan import Limit, Op
from kvgw.bench.protocol import Check, Prepare


class OpenPeer(Struct, frozen=True, tag_field="do", tag="open"):
    """First command: connect, and take the memory that the largest case needs. Answered by `Done`."""

    subject: str
    """A name in `tests.bench_peers.peers`."""
    where: str
    """What the subject needs to find its server."""
    stored_bytes: int
    call_bytes: int


class MeasurePeer(Struct, frozen=True, tag_field="do", tag="measure"):
    """Do an operation with what was prepared. Answered by `Measured`."""

    op: Op


class ForgetPeer(Struct, frozen=True, tag_field="do", tag="forget"):
    """Delete what was stored in this round. Answered by `Done`."""


PeerCommand: TypeAlias = OpenPeer | Prepare | MeasurePeer | Check | ForgetPeer


class MeasureMachine(Struct, frozen=True, tag_field="do", tag="machine"):
    """Measure the machine, its disk in a folder. Answered by `Machine`."""

    folder: str


class Machine(Struct, frozen=True, tag_field="is", tag="machine"):
    """Limits by building block, and a question with its answer by kind of socket, in µs."""

    limits: dict[str, Limit]
    round_trips_us: dict[str, float]


class SegmentReady(Struct, frozen=True, tag_field="is", tag="segment"):
    """Mooncake's memory is there."""
