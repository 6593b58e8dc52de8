"""Why was there no hit: the question and its answer."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from kvgw.kvformat import CANONICAL_BYTES_MAX
from kvgw.model.values import DeadlineMs, EngineKeys, Fingerprint, NamespaceName


class Why(StrEnum):
    """What became of one key, as the gateway that was asked sees it."""

    VISIBLE = "visible"
    """It can be had."""
    UNKNOWN = "unknown"
    """Never stored, or ended so long ago that nobody remembers."""
    EXPIRED = "expired"
    EVICTED = "evicted"
    DELETED = "deleted"
    LOST = "lost"
    """Its bytes went with a gateway's memory, or were found damaged everywhere."""
    ELSEWHERE = "elsewhere"
    """Another gateway has it, and has not yet written it where this one could read it."""
    EPOCH_CLOSED = "epoch_closed"
    """It was sealed in a key epoch that the namespace does not open any more."""
    OVER_QUOTA = "over_quota"
    """The last PUT of it through this gateway was refused by a quota."""
    NAMESPACE_SUSPENDED = "namespace_suspended"
    FORMAT_UNKNOWN = "format_unknown"
    """The KV format is not registered; `ExplainReply.differences` says how it differs from the nearest that is."""


class ExplainRequest(Struct, frozen=True, tag_field="op", tag="explain"):
    """Why can these keys not be had? Names the KV format by its canonical form or by its fingerprint."""

    keys: EngineKeys
    canonical: Annotated[bytes, Meta(max_length=CANONICAL_BYTES_MAX)] | None = None
    fingerprint: Fingerprint | None = None
    namespace: NamespaceName = ""
    deadline_ms: DeadlineMs = 10_000


class KeyAnswer(Struct, frozen=True, array_like=True):
    """What became of one key, and when (Unix milliseconds; 0: nothing says when)."""

    why: Why
    at_ms: int = 0


class Difference(Struct, frozen=True, array_like=True):
    """A field of the KV format: what was asked for, and what the nearest format of the namespace has."""

    field: str
    asked: str
    nearest: str


class ExplainReply(Struct, frozen=True):
    answers: list[KeyAnswer]
    """One for each key, in their order."""
    differences: list[Difference]
    sentence: str = ""
    """About all of the keys, when there is something to say."""
