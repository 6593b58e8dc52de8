"""Values of the control plane: who, where, and what the catalog knows of chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import UUID

DURABILITIES: Final = ("staged", "nvme", "s3")
"""In rising order of what they promise."""


def reached(*, on_nvme: bool, on_s3: bool) -> str:
    """The durability of a chunk that is in these tiers."""
    return "s3" if on_s3 else "nvme" if on_nvme else "staged"


def suffices(durability: str, asked: str) -> bool:
    """Whether `durability` promises at least what `asked` does."""
    return DURABILITIES.index(durability) >= DURABILITIES.index(asked)


@dataclass(frozen=True, slots=True, order=True)
class Scope:
    """A namespace of a tenant: the unit of isolation, keys, quota and policy."""

    tenant: UUID
    namespace: UUID

    def __hash__(self) -> int:
        return hash(
            self.namespace
        )  # random as it is; a UUID's hash is a call into Python, and this is a key everywhere


@dataclass(frozen=True, slots=True)
class Node:
    """This gateway process: its node (a machine's disk) and this run of it."""

    node: str
    boot: str
    alone: str = ""
    """Why it must be the only one on its catalog, if it must."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace with its policy."""

    scope: Scope
    name: str
    state: str
    durability: str
    default_ttl_ms: int
    max_ttl_ms: int
    sliding_ttl: bool
    epoch: int
    min_decrypt_epoch: int
    min_encrypt_epoch: int
    deletion_allowed: bool
    visibility: str
    readers: str
    over_quota: str
    hold_bytes: int
    nvme_bytes: int
    requests_per_second: int
    bytes_per_second: int
    concurrent_requests: int


@dataclass(frozen=True, slots=True)
class FormatRow:
    """A KV format that a namespace knows."""

    format_id: int
    fingerprint: bytes
    chunk_bytes: int
    tokens_per_chunk: int
    canonical: bytes


class FoundChunk(NamedTuple):
    """A visible entry with everything that is needed to read its chunk: one for each row of a look-up, so a tuple."""

    format_id: int
    entry_key: bytes
    ttl_ms: int
    expires_ms: int
    blob_id: bytes
    chunk_id: bytes
    salt: bytes
    tag_root: bytes
    epoch: int
    seg_log2: int
    length: int
    sealed_length: int
    created_ms: int
    at_home: bool
    """Still in this gateway's staging, even if no tier has it yet."""
    on_nvme: bool
    on_s3: bool

    @property
    def durability(self) -> str:
        """What its placements give it now."""
        return reached(on_nvme=self.on_nvme, on_s3=self.on_s3)


@dataclass(frozen=True, slots=True)
class Usage:
    """Counters and limits of one quota row."""

    limit_bytes: int
    limit_objects: int
    limit_s3_bytes: int
    stored_bytes: int
    objects: int
    s3_bytes: int

    @property
    def limits(self) -> tuple[int, int, int]:
        """Bytes, objects, bytes in S3."""
        return self.limit_bytes, self.limit_objects, self.limit_s3_bytes
