"""What the scheduler's half tells the worker's half: which chunks to read into which blocks, and which to store."""

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
