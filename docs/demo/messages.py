"""What the demo's processes tell each other: JSON, one document a line."""

from __future__ import annotations

from msgspec import Struct


class Stage(Struct, frozen=True, tag="stage"):
    """What a process does next, in a few words."""

    text: str


class Stored(Struct, frozen=True):
    """One prompt that process A computed and stored."""

    prompt_tokens: int
    ttft_s: float
    answer: list[int]
    text: str
    chunks: int
    new_chunks: int
    payload_bytes: int


class StoreResult(Struct, frozen=True, tag="stored"):
    """All that process A did."""

    prompts: list[Stored]


class Reused(Struct, frozen=True):
    """One prompt that process B answered twice: from the first token on, and with what the gateway had."""

    prompt_tokens: int
    matched_tokens: int
    tiers: list[str]
    payload_bytes: int
    cold_first_token: int
    cold_ttft_s: float
    restore_s: float
    """The part of `ttft_s` before the rest of the prompt is computed: match, read and copy."""
    ttft_s: float
    answer: list[int]


class Denied(Struct, frozen=True):
    """What somebody else asked for, and the number of tokens that they were given."""

    who: str
    tokens: int


class ReuseResult(Struct, frozen=True, tag="reused"):
    """All that process B did."""

    prompts: list[Reused]
    denied: list[Denied]
    deleted: int
    tokens_after_delete: list[int]


Message = Stage | StoreResult | ReuseResult
