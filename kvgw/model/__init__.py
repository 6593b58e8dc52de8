"""Values that cross the client's door: requests, answers, and the bounds that both sides check.

Requests and answers are frozen `msgspec.Struct`s, so that the wire, the embedded gateway and the client share one
definition, and lengths are checked while a message is decoded. Times are Unix milliseconds, durations milliseconds.
"""

from __future__ import annotations

from typing import TypeAlias

from kvgw.model.chunks import (
    DeleteReply,
    DeleteRequest,
    GetReply,
    GetRequest,
    Hit,
    HoldReply,
    HoldRequest,
    MatchReply,
    MatchRequest,
    PutReply,
    PutRequest,
    RegisterReply,
    RegisterRequest,
    TouchReply,
    TouchRequest,
    WaitRequest,
)
from kvgw.model.explain import Difference, ExplainReply, ExplainRequest, KeyAnswer, Why
from kvgw.model.operators import (
    NamespaceCreateRequest,
    NamespaceInfo,
    NamespacesReply,
    NamespacesRequest,
    NodeForgetReply,
    NodeForgetRequest,
    StagingStatus,
    StatReply,
    StatRequest,
    StatusReply,
    StatusRequest,
    TierStatus,
)
from kvgw.model.values import (
    BATCH_BYTES_MAX,
    DEADLINE_MS_MAX,
    FORMATS_MAX,
    KEYS_MAX,
    LABELS_MAX,
    PUBLIC_MAX,
    DeadlineMs,
    Durability,
    EngineKey,
    EngineKeys,
    Fingerprint,
    Label,
    LabelText,
    Milliseconds,
    NamespaceName,
    Outcome,
    PutOutcome,
)

AdminQuestion: TypeAlias = StatusRequest | NamespaceCreateRequest | NamespacesRequest | NodeForgetRequest
Question: TypeAlias = (
    RegisterRequest
    | MatchRequest
    | WaitRequest
    | TouchRequest
    | HoldRequest
    | DeleteRequest
    | StatRequest
    | ExplainRequest
    | AdminQuestion
)
"""A request that is answered by one reply, without payload in either direction."""
Request: TypeAlias = PutRequest | GetRequest | Question
Reply: TypeAlias = (
    RegisterReply
    | MatchReply
    | PutReply
    | GetReply
    | TouchReply
    | HoldReply
    | DeleteReply
    | StatReply
    | ExplainReply
    | StatusReply
    | NamespaceInfo
    | NamespacesReply
    | NodeForgetReply
)

__all__ = [
    "BATCH_BYTES_MAX",
    "DEADLINE_MS_MAX",
    "FORMATS_MAX",
    "KEYS_MAX",
    "LABELS_MAX",
    "PUBLIC_MAX",
    "AdminQuestion",
    "DeadlineMs",
    "DeleteReply",
    "DeleteRequest",
    "Difference",
    "Durability",
    "EngineKey",
    "EngineKeys",
    "ExplainReply",
    "ExplainRequest",
    "Fingerprint",
    "GetReply",
    "GetRequest",
    "Hit",
    "HoldReply",
    "HoldRequest",
    "KeyAnswer",
    "Label",
    "LabelText",
    "MatchReply",
    "MatchRequest",
    "Milliseconds",
    "NamespaceCreateRequest",
    "NamespaceInfo",
    "NamespaceName",
    "NamespacesReply",
    "NamespacesRequest",
    "NodeForgetReply",
    "NodeForgetRequest",
    "Outcome",
    "PutOutcome",
    "PutReply",
    "PutRequest",
    "Question",
    "RegisterReply",
    "RegisterRequest",
    "Reply",
    "Request",
    "StagingStatus",
    "StatReply",
    "StatRequest",
    "StatusReply",
    "StatusRequest",
    "TierStatus",
    "TouchReply",
    "TouchRequest",
    "WaitRequest",
    "Why",
]
