"""A tenant that replays its requests: look up the prefix, read what is there and check it, store the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from blake3 import blake3

from kvgw.bench.subjects import format_of as bench_format
from kvgw.client import Client
from kvgw.kvformat import KVFormat
from kvgw.model import Outcome, PutOutcome
from kvgw.replay.outcome import Tally
from kvgw.replay.plan import ReplayOptions
from kvgw.replay.trace import BLOCK_TOKENS, Request
from kvgw.reports import Registered
from kvgw.runtime import Clock

AT_ONCE: Final = 64
"""Chunks of one GET or PUT."""
CALL_SECONDS: Final = 30.0
LIFE_SECONDS: Final = 24 * 3600.0


class Traffic:
    """One tenant's requests, in their order, one after the other."""

    def __init__(self, client: Client, options: ReplayOptions, clock: Clock) -> None:
        self._client = client
        self._options = options
        self._clock = clock
        self._buffers = [bytearray(options.chunk_bytes) for _ in range(AT_ONCE)]
        self.tally = Tally()

    async def replay(self, requests: Sequence[Request], start: float, step: Callable[[], None]) -> None:
        """Replay all; `start`: the clock's time (s) of the trace's time 0. `step` is called after each request."""
        registered = await self._client.register(format_of(self._options.bytes_per_token))
        for request in requests:
            if self._options.speed:
                await self._keep_time(start + request.timestamp / 1000 / self._options.speed)
            await self._serve(registered, request)
            step()

    async def _keep_time(self, due: float) -> None:
        ahead = due - self._clock.monotonic()
        if ahead > 0:
            await self._clock.sleep(ahead)
        self.tally.late_s = max(self.tally.late_s, -ahead)

    async def _serve(self, registered: Registered, request: Request) -> None:
        tally = self.tally
        keys = [key_of(block) for block in request.hash_ids]
        tally.requests += 1
        tally.tokens += request.input_length
        tally.blocks += len(keys)
        if not keys:
            return
        started = self._clock.monotonic()
        match = await self._client.match(registered, keys, deadline_s=CALL_SECONDS)
        tally.match_s.append(self._clock.monotonic() - started)
        tally.outages += match.outcome is Outcome.OUTAGE
        tally.matched += match.count
        there = await self._read(registered, keys[: match.count])
        tally.read += there
        await self._store(registered, keys, there)

    async def _read(self, registered: Registered, keys: Sequence[bytes]) -> int:
        """Read and check as far as all is there; how many chunks were right."""
        tally = self.tally
        count = 0
        for first in range(0, len(keys), AT_ONCE):
            some = keys[first : first + AT_ONCE]
            buffers = self._buffers[: len(some)]
            started = self._clock.monotonic()
            report = await self._client.get(registered, some, buffers, deadline_s=CALL_SECONDS)
            tally.get_s.append(self._clock.monotonic() - started)
            tally.outages += report.outcome is Outcome.OUTAGE
            tally.tiers.update(hit.tier for hit in report.hits if hit.index < report.leading)
            for key, buffer in zip(some[: report.leading], buffers, strict=False):
                if buffer != content_of(key, registered.chunk_bytes):
                    tally.wrong += 1
                    return count
                count += 1
            if report.leading < len(some):
                break
        return count

    async def _store(self, registered: Registered, keys: Sequence[bytes], first: int) -> None:
        """Store from the `first`-th key on, in order; the rest of a chain whose middle was not taken is of no use."""
        tally = self.tally
        for at in range(first, len(keys), AT_ONCE):
            some = keys[at : at + AT_ONCE]
            started = self._clock.monotonic()
            report = await self._client.put(
                registered,
                some,
                [content_of(key, registered.chunk_bytes) for key in some],
                parent=keys[at - 1] if at else None,
                depth=at,
                ttl=LIFE_SECONDS,
                deadline_s=CALL_SECONDS,
            )
            tally.put_s.append(self._clock.monotonic() - started)
            tally.outages += report.outcome is Outcome.OUTAGE
            tally.stored += report.outcomes.count(PutOutcome.STORED)
            if report.stored < len(some):
                tally.refused += len(keys) - at - report.stored
                return


def key_of(block: int) -> bytes:
    """The engine key of a block: its id follows from its whole prefix already."""
    return block.to_bytes(8, "big")


def content_of(key: bytes, length: int) -> bytes:
    """Bytes that no other block has."""
    return blake3(key).digest(length=length)


def format_of(bytes_per_token: int) -> KVFormat:
    """The KV format of a replay: chunks of one block, with so many bytes for each token."""
    return replace(
        bench_format(bytes_per_token * BLOCK_TOKENS),
        model="kvgw/replay",
        engine="kvgw replay",
        tokens_per_chunk=BLOCK_TOKENS,
    )
