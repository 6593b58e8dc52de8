"""`KVReuse`: restore the leading run of a prompt's KV cache from a gateway, and store what was computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from kvgw.client import Client
from kvgw.engines.breakeven import BreakEven, arrived
from kvgw.engines.transformers import cache as caches
from kvgw.engines.transformers.format import check_unchanged, format_of
from kvgw.engines.transformers.identity import ModelIdentity
from kvgw.errors import Outage
from kvgw.keys import prefix_keys
from kvgw.kvformat import KVFormat
from kvgw.model import KEYS_MAX, Durability, Label, Outcome, PutOutcome
from kvgw.reports import Match, Registered
from kvgw.runtime import Clock, SystemClock

TOKENS_PER_CHUNK: Final = 256

_BATCH_BYTES: Final = 64 * 1024 * 1024
"""Host memory of one call beside the cache itself, or one chunk where that is larger."""

_NOT_THERE: Final = frozenset({PutOutcome.OVER_QUOTA, PutOutcome.FAILED})


@dataclass(frozen=True, slots=True)
class Restored:
    """A cache to go on from. With `tokens` 0 it is empty, and the prompt is computed as if there were no gateway."""

    cache: DynamicCache
    tokens: int
    """Leading tokens whose KV the cache holds; always fewer than the prompt has."""
    tiers: tuple[str, ...]
    """Where each chunk came from: ``staging``, ``nvme`` or ``s3``."""
    payload_bytes: int
    outcome: Outcome = Outcome.OK
    reason: str = ""
    """Why the run is no longer, where that is known."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of the whole chunks of a sequence."""

    outcomes: tuple[PutOutcome, ...]
    """One for each chunk that was offered; the chunks behind one that the gateway did not take are not offered."""
    tokens: int
    """Leading tokens whose KV the gateway has now."""
    expires_ms: int = 0
    outcome: Outcome = Outcome.OK
    reason: str = ""


