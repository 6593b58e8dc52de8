"""What is measured, and what comes out. Sizes in bytes; GB are 10**9 bytes; CPU time in seconds of one core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from kvgw.errors import KvgwError
from kvgw.kvformat import CHUNK_BYTES_MAX
from kvgw.model import KEYS_MAX, Durability

KIB: Final = 1024
MIB: Final = 1024 * KIB

Op: TypeAlias = Literal["put", "get", "match64"]
SystemName: TypeAlias = Literal["kvgw", "redis"]
TransportName: TypeAlias = Literal["unix", "shm", "tcp"]
SocketName: TypeAlias = Literal["unix", "tcp"]

CHUNK_BYTES_DEFAULT: Final = (4 * MIB, 64 * KIB)
BATCH_BYTES_DEFAULT: Final = 64 * MIB
BATCH_DEFAULT_MAX: Final = 64
"""Without ``--batch`` a call moves 64 MiB, in at most so many chunks."""
ROUND_BYTES_DEFAULT: Final = 256 * MIB
CALLS_MAX: Final = 32
"""Calls of one client in one round: with small chunks a round would otherwise last for minutes."""

MATCH_KEYS: Final = 64
MATCH_CALLS: Final = 100
MATCH_STORED_BYTES: Final = 4 * KIB
"""Length of the chunks that match64 finds; their bytes play no part in it."""


def socket_of(transport: TransportName) -> SocketName:
    """The socket behind a transport: windows of shared memory are lent over a Unix socket."""
    return "unix" if transport == "shm" else transport


class BenchError(KvgwError):
    """The measurement cannot go on; the sentence says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asks for, checked. Raises `BenchError` naming the option that cannot be."""

    chunk_bytes: tuple[int, ...] = CHUNK_BYTES_DEFAULT
    batch: int | None = None
    """Chunks in one call; None: what fits 64 MiB, at most 64."""
    clients: int = 1
    namespaces: int = 1
    """Clients are spread evenly over so many namespaces."""
    transport: TransportName = "unix"
    durability: Durability = Durability.STAGED
    rounds: int = 9
    round_bytes: int = ROUND_BYTES_DEFAULT
    """Payload that one client moves in one round, as near as whole calls come to it."""
    endpoint: str | None = None
    """A running gateway; None: one of our own on a temporary data folder."""
    token: str | None = None
    redis: bool | None = None
    """None: if it is installed."""

    def __post_init__(self) -> None:
        for name, least in (("clients", 1), ("namespaces", 1), ("rounds", 1), ("round_bytes", 1)):
            if getattr(self, name) < least:
                raise BenchError(f"--{name.replace('_', '-')} is at least {least}, not {getattr(self, name)}")
        if not self.chunk_bytes:
            raise BenchError("--chunk-bytes needs at least one length")
        for length in self.chunk_bytes:
            if not 1 <= length <= CHUNK_BYTES_MAX:
                raise BenchError(f"--chunk-bytes is from 1 to {CHUNK_BYTES_MAX}, not {length}")
        if self.batch is not None and not 1 <= self.batch <= KEYS_MAX:
            raise BenchError(f"--batch is from 1 to {KEYS_MAX} chunks, not {self.batch}")
        if self.namespaces > self.clients:
            raise BenchError(f"--namespaces {self.namespaces} needs at least as many --clients, not {self.clients}")
        if self.durability is Durability.S3 and self.endpoint is None:
            raise BenchError("--durability s3 needs --endpoint: the gateway that bench starts itself has no S3 tier")

    def public(self) -> dict[str, str | int | list[int] | None]:
        """What a report tells of the options: all but the token."""
        return {
            "chunk_bytes": list(self.chunk_bytes),
            "batch": self.batch,
            "clients": self.clients,
            "namespaces": self.namespaces,
            "transport": self.transport,
            "durability": self.durability.value,
            "rounds": self.rounds,
            "round_bytes": self.round_bytes,
            "endpoint": self.endpoint,
        }

    def cases(self) -> tuple[Case, ...]:
        """One case for each chunk length, and one for match64."""
        moving = tuple(self._moving(length) for length in dict.fromkeys(self.chunk_bytes))
        return (*moving, Case(MATCH_STORED_BYTES, MATCH_KEYS, 1, ("match64",)))

    def _moving(self, chunk_bytes: int) -> Case:
        batch = self.batch or max(1, min(BATCH_DEFAULT_MAX, BATCH_BYTES_DEFAULT // chunk_bytes))
        calls = max(1, min(CALLS_MAX, self.round_bytes // (batch * chunk_bytes)))
        return Case(chunk_bytes, batch, calls, ("put", "get"))


@dataclass(frozen=True, slots=True)
class Case:
    """Operations over chunks of one length: `calls` calls of `batch` chunks are stored, measured or not."""

    chunk_bytes: int
    batch: int
    calls: int
    ops: tuple[Op, ...]

    @property
    def call_bytes(self) -> int:
        """Payload of one PUT or GET."""
        return self.batch * self.chunk_bytes

    @property
    def stored_bytes(self) -> int:
        """Payload that one client stores in one round."""
        return self.calls * self.call_bytes


@dataclass(frozen=True, slots=True)
class Sample:
    """One operation in one round: all clients together."""

    seconds: float
    """From the first client's start to the last one's end."""
    payload_bytes: int
    call_us: tuple[float, ...]
    server_cpu_s: float | None
    """None where the server's process is not known: a gateway behind TCP."""
    client_cpu_s: float
    later_cpu_s: float | None = None
    """The server's own until it was quiet again, after a PUT: write-back."""


class Limit(Struct, frozen=True):
    """What one building block does on this machine."""

    gb_per_s: float
    gb_per_cpu_s: float


class Row(Struct, frozen=True):
    """One system, one operation, one chunk length. None where a figure has no meaning or cannot be had."""

    system: str
    version: str
    op: str
    transport: str
    chunk_bytes: int
    """0 for match64, which moves no chunk."""
    batch: int
    clients: int
    rounds: int
    calls: int
    """Calls in all rounds and of all clients: what the percentiles are of."""
    gb_per_s: float | None
    """Median of the rounds."""
    p50_us: float
    p99_us: float
    gateway_cpu_s_per_gb: float | None
    later_cpu_s_per_gb: float | None
    """The gateway's own after the PUTs returned, until it was quiet again: write-back that was still due."""
    client_cpu_s_per_gb: float | None
    gateway_cpu_us_per_call: float | None
    client_cpu_us_per_call: float
    socket_share: float | None
    """Of the GB/s that two threads move through a socket of this kind; of a Unix socket where memory is shared."""
    cpu_share: float | None
    """CPU time that the building blocks alone would cost the server, over what it used."""


class Report(Struct, frozen=True):
    """What ``--json`` writes."""

    rows: list[Row]
    limits: dict[str, Limit]
    machine: dict[str, str | int | float | list[float]]
    options: dict[str, str | int | list[int] | None]
    notes: list[str]
