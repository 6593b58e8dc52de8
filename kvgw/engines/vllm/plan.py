"""What the halves tell each other: which chunks to read into which blocks, which to store, and how long that took."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Whose:
    """Under which credential and adapter a request's chunks are kept."""

    tenant: str
    adapter: str | None = None
    adapter_digest: bytes | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Read the chunks of `keys` into `blocks`, the same number of blocks for each; leave the first `skip` alone."""

    request: str
    whose: Whose
    keys: list[bytes]
    blocks: list[int]
    skip: int
    """Leading blocks of the first chunk that the engine has already, perhaps shared with other requests."""
    public: int = 0
    """Leading `keys` that are those of a public namespace."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a worker tells of a load that ended: bytes that arrived, and how long they took, waiting included."""

    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Store:
    """Store `blocks` as the chunks of `keys`, a chain behind `parent` at `depth`."""

    whose: Whose
    keys: list[bytes]
    blocks: list[int]
    parent: bytes | None
    depth: int


@dataclass(slots=True)
class Plan:
    """One step's work for the workers."""

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
