"""Requests about a namespace or a gateway as a whole, and their answers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvgw.model.values import (
    DeadlineMs,
    Durability,
    Milliseconds,
    NamespaceName,
)


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


class NodeForgetRequest(Struct, frozen=True, tag_field="op", tag="node_forget"):
    """Give up what was on the disk of a node that never returns, in every tenant."""

    node: Annotated[str, Meta(min_length=1, max_length=64)]
    goes_on: bool = False
    """Whether an earlier request for this node was not done."""
    deadline_ms: DeadlineMs = 10_000


class NodeForgetReply(Struct, frozen=True):
    """What this request did; not `done`: ask again."""

    placements: int
    entries: int
    chunks: int
    done: bool
