"""The tier protocol: opaque, immutable, named blobs at one speed.

Every tier and every wrapper of a tier passes the one conformance suite (``tests/support/tier_conformance.py``).
The protocol is kept minimal for those who implement it; comfort belongs in functions over it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol
from uuid import UUID

_NAME = re.compile(r"v1/[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}/([0-9a-f]{2})/\1[0-9a-f]{30}")


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """What a listing tells of a blob: its name, its length in bytes, when it was written (Unix milliseconds)."""

    name: str
    length: int
    modified_ms: int


class Tier(Protocol):
    """A place for blobs. Names come from `blob_name` alone; a tier refuses any other with `ValueError`."""

    label: str
    """Short name of the kind of tier, ``nvme`` or ``s3``, as in placements and metrics."""

    async def put(self, name: str, sealed: memoryview) -> None:
        """Store a blob whole or not at all; durable when this returns.

        The buffer is not used after this returns or raises. The same name with the same bytes again is no error.
        Raises `TierFull` or `TierUnavailable`.
        """
        ...

    async def get_into(self, name: str, target: memoryview) -> None:
        """Fill `target` with the blob, whose length must be exactly ``len(target)``.

        Raises `BlobMissing`, `BlobDamaged` (other length, broken off) or `TierUnavailable`; the content of `target`
        is then undefined.
        """
        ...

    async def stat(self, names: Sequence[str]) -> dict[str, int]:
        """Lengths in bytes of those blobs that exist. A missing name is absent from the answer, not an error."""
        ...

    async def delete(self, names: Sequence[str]) -> None:
        """Delete blobs for good. A missing blob is no error. Raises `TierUnavailable` if any may still be there."""
        ...

    def scan(self) -> AsyncIterator[BlobInfo]:
        """All blobs, each once, in no promised order. Blobs born or deleted meanwhile may or may not be listed."""
        ...

    async def aclose(self) -> None:
        """Give back what the tier holds. Never raises; the tier is not used afterwards."""
        ...


def blob_name(namespace: UUID, blob_id: bytes) -> str:
    """The name under which tiers know a blob of 16 random bytes; no client byte reaches it."""
    if len(blob_id) != 16:
        raise ValueError(f"a blob id has 16 bytes, not {len(blob_id)}")
    digits = blob_id.hex()
    return f"v1/{namespace}/{digits[:2]}/{digits}"


def blob_names(namespace: UUID, blob_ids: bytes) -> list[str]:
    """`blob_name` of each of many, whose ids are in one piece."""
    folder, digits = f"v1/{namespace}/", blob_ids.hex()
    return [f"{folder}{digits[at : at + 2]}/{digits[at : at + 32]}" for at in range(0, len(digits), 32)]


def check_name(name: str) -> str:
    """Return `name` if `blob_name` could have made it, else raise `ValueError`."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not a blob name")
    return name


def parse_name(name: str) -> tuple[UUID, bytes]:
    """Namespace and blob id of a blob name; raises `ValueError` for anything else."""
    _, namespace, _, digits = check_name(name).split("/")
    return _namespace(namespace), bytes.fromhex(digits)


@lru_cache(maxsize=1024)
def _namespace(digits: str) -> UUID:
    """Kept, since many blobs have few namespaces and a UUID takes longer to make than all else in a name."""
    return UUID(digits)
