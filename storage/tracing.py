"""Traces: whatever a tier still holds of a blob or of a namespace, found without the tier's own bookkeeping.

A tier answers for the blobs that it knows. Whoever proves a deletion asks another question: is there anything left,
be it an old version, a marker, an upload that was never completed, a file that was being written, or a stranger?
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol
from uuid import UUID

TraceKind = Literal["blob", "version", "marker", "upload", "unfinished", "stranger"]


@dataclass(frozen=True, slots=True)
class Trace:
    """Something that is there. `name` is a blob's name, or says where the thing lies."""

    kind: TraceKind
    name: str
    version: str = ""
    """Of a version or an upload: its id in the tier."""
    head: bytes = b""
    """Of an unfinished file: its first bytes."""


class Tracer(Protocol):
    """Looks through one tier."""

    label: str
    method: str
    """What a look consists of, as receipts say it."""

    def traces(self, prefix: str) -> AsyncIterator[Trace]:
        """Everything below a namespace's prefix (`namespace_prefix`), or of one blob (its name).

        Unfinished files are listed whatever the prefix: their names may not tell. Raises `TierUnavailable`.
        """
        ...

    async def clear(self, traces: Sequence[Trace]) -> None:
        """Remove what no deletion of blobs removes: strangers, and uploads that were never completed."""
        ...


def namespace_prefix(namespace: UUID) -> str:
    """What the names of all blobs of a namespace begin with."""
    return f"v1/{namespace}/"
