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


class Round(Struct, frozen=True):
    """The way to the first token with reuse, once."""

    restore_s: float
    """The part of `ttft_s` before the rest of the prompt is computed: match, read and copy."""
    ttft_s: float
    first_token: int
    tiers: list[str]


class Reused(Struct, frozen=True):
    """One prompt that process B answered: from the first token on, and with what the gateway had."""

    prompt_tokens: int
    matched_tokens: int
    payload_bytes: int
    cold_first_token: int
    cold_ttft_s: float
    rounds: list[Round]
    answer: list[int]

    @property
    def median(self) -> Round:
        """The round in the middle, by time to the first token."""
        return sorted(self.rounds, key=lambda one: one.ttft_s)[len(self.rounds) // 2]


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
