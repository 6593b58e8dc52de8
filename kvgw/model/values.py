"""Bounds, names and outcomes that the requests and answers share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, TypeAlias

from msgspec import Meta, Struct

KEYS_MAX: Final = 4096
"""Keys in one request."""
FORMATS_MAX: Final = 64
"""Formats in one match: one per rank of a parallel engine."""
PUBLIC_MAX: Final = 4
"""Public namespaces that one request may look into."""
LABELS_MAX: Final = 16
DEADLINE_MS_MAX: Final = 240_000
"""A request holds memory and a reservation for no longer, whatever becomes of its client. Below the shortest time in
which a blob that no row points at yet becomes an orphan (``maintenance.nvme_orphan_grace_seconds``)."""
BATCH_BYTES_MAX: Final = 4 * 1024 * 1024 * 1024
"""Payload bytes in one request."""

EngineKey: TypeAlias = Annotated[bytes, Meta(min_length=1, max_length=64)]
EngineKeys: TypeAlias = Annotated[list[EngineKey], Meta(min_length=1, max_length=KEYS_MAX)]
Fingerprint: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]
NamespaceName: TypeAlias = Annotated[str, Meta(max_length=64)]
NamespaceReference: TypeAlias = Annotated[str, Meta(min_length=3, max_length=129, pattern="^[^/]+/[^/]+$")]
"""Another tenant's public namespace: ``tenant/namespace``."""
LabelText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Milliseconds: TypeAlias = Annotated[int, Meta(ge=1, le=10 * 366 * 86_400_000)]
DeadlineMs: TypeAlias = Annotated[int, Meta(ge=1, le=DEADLINE_MS_MAX)]


class Durability(StrEnum):
    """What an acknowledged chunk survives; each promises more than the one before (law 8)."""

    STAGED = "staged"
    """Nothing promised: the chunk is in memory and on its way."""
    NVME = "nvme"
    """Survives ``kill -9`` and power loss of the gateway's node."""
    S3 = "s3"
    """Survives the node."""

    @property
    def rank(self) -> int:
        return _DURABILITY_ORDER.index(self)


_DURABILITY_ORDER = (Durability.STAGED, Durability.NVME, Durability.S3)


class PutOutcome(StrEnum):
    """What became of one chunk of a PUT."""

    STORED = "stored"
    HAVE = "have"
    """Already there: nothing travelled."""
    CONFLICT = "conflict"
    """The key came into being meanwhile with other content: the first writer's stays."""
    OVER_QUOTA = "over_quota"
    FAILED = "failed"
    """Not stored because the gateway could not; the report's outage says why."""


class Outcome(StrEnum):
    """How a read call ended as a whole."""

    OK = "ok"
    OUTAGE = "outage"
    """No answer in time: treated as a miss, and said so."""


class Label(Struct, frozen=True, forbid_unknown_fields=True):
    """Something to find entries by when they must go: kind ``user`` or ``session``, and whose."""

    kind: LabelText
    value: LabelText
