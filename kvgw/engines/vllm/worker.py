"""The worker's half: reads chunks into the registered caches and stores from them, beside the model's steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvgw.engines.blocks import Paged
from kvgw.engines.breakeven import arrived
from kvgw.engines.counters import Counters
from kvgw.engines.loop import LoopThread
from kvgw.engines.options import EngineOptions
from kvgw.engines.remote import Remote
from kvgw.engines.tenants import TenantMap
from kvgw.engines.vllm.format import with_adapter
from kvgw.engines.vllm.plan import Load, Loaded, Plan, Store, Whose
from kvgw.engines.windows import Windows
from kvgw.errors import FormatError
from kvgw.kvformat import KVFormat
from kvgw.model import KEYS_MAX
from kvgw.runtime import Clock, ThreadWorkers

_BATCH_BYTES: Final = 32 * 1024 * 1024
"""Bytes of one read or write, or one chunk where that is larger."""
_SAMPLES_MAX: Final = 1024
"""Measurements kept until the scheduler is told."""
_DRAIN_S: Final = 5.0
"""How long `close` waits for what is on its way."""


@dataclass(frozen=True, slots=True)
class _Filled:
    """Chunks of one store whose bytes are on their way into `windows`."""

    store: Store
    windows: list[memoryview]
    fills: list[Callable[[], None]]


class WorkerHalf:
    """The caches of one worker. Called by the worker's thread; everything slow runs in the threads of its own."""

    def __init__(
        self,
        options: EngineOptions,
        tenants: TenantMap,
        counters: Counters,
        clock: Clock,
        *,
        kv_format: KVFormat,
        caches: Paged,
        blocks_per_chunk: int,
    ) -> None:
        size = kv_format.chunk_bytes
        if blocks_per_chunk * caches.block_bytes != size:
            raise FormatError(
                f"{blocks_per_chunk} of the engine's blocks have {blocks_per_chunk * caches.block_bytes} bytes, and a "
                f"chunk of the format has {size}"
            )
        self._options = options
        self._counters = counters
        self._clock = clock
        self._format = kv_format
        self._caches = caches
        self._per_chunk = blocks_per_chunk
        self._batch = max(1, min(KEYS_MAX, _BATCH_BYTES // size))
        self._loop = LoopThread("kvgw-transfer")
        self._threads = ThreadWorkers(1, "kvgw-copy")
        self._remote = Remote(options, tenants, counters, clock)
        self._inward = Windows(size, options.load_bytes)
        self._outward = Windows(size, options.store_bytes)
        self._loading: dict[str, tuple[Load, Future[int]]] = {}
        self._storing: set[Future[None]] = set()
        self._bad: set[int] = set()
        self._loaded: deque[Loaded] = deque(maxlen=_SAMPLES_MAX)

    def start_loads(self, plan: Plan) -> None:
        """Begin to read; `finished_loads` says what has arrived."""
        for load in plan.loads:
            since = self._clock.monotonic()
            self._loading[load.request] = load, self._loop.submit(partial(self._timed_load, load, since))

    def start_stores(self, plan: Plan) -> None:
        """Take the chunks out of the caches and begin to store them.

        What finds no memory is not stored: the model never waits for the gateway.
        """
        for store in plan.stores:
            windows = self._outward.take(len(store.keys))
            if len(windows) < len(store.keys):
                missing = len(store.keys) - len(windows)
                self._counters.reason("chunks_dropped", "more chunks wait to be stored than store_bytes holds", missing)
            if not windows:
                continue
            fills = [
                self._caches.gather(store.blocks[at * self._per_chunk : (at + 1) * self._per_chunk], window)
                for at, window in enumerate(windows)
            ]
            filled = _Filled(store, windows, fills)
            future = self._loop.submit(partial(self._store, filled))
            self._storing.add(future)
            future.add_done_callback(self._storing.discard)

    def finished_loads(self) -> set[str]:
        """Requests whose load has ended, well or not; see `take_bad_blocks`."""
        done = {name for name, (_, future) in self._loading.items() if future.done()}
        for name in done:
            load, future = self._loading.pop(name)
            error = None if future.cancelled() else future.exception()
            if error is not None:
                self._counters.reason("loads_failed", repr(error))
            chunks = 0 if error is not None or future.cancelled() else future.result()
            first_bad = max(chunks * self._per_chunk, load.skip)
            self._bad.update(load.blocks[first_bad:])
            tokens = max(0, chunks * self._format.tokens_per_chunk - load.skip * self._block_tokens)
            public = max(0, min(chunks, load.public) * self._format.tokens_per_chunk - load.skip * self._block_tokens)
            self._counters.add("tokens_loaded", tokens)
            self._counters.add("tokens_public", public)
            self._counters.add("tokens_lost", (len(load.blocks) - load.skip) * self._block_tokens - tokens)
        return done

    def take_loaded(self) -> list[Loaded]:
        """The loads that ended since the last call, as far as they say how fast the gateway is."""
        return [self._loaded.popleft() for _ in range(len(self._loaded))]

    def take_bad_blocks(self) -> set[int]:
        """Blocks of ended loads that hold nothing of use: the engine computes them."""
        bad, self._bad = self._bad, set()
        return bad

    def drain(self, limit_s: float = _DRAIN_S) -> bool:
        """Wait until nothing is on its way to the gateway; whether that was so within `limit_s`."""
        until = self._clock.monotonic() + limit_s
        for future in list(self._storing):
            try:
                future.result(max(0.0, until - self._clock.monotonic()))
            except TimeoutError:
                return False
        return True

    def close(self) -> None:
        """End the transfers, connections and threads; nothing touches the caches afterwards."""
        if not self.drain():
            self._counters.reason(
                "stores_cut_short", f"the engine ends, and chunks were not stored within {_DRAIN_S:g} s"
            )
        self._loop.close(self._remote.aclose)
        self._threads.close()

    @property
    def _block_tokens(self) -> int:
        return self._format.tokens_per_chunk // self._per_chunk

    async def _timed_load(self, load: Load, since: float) -> int:
        there = await self._load(load)
        seconds = self._clock.monotonic() - since
        nbytes = arrived(there, self._format.chunk_bytes, seconds, self._options.load_deadline_s)
        self._loaded.append(Loaded(nbytes, seconds))
        return there

    async def _load(self, load: Load) -> int:
        """Read chunk by chunk into the caches; how many leading ones are there."""
        until = self._clock.monotonic() + self._options.load_deadline_s
        kv_format = self._format_of(load.whose)
        there = 0
        while there < len(load.keys):
            public = there < load.public
            end = load.public if public else len(load.keys)
            windows = await self._windows(min(self._batch, end - there), until)
            if not windows:
                self._counters.reason("load_outages", "no memory for a load within load_deadline_s")
                break
            try:
                keys = load.keys[there : there + len(windows)]
                got = await self._remote.get(load.whose.tenant, kv_format, keys, windows, until, public=public)
                await self._threads.run(partial(self._scatter, load, there, windows[:got]))
            finally:
                self._inward.give(windows)
            there += got
            if got < len(windows):
                break
        return there

    def _scatter(self, load: Load, first: int, windows: Sequence[memoryview]) -> None:
        for chunk, window in enumerate(windows, first):
            start = chunk * self._per_chunk
            skip = min(max(load.skip - start, 0), self._per_chunk)
            if skip < self._per_chunk:
                self._caches.scatter(window, load.blocks[start : start + self._per_chunk], skip)

    async def _windows(self, count: int, until: float) -> list[memoryview]:
        """Memory for some of the next `count` chunks; none when there was none until the deadline."""
        while self._clock.monotonic() < until:
            windows = self._inward.take(count)
            if windows:
                return windows
            await self._clock.sleep(0.005)
        return []

    async def _store(self, filled: _Filled) -> None:
        store, windows = filled.store, filled.windows
        until = self._clock.monotonic() + self._options.store_deadline_s
        try:
            await self._threads.run(lambda: [fill() for fill in filled.fills])
            filled.fills.clear()
            for start in range(0, len(windows), self._batch):
                batch = windows[start : start + self._batch]
                stored = await self._remote.put(
                    store.whose.tenant,
                    self._format_of(store.whose),
                    store.keys[start : start + len(batch)],
                    batch,
                    parent=store.keys[start - 1] if start else store.parent,
                    depth=store.depth + start,
                    until=until,
                )
                self._counters.add("tokens_stored", stored * self._format.tokens_per_chunk)
                if stored < len(batch):
                    break  # no match reaches what lies behind a gap
        finally:
            self._outward.give(windows)

    def _format_of(self, whose: Whose) -> KVFormat:
        return with_adapter(self._format, whose.adapter, whose.adapter_digest)
