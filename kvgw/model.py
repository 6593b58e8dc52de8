"""Values that cross the client's door: requests, answers, and the bounds that both sides check.

Requests and answers are frozen `msgspec.Struct`s, so that the wire, the embedded gateway and the client share one
definition, and lengths are checked while a message is decoded. Times are Unix milliseconds, durations milliseconds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, TypeAlias

from msgspec import Meta, Struct

from kvgw.kvformat import CANONICAL_BYTES_MAX

KEYS_MAX: Final = 4096
"""Keys in one request."""
FORMATS_MAX: Final = 64
"""Formats in one match: one per rank of a parallel engine."""
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


class RegisterRequest(Struct, frozen=True, tag_field="op", tag="register"):
    """Make a KV format known to a namespace."""

    canonical: Annotated[bytes, Meta(max_length=CANONICAL_BYTES_MAX)]
    namespace: NamespaceName = ""
    deadline_ms: DeadlineMs = 10_000


class RegisterReply(Struct, frozen=True):
    fingerprint: Fingerprint
    chunk_bytes: int
    default_ttl_ms: int


class MatchRequest(Struct, frozen=True, tag_field="op", tag="match"):
    """How many leading keys can be had, in every one of the formats?"""

    fingerprints: Annotated[list[Fingerprint], Meta(min_length=1, max_length=FORMATS_MAX)]
    keys: EngineKeys
    namespace: NamespaceName = ""
    lease_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0
    """Shields the run from eviction from NVMe for so long; ends with the next `get` of it."""
    deadline_ms: DeadlineMs = 10_000


class MatchReply(Struct, frozen=True):
    matched: int
    tiers: list[str]
    """Where each matched chunk of the first format is: ``staging``, ``nvme`` or ``s3``."""
    reason: str = ""
    """Why the run is no longer, when that is known: for example a format that is not registered."""


class PutRequest(Struct, frozen=True, tag_field="op", tag="put"):
    """Store chunks as an ordered chain: each key's parent is the one before it, the first's is `parent`."""

    fingerprint: Fingerprint
    keys: EngineKeys
    parent: EngineKey | None = None
    depth: Annotated[int, Meta(ge=0, le=2**31)] = 0
    """Chunks before the first key in its chain."""
    namespace: NamespaceName = ""
    ttl_ms: Milliseconds | None = None
    durability: Durability | None = None
    labels: Annotated[list[Label], Meta(max_length=LABELS_MAX)] = []
    deadline_ms: DeadlineMs = 30_000


class PutReply(Struct, frozen=True):
    outcomes: list[PutOutcome]
    expires_ms: int
    reason: str = ""
    """Why chunks failed or were over quota, in a sentence."""


class GetRequest(Struct, frozen=True, tag_field="op", tag="get"):
    """Read chunks; what cannot be read is a miss."""

    fingerprint: Fingerprint
    keys: EngineKeys
    namespace: NamespaceName = ""
    deadline_ms: DeadlineMs = 10_000


class Hit(Struct, frozen=True, array_like=True):
    """One chunk that was opened under its own address."""

    index: int
    tier: str
    expires_ms: int


class GetReply(Struct, frozen=True):
    hits: list[Hit]
    degraded: str = ""
    """Not empty when some miss may be due to an outage behind the gateway."""


class TouchRequest(Struct, frozen=True, tag_field="op", tag="touch"):
    """Extend the life of entries by their TTL; labels may be added."""

    fingerprint: Fingerprint
    keys: EngineKeys
    namespace: NamespaceName = ""
    ttl_ms: Milliseconds | None = None
    deadline_ms: DeadlineMs = 10_000


class TouchReply(Struct, frozen=True):
    touched: int


class DeleteRequest(Struct, frozen=True, tag_field="op", tag="delete"):
    """Make entries invisible at once, on every gateway; their bytes go after."""

    fingerprint: Fingerprint
    keys: EngineKeys
    namespace: NamespaceName = ""
    deadline_ms: DeadlineMs = 30_000


class DeleteReply(Struct, frozen=True):
    deleted: int


class StatRequest(Struct, frozen=True, tag_field="op", tag="stat"):
    """Usage of one namespace."""

    namespace: NamespaceName = ""
    deadline_ms: DeadlineMs = 10_000


class StatReply(Struct, frozen=True):
    namespace: str
    entries: int
    chunks: int
    stored_bytes: int
    limit_bytes: int
    objects: int
    limit_objects: int
    s3_bytes: int
    formats: int


class StatusRequest(Struct, frozen=True, tag_field="op", tag="status"):
    """How the gateway is: for its operator."""

    deadline_ms: DeadlineMs = 10_000


class TierStatus(Struct, frozen=True):
    """One tier. Sizes in bytes; -1 where a tier does not know."""

    tier: str
    state: str
    reason: str
    used_bytes: int
    limit_bytes: int
    outbox_blobs: int
    outbox_bytes: int
    outbox_age_ms: int


class StagingStatus(Struct, frozen=True):
    """Host memory, in bytes."""

    capacity_bytes: int
    window_bytes: int
    clean_bytes: int
    dirty_bytes: int
    free_bytes: int
    waiting: int
    locked: str


class StatusReply(Struct, frozen=True):
    version: str
    node: str
    boot: str
    catalog: str
    root_key: str
    ready: bool
    notes: list[str]
    """What an operator should know, in sentences."""
    staging: StagingStatus
    tiers: list[TierStatus]
    connections: int


class NamespaceCreateRequest(Struct, frozen=True, tag_field="op", tag="namespace_create"):
    """Make a namespace of the caller's tenant. Zero limits mean none."""

    name: NamespaceName
    durability: Durability | None = None
    default_ttl_ms: Milliseconds | None = None
    max_ttl_ms: Milliseconds | None = None
    limit_bytes: Annotated[int, Meta(ge=0, le=2**62)] = 0
    limit_objects: Annotated[int, Meta(ge=0, le=2**62)] = 0
    deadline_ms: DeadlineMs = 10_000


class NamespaceInfo(Struct, frozen=True):
    """A namespace with its policy and usage."""

    name: str
    state: str
    durability: str
    default_ttl_ms: int
    max_ttl_ms: int
    epoch: int
    usage: StatReply


class NamespacesRequest(Struct, frozen=True, tag_field="op", tag="namespaces"):
    """The namespaces of the caller's tenant."""

    deadline_ms: DeadlineMs = 10_000


class NamespacesReply(Struct, frozen=True):
    namespaces: list[NamespaceInfo]


AdminQuestion: TypeAlias = StatusRequest | NamespaceCreateRequest | NamespacesRequest
Question: TypeAlias = RegisterRequest | MatchRequest | TouchRequest | DeleteRequest | StatRequest | AdminQuestion
"""A request that is answered by one reply, without payload in either direction."""
Request: TypeAlias = PutRequest | GetRequest | Question
Reply: TypeAlias = (
    RegisterReply
    | MatchReply
    | PutReply
    | GetReply
    | TouchReply
    | DeleteReply
    | StatReply
    | StatusReply
    | NamespaceInfo
    | NamespacesReply
)
