"""Rows of the primary tier, straight to and from the gateway's connections. Everything here runs in one event loop.

Loads and stores take turns, and fewer than the client has connections: a lookup never waits behind them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvgw.engines.counters import Counters
from kvgw.engines.keyed import KeyedRemote
from kvgw.engines.vllm_tier.format import engine_key
from kvgw.engines.vllm_tier.lookups import Whose
from kvgw.kvformat import KVFormat
from kvgw.model import KEYS_MAX
from kvgw.runtime import Clock

_BATCH_BYTES: Final = 32 * 1024 * 1024
"""Bytes of one read or write, or one chunk where that is larger."""

_LOADS_AT_ONCE: Final = 2
_STORES_AT_ONCE: Final = 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk in the primary tier."""

    key: bytes
    """vLLM's name of it."""
    row: memoryview
    """Its bytes. vLLM keeps it as it is until the job is reported."""
    depth: int | None = None
    """Chunks before it in its prompt; None: not known."""
    parent: bytes | None = None
    """The key before it; None: it is the first, or nobody knows what it follows."""


class Transfers:
    """Moves chunks of one KV format. Each call ends by `until`, and touches no row afterwards."""

    def __init__(self, remote: KeyedRemote, kv_format: KVFormat, counters: Counters, clock: Clock) -> None:
        self._remote = remote
        self._format = kv_format
        self._counters = counters
        self._clock = clock
        self._batch = max(1, min(KEYS_MAX, _BATCH_BYTES // kv_format.chunk_bytes))
        self._loads = asyncio.Semaphore(_LOADS_AT_ONCE)
        self._stores = asyncio.Semaphore(_STORES_AT_ONCE)

    async def load(self, whose: Whose, chunks: Sequence[Chunk], until: float) -> frozenset[bytes]:
        """Read chunks into their rows; keys of those that are there. Other rows hold nothing of use."""
        batches = [chunks[start : start + self._batch] for start in range(0, len(chunks), self._batch)]
        # A group waits for all of its tasks, however one of them ends: rows belong to this call until then.
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._load_batch(whose, batch, until)) for batch in batches]
        there = frozenset(key for task in tasks for key in task.result())
        self._counters.add("tokens_loaded", len(there) * self._format.tokens_per_chunk)
        self._counters.add("tokens_lost", (len(chunks) - len(there)) * self._format.tokens_per_chunk)
        return there

    async def store(self, whose: Whose, chunks: Iterable[Chunk], until: float) -> frozenset[bytes]:
        """Store rows; keys of those that the gateway has now. Only what it lacks travels."""
        stored: list[bytes] = []
        for run in _runs(chunks):
            for start in range(0, len(run), self._batch):
                batch = run[start : start + self._batch]
                there = await self._store_batch(whose, batch, until)
                stored += there
                if len(there) < len(batch):
                    break  # no lookup reaches what lies behind a gap
        self._counters.add("tokens_stored", len(stored) * self._format.tokens_per_chunk)
        return frozenset(stored)

    async def _load_batch(self, whose: Whose, batch: Sequence[Chunk], until: float) -> list[bytes]:
        if not await self._turn(self._loads, until):
            self._counters.reason("load_outages", "a load found no turn within load_deadline_s")
            return []
        try:
            names, rows = [engine_key(one.key, whose.salt) for one in batch], [one.row for one in batch]
            hits = await self._remote.get_each(whose.tenant, self._format, names, rows, until)
        finally:
            self._loads.release()
        return [batch[index].key for index in hits]

    async def _store_batch(self, whose: Whose, batch: Sequence[Chunk], until: float) -> list[bytes]:
        if not await self._turn(self._stores, until):
            self._counters.reason("store_outages", "a store found no turn within store_deadline_s", len(batch))
            return []
        first = batch[0]
        names, rows = [engine_key(one.key, whose.salt) for one in batch], [one.row for one in batch]
        try:
            if first.depth is None:
                there = await self._remote.put_each(whose.tenant, self._format, names, rows, until)
                return [batch[index].key for index in there]
            parent = None if first.parent is None else engine_key(first.parent, whose.salt)
            count = await self._remote.put(
                whose.tenant, self._format, names, rows, parent=parent, depth=first.depth, until=until
            )
            return [chunk.key for chunk in batch[:count]]
        finally:
            self._stores.release()

    async def _turn(self, lane: asyncio.Semaphore, until: float) -> bool:
        """Wait for a turn; False when there was none in time."""
        try:
            async with asyncio.timeout(max(0.0, until - self._clock.monotonic())):
                await lane.acquire()
        except TimeoutError:
            return False
        return True


def _runs(chunks: Iterable[Chunk]) -> list[list[Chunk]]:
    """One list for each run in which each chunk follows the one before it; in the first those of unknown place."""
    runs: list[list[Chunk]] = [[]]
    for chunk in sorted(chunks, key=lambda one: -1 if one.depth is None else one.depth):
        last = runs[-1][-1] if runs[-1] else None
        if chunk.depth is None or (last is not None and chunk.parent == last.key):
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return [run for run in runs if run]
