"""What a client's calls return: frozen values, in which a miss and an outage are different things."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvgw.keys import MultimodalItem, prefix_keys
from kvgw.kvformat import KVFormat
from kvgw.model import Hit, Outcome, PutOutcome

_CONFIRMED: Final = frozenset({PutOutcome.STORED, PutOutcome.HAVE})


@dataclass(frozen=True, slots=True)
class Registered:
    """A KV format that the gateway knows in one namespace."""

    kv_format: KVFormat
    namespace: str
    fingerprint: bytes

    @property
    def chunk_bytes(self) -> int:
        """Exact length in bytes of every chunk."""
        return self.kv_format.chunk_bytes

    def keys(self, tokens: Sequence[int], *, salt: bytes = b"", items: Sequence[MultimodalItem] = ()) -> list[bytes]:
        """Prefix keys of the whole chunks of `tokens`; see `kvgw.keys.prefix_keys`."""
        return prefix_keys(self.kv_format, tokens, salt=salt, items=items)


@dataclass(frozen=True, slots=True)
class Match:
    """How many leading keys can be had, and where their chunks are."""

    count: int
    tiers: tuple[str, ...] = ()
    outcome: Outcome = Outcome.OK
    reason: str = ""
    namespaces: tuple[str, ...] = ()
    """Where public namespaces were asked: the one that has each chunk, empty for the client's own."""
    cached_tokens: int = 0
    """Tokens whose KV need not be computed."""


@dataclass(frozen=True, slots=True)
class PutReport:
    """What became of each chunk, in the order of the keys."""

    outcomes: tuple[PutOutcome, ...]
    expires_ms: int = 0
    outcome: Outcome = Outcome.OK
    reason: str = ""
    created_tokens: int = 0
    """Tokens whose KV was not there before."""

    @property
    def stored(self) -> int:
        """Leading chunks that the gateway now has: stored by this call, or there before."""
        for index, outcome in enumerate(self.outcomes):
            if outcome not in _CONFIRMED:
                return index
        return len(self.outcomes)

    @property
    def there(self) -> frozenset[int]:
        """Indices of all chunks that the gateway now has."""
        return frozenset(index for index, outcome in enumerate(self.outcomes) if outcome in _CONFIRMED)


@dataclass(frozen=True, slots=True)
class GetReport:
    """Which chunks were read into their buffers. A buffer that is not among the hits holds nothing of use."""

    hits: tuple[Hit, ...]
    outcome: Outcome = Outcome.OK
    reason: str = ""
    cached_tokens: int = 0
    """Tokens whose KV was read instead of computed."""

    @property
    def leading(self) -> int:
        """Length of the leading run of hits: what an engine can use of a prefix."""
        indices = {hit.index for hit in self.hits}
        count = 0
        while count in indices:
            count += 1
        return count


@dataclass(frozen=True, slots=True)
class Touched:
    """How many entries live longer now."""

    count: int
    outcome: Outcome = Outcome.OK
    reason: str = ""
