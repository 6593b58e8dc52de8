"""Requests about chunks, and their answers."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from kvgw.kvformat import CANONICAL_BYTES_MAX
from kvgw.model.values import (
    FORMATS_MAX,
    LABELS_MAX,
    PUBLIC_MAX,
    DeadlineMs,
    Durability,
    EngineKey,
    EngineKeys,
    Fingerprint,
    Label,
    Milliseconds,
    NamespaceName,
    NamespaceReference,
    PutOutcome,
)


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
    public: Annotated[list[NamespaceReference], Meta(max_length=PUBLIC_MAX)] = []
    """Where to look for what the namespace itself lacks."""


class MatchReply(Struct, frozen=True):
    matched: int
    tiers: list[str]
    """Where each matched chunk of the first format is: ``staging``, ``nvme`` or ``s3``."""
    reason: str = ""
    """Why the run is no longer, when that is known: for example a format that is not registered."""
    namespaces: list[str] = []
    """Where public namespaces were asked: the one that has each matched chunk, empty for the request's own."""


class WaitRequest(Struct, frozen=True, tag_field="op", tag="wait"):
    """Answer as to a match, but only when all keys can be had in every format, or the deadline is over."""

    fingerprints: Annotated[list[Fingerprint], Meta(min_length=1, max_length=FORMATS_MAX)]
    keys: EngineKeys
    namespace: NamespaceName = ""
    lease_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0
    deadline_ms: DeadlineMs = 10_000


class PutRequest(Struct, frozen=True, tag_field="op", tag="put"):
    """Store chunks as an ordered chain: each key's parent is the one before it, the first's is `parent`.

    Unless `chained` is false: then nobody knows what the chunks follow, and no deletion by prefix goes past them.
    """

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
    chained: bool = True


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
    public: Annotated[list[NamespaceReference], Meta(max_length=PUBLIC_MAX)] = []
    """Where to look for what the namespace itself lacks."""


class Hit(Struct, frozen=True, array_like=True):
    """One chunk that was opened under its own address."""

    index: int
    tier: str
    expires_ms: int
    namespace: str = ""
    """The public namespace that had it; empty: the request's own."""


class GetReply(Struct, frozen=True):
    hits: list[Hit]
    degraded: str = ""
    """Not empty when some miss may be due to an outage behind the gateway."""


class TouchRequest(Struct, frozen=True, tag_field="op", tag="touch"):
    """Extend the life of entries by their TTL, or by another one."""

    fingerprint: Fingerprint
    keys: EngineKeys
    namespace: NamespaceName = ""
    ttl_ms: Milliseconds | None = None
    deadline_ms: DeadlineMs = 10_000


class TouchReply(Struct, frozen=True):
    touched: int


HOLD_MS_MAX: Final = 7 * 86_400_000


class HoldRequest(Struct, frozen=True, tag_field="op", tag="hold"):
    """Keep the leading run of entries from eviction for `hold_ms`; 0 ends their hold."""

    fingerprint: Fingerprint
    keys: EngineKeys
    hold_ms: Annotated[int, Meta(ge=0, le=HOLD_MS_MAX)]
    namespace: NamespaceName = ""
    deadline_ms: DeadlineMs = 10_000


class HoldReply(Struct, frozen=True):
    held: int
    """Leading keys that are held now; or, where holds were ended, how many entries there are."""


class DeleteRequest(Struct, frozen=True, tag_field="op", tag="delete"):
    """Make entries invisible at once, on every gateway; their bytes go after."""

    fingerprint: Fingerprint
    keys: EngineKeys
    namespace: NamespaceName = ""
    deadline_ms: DeadlineMs = 30_000


class DeleteReply(Struct, frozen=True):
    deleted: int