class KVReuse:
    """The KV cache of one model, as it is loaded now, in one namespace of a gateway. Made by `open`.

    Serves one sequence at a time, without padding and from position 0: token ids alone name a cache. Copies run on the
    event loop's thread, in steps of at most 64 MiB or one chunk. Reads and writes fail open like the client's; what
    can never be right raises `FormatError`.
    """

    def __init__(
        self, client: Client, model: PreTrainedModel, kv_format: KVFormat, guard: BreakEven, clock: Clock
    ) -> None:
        self._client = client
        self._model = model
        self._clock = clock
        self._registered: Registered | None = None
        self.kv_format = kv_format
        self.guard = guard
        self.hits_declined = 0
        """Hits that were not loaded, because to compute them is faster."""

    @classmethod
    async def open(
        cls,
        client: Client,
        model: PreTrainedModel,
        identity: ModelIdentity,
        *,
        tokens_per_chunk: int = TOKENS_PER_CHUNK,
        guard: BreakEven | None = None,
        clock: Clock | None = None,
    ) -> KVReuse:
        """Derive the model's KV format and register it; a gateway that is away is asked again by the next call.

        `guard`: declines hits that do not pay, once `computed` or the guard itself says how fast the model is; None:
        a new one. Raises `FormatError` with the reason for a model whose cache cannot be reused, and `RequestRefused`.
        """
        kv_format = format_of(model, identity, tokens_per_chunk)
        made = cls(client, model, kv_format, guard or BreakEven(), clock or SystemClock())
        with suppress(Outage):
            await made._register()
        return made

    @property
    def registered(self) -> Registered:
        """The format as the gateway knows it. Raises `Outage` while it has not answered."""
        if self._registered is None:
            raise Outage("the gateway has not answered yet, so that the KV format is not registered")
        return self._registered

    def keys(self, input_ids: torch.Tensor | Sequence[int], *, salt: bytes = b"") -> list[bytes]:
        """Keys of the whole chunks of a sequence, for the client's `delete` or `touch`."""
        return prefix_keys(self.kv_format, caches.token_ids(input_ids), salt=salt)

    def computed(self, tokens: int, seconds: float) -> None:
        """Tell how long the model took for `tokens` tokens of a prompt: hits that load slower are then declined."""
        self.guard.computed(tokens, seconds)

    def cache_argument(self, cache: DynamicCache) -> dict[str, DynamicCache]:
        """`cache` as the keyword argument of the model's ``forward`` and ``generate``, whichever name they use."""
        return caches.cache_argument(self._model, cache)

    async def restore(self, input_ids: torch.Tensor | Sequence[int], *, salt: bytes = b"") -> Restored:
        """A fresh cache with the longest leading run that the gateway has, but never the last token of the prompt.

        ``forward`` is given the ids from `Restored.tokens` on, ``generate`` all of them. `salt` separates users
        inside one namespace: only who stored with the same salt is found.
        """
        check_unchanged(self._model, self.kv_format)
        ids = caches.token_ids(input_ids)
        keys = self.keys(ids[:-1], salt=salt)  # logits need at least one token that is computed
        match = await self._match(keys)
        if match.count == 0:
            return Restored(DynamicCache(), 0, (), 0, match.outcome, match.reason)
        tokens, nbytes = match.count * self.kv_format.tokens_per_chunk, match.count * self.kv_format.chunk_bytes
        if not self.guard.pays(tokens, nbytes, self._clock.monotonic()):
            self.hits_declined += 1
            reason = f"{tokens} tokens are there, and to compute them is faster than to load {nbytes} bytes"
            return Restored(DynamicCache(), 0, (), 0, match.outcome, reason)
        return await self._read(keys[: match.count], match)

    async def store(
        self,
        input_ids: torch.Tensor | Sequence[int],
        cache: Cache,
        *,
        salt: bytes = b"",
        labels: Sequence[Label] = (),
        ttl: float | None = None,
        durability: Durability | None = None,
    ) -> Stored:
        """Store the whole chunks of `input_ids` that `cache` covers; only what the gateway lacks travels.

        The cache must be that of exactly these tokens; it may end before them or go on after them.
        """
        kv_format = self.kv_format
        check_unchanged(self._model, kv_format)
        layers = caches.Layers.of(cache, kv_format)
        keys = self.keys(caches.token_ids(input_ids)[: layers.tokens], salt=salt)
        outcomes: list[PutOutcome] = []
        last = Stored((), 0)
        try:
            registered = await self._register()
        except Outage as error:
            return Stored((), 0, outcome=Outcome.OUTAGE, reason=str(error))
        for start, windows in self._batches(len(keys)):
            for index, window in enumerate(windows, start):
                layers.copy_chunk_out(index, window)
            report = await self._client.put(
                registered,
                keys[start : start + len(windows)],
                windows,
                parent=keys[start - 1] if start else None,
                depth=start,
                ttl=ttl,
                durability=durability,
                labels=labels,
            )
            outcomes.extend(report.outcomes)
            there = next((at for at, one in enumerate(outcomes) if one in _NOT_THERE), len(outcomes))
            tokens = there * kv_format.tokens_per_chunk
            last = Stored(tuple(outcomes), tokens, report.expires_ms, report.outcome, report.reason)
            if there < len(outcomes):
                break  # no match reaches what lies behind a gap
        return last

    async def _register(self) -> Registered:
        """Make the format known, unless it is. Raises `RequestRefused` or `Outage`."""
        if self._registered is None:
            limit = self._client.read_deadline_s
            self._registered = await self._client.register(self.kv_format, deadline_s=limit)
        return self._registered

    async def _match(self, keys: Sequence[bytes]) -> Match:
        """The leading run, over as many requests as the number of keys needs."""
        count = 0
        match = Match(0)
        try:
            registered = await self._register()
        except Outage as error:
            return Match(0, (), Outcome.OUTAGE, str(error))
        for start in range(0, len(keys), KEYS_MAX):
            page = keys[start : start + KEYS_MAX]
            match = await self._client.match(registered, page)
            count += match.count
            if match.count < len(page):
                if match.reason and match.outcome is Outcome.OK:
                    self._registered = None  # the gateway may not know the format any more
                break
        return Match(count, (), match.outcome, match.reason)

    async def _read(self, keys: Sequence[bytes], match: Match) -> Restored:
        kv_format = self.kv_format
        started = self._clock.monotonic()
        layers = caches.Layers.empty(kv_format, len(keys) * kv_format.tokens_per_chunk, self._model)
        tiers: list[str] = []
        outcome, reason = match.outcome, match.reason
        for start, windows in self._batches(len(keys)):
            report = await self._client.get(self.registered, keys[start : start + len(windows)], windows)
            tier_of = {hit.index: hit.tier for hit in report.hits}
            for at in range(report.leading):
                layers.copy_chunk_in(start + at, windows[at])
                tiers.append(tier_of[at])
            if report.leading < len(windows):
                outcome = report.outcome
                reason = report.reason or f"chunk {len(tiers)} was there a moment ago and could not be read"
                break
        seconds = self._clock.monotonic() - started
        nbytes = arrived(len(tiers), kv_format.chunk_bytes, seconds, self._client.read_deadline_s)
        self.guard.loaded(nbytes, seconds)
        tokens = len(tiers) * kv_format.tokens_per_chunk
        cache = layers.as_cache(tokens) if tokens else DynamicCache()
        return Restored(cache, tokens, tuple(tiers), len(tiers) * kv_format.chunk_bytes, outcome, reason)

    def _batches(self, chunks: int) -> Iterator[tuple[int, list[memoryview]]]:
        """First chunk of each batch and a window for each of its chunks; the next batch has the same memory."""
        size = self.kv_format.chunk_bytes
        at_once = min(chunks, KEYS_MAX, max(1, _BATCH_BYTES // size))
        memory = memoryview(bytearray(at_once * size))
        windows = [memory[start : start + size] for start in range(0, len(memory), size)]
        for start in range(0, chunks, at_once or 1):
            yield start, windows[: chunks - start]
