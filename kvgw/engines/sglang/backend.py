"""`KvgwHiCache`: what SGLang loads. It is called from two threads of each rank, and each call ends by its deadline."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo, PoolName
from sglang.version import __version__ as sglang_version

from kvgw.engines.breakeven import arrived
from kvgw.engines.counters import Counters
from kvgw.engines.loop import LoopThread
from kvgw.engines.remote import Remote
from kvgw.engines.sglang.format import check_page, format_of, rank_of
from kvgw.engines.sglang.options import parse_sglang_options
from kvgw.engines.sglang.pages import Page, pages_of
from kvgw.engines.sglang.transfer import Transfer
from kvgw.engines.tenants import OWN
from kvgw.engines.windows import Windows
from kvgw.errors import FormatError, KvgwError, Outage
from kvgw.kvformat import KVFormat
from kvgw.runtime import SystemClock

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host.base import HostKVCache
    from sglang.srt.observability.metrics_collector import StorageMetrics

logger = logging.getLogger("sglang.srt.kvgw")

_GRACE_S: Final = 0.25
"""A call that its own coroutine does not end by the deadline is left so long after it."""

_SAMPLES: Final = 1024
"""Measurements kept between two readings of the statistics."""


class KvgwHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """Keeps pages in a gateway and takes them back. See docs/engines/sglang.md.

    Raises `FormatError` while it is attached, for settings or pools that cannot be served right. Afterwards it
    raises nothing: what the gateway cannot give is a miss, and what it does not take is not stored.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, _: dict[str, Any] | None = None) -> None:
        self._options = parse_sglang_options(storage_config.extra_config)
        self._config = storage_config
        self._rank = rank_of(storage_config)
        self._counters = Counters(logger)
        self._clock = SystemClock()
        self._loop = LoopThread("kvgw-sglang")
        self._remote = Remote(self._options, self._options.tenants(), self._counters, self._clock)
        self._guard = self._options.guard()
        self._format: KVFormat | None = None
        self._samples: dict[str, deque[tuple[int, float]]] = {
            name: deque(maxlen=_SAMPLES) for name in ("prefetch", "backup")
        }

    # What SGLang tells.

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """Learn where pages are and what is in them. Raises `FormatError` for a pool that kvgw does not serve."""
        super().register_mem_pool_host(mem_pool_host)
        abi = (("sglang", sglang_version), ("torch", torch.__version__), ("hardware", _hardware()))
        kv_format = format_of(mem_pool_host, self._rank, self._options, self._config.model_name, abi)
        if self._options.interface_v1:
            first = torch.arange(mem_pool_host.page_size)
            check_page(kv_format, mem_pool_host.get_page_buffer_meta(first)[1])
        self._inward = Windows(kv_format.chunk_bytes, self._options.load_bytes)
        self._outward = Windows(kv_format.chunk_bytes, self._options.store_bytes)
        self._format = kv_format
        logger.info(
            "kvgw: pages of %d tokens, %d bytes each: %s", kv_format.tokens_per_chunk, kv_format.chunk_bytes, kv_format
        )

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: PoolName) -> None:
        """Raises `FormatError` for a pool beside the one with the KV: state, windows, indices, drafts."""
        if host_pool_name != PoolName.KV:
            raise FormatError(
                f"this model keeps a pool {host_pool_name!s} beside its KV, and kvgw serves plain MHA and MLA; start "
                "SGLang without --hicache-storage-backend for it"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    # Interface v1: pages travel between the gateway and the host pool.

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many leading pages can be had: 0 also where the gateway does not say."""
        self._counters.add("lookups")
        limit = self._options.lookup_deadline_s
        until = self._clock.monotonic() + limit
        try:
            names = [_key(key) for key in keys]
            kv_format = self._known_format()
            found = self._loop.call(lambda: self._remote.match(OWN, [kv_format], names, until), limit + _GRACE_S)
        except KvgwError as error:
            late = isinstance(error, Outage)
            self._counters.reason("lookups_late" if late else "lookups_failed", str(error))
            return 0
        tokens, nbytes = found.count * kv_format.tokens_per_chunk, found.count * kv_format.chunk_bytes
        if tokens and not self._guard.pays(tokens, nbytes, self._clock.monotonic()):
            self._counters.add("hits_declined")
            return 0
        self._counters.add("tokens_planned", tokens)
        return found.count

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Read pages into the host pool; which of them hold their page now. Others are as they were."""
        count = self._load(keys, self._pages(host_indices, len(keys)))
        return [index < count for index in range(len(keys))]

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages from the host pool; which of them the gateway has now."""
        before = extra_info.prefix_keys if extra_info is not None else None
        count = self._store(keys, self._pages(host_indices, len(keys)), before)
        return [index < count for index in range(len(keys))]

    # The older interface: pages travel as flat tensors.

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Read a page into `target_location`, or into a new tensor; None where it cannot be had."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: list[torch.Tensor] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Read pages into flat tensors. Behind the first that cannot be had all are None."""
        targets = target_locations or [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        count = self._load(keys, [_tensor(target) for target in targets])
        return [target if index < count else None for index, target in enumerate(targets)]

    def set(
        self, key: str, value: torch.Tensor | None = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store a page from a flat tensor; whether the gateway has it now."""
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: list[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store pages from flat tensors; whether the gateway has all of them now."""
        flat = [value.contiguous() for value in values or []]
        return len(flat) == len(keys) == self._store(keys, [_tensor(value) for value in flat], None)

    def exists(self, key: str) -> bool:
        """Whether a page can be had."""
        return self.batch_exists([key]) == 1

    # The rest.

    def clear(self) -> None:
        """Delete nothing, and say so: pages belong to all servers of the namespace."""
        # An error would end the whole server: SGLang does not expect one here.
        logger.error(
            "kvgw: nothing was cleared: an engine does not delete what others use. Delete the namespace's chunks with "
            "the kvgw command, or wait for their TTL."
        )

    def get_stats(self) -> StorageMetrics | None:
        """Pages and GB/s of each transfer since the last call, where SGLang collects them."""
        if not self._config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        found = StorageMetrics()
        for name, samples in self._samples.items():
            while samples:
                pages, rate = samples.popleft()
                getattr(found, f"{name}_pgs").append(pages)
                getattr(found, f"{name}_bandwidth").append(rate)
        return found

    def close(self) -> None:
        """End the connections and the thread; the host pool is not used afterwards."""
        ended = self._loop.close(self._remote.aclose)
        counts = {**self._counters.take(), **self._counters.gauges}
        logger.info("kvgw: detached%s: %s", "" if ended else ", one call still runs", counts)

    def _known_format(self) -> KVFormat:
        if self._format is None:
            raise FormatError("SGLang registered no host pool")
        return self._format

    def _pages(self, host_indices: torch.Tensor, count: int) -> list[Page]:
        pointers, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        return pages_of(pointers, sizes, count)

    def _load(self, keys: Sequence[str], pages: Sequence[Page]) -> int:
        """Read leading pages, some windows at a time; how many there are."""
        started = self._clock.monotonic()
        until = started + self._options.load_deadline_s
        done = 0
        try:
            kv_format = self._known_format()
            names = [_key(key) for key in keys]
            while done < len(names):
                with Transfer(self._inward, self._inward.take(len(names) - done)) as transfer:
                    part = names[done : done + len(transfer.windows)]
                    if not part:
                        raise Outage("load_bytes is used up by loads that the gateway has not ended")
                    into = transfer.windows
                    got = transfer.run(
                        self._loop,
                        lambda part=part, into=into: self._remote.get(OWN, kv_format, part, into, until),  # type: ignore[misc]
                        until - self._clock.monotonic() + _GRACE_S,
                    )
                    for page, window in zip(pages[done : done + got], into, strict=False):
                        page.write(window)
                done += got
                if got < len(part):
                    break
        except KvgwError as error:
            self._counters.reason("load_outages" if isinstance(error, Outage) else "loads_failed", str(error))
        self._note("prefetch", done, started)
        if self._format is not None:
            seconds = self._clock.monotonic() - started
            nbytes = arrived(done, self._format.chunk_bytes, seconds, self._options.load_deadline_s)
            self._guard.loaded(nbytes, seconds)
            self._counters.show("load_bytes_per_second", self._guard.load_bytes_per_s)
        tokens = self._format.tokens_per_chunk if self._format is not None else 0
        self._counters.add("tokens_loaded", done * tokens)
        self._counters.add("tokens_lost", (len(keys) - done) * tokens)
        return done

    def _store(self, keys: Sequence[str], pages: Sequence[Page], before: Sequence[str] | None) -> int:
        """Store leading pages, some windows at a time; how many the gateway has now.

        `before`: the pages that they follow; None: not known, as at any depth but the first without a parent.
        """
        if not self._options.store:
            return 0
        if not self._config.is_storage_writer:
            return len(keys)  # another rank writes the same bytes
        started = self._clock.monotonic()
        until = started + self._options.store_deadline_s
        done = 0
        try:
            kv_format = self._known_format()
            names = [_key(key) for key in [*(before or ()), *keys]]
            ahead = len(before or ())
            while done < len(keys):
                with Transfer(self._outward, self._outward.take(len(keys) - done)) as transfer:
                    first = ahead + done
                    part = names[first : first + len(transfer.windows)]
                    if not part:
                        self._counters.add("chunks_dropped", len(keys) - done)
                        break
                    for page, window in zip(pages[done:], transfer.windows, strict=False):
                        page.read(window)
                    chunks, parent = transfer.windows, names[first - 1] if first else None
                    depth = first + (before is None)
                    stored = transfer.run(
                        self._loop,
                        lambda part=part, chunks=chunks, parent=parent, depth=depth: self._remote.put(  # type: ignore[misc]
                            OWN, kv_format, part, chunks, parent=parent, depth=depth, until=until
                        ),
                        until - self._clock.monotonic() + _GRACE_S,
                    )
                done += stored
                if stored < len(part):
                    break  # no match reaches what lies behind a gap
        except KvgwError as error:
            self._counters.reason("store_outages", str(error))
        self._note("backup", done, started)
        self._counters.add("tokens_stored", done * (self._format.tokens_per_chunk if self._format is not None else 0))
        return done

    def _note(self, name: str, pages: int, started: float) -> None:
        if pages and self._format is not None:
            seconds = max(self._clock.monotonic() - started, 1e-9)
            self._samples[name].append((pages, pages * self._format.chunk_bytes / seconds / 1e9))


def _key(key: str) -> bytes:
    """The 32 bytes of SGLang's page hash. Raises `FormatError` for a key that is none."""
    try:
        return bytes.fromhex(key)
    except ValueError as error:
        raise FormatError(f"the page key {key[:80]!r} is no hash in hexadecimal") from error


def _tensor(tensor: torch.Tensor) -> Page:
    return Page((tensor.data_ptr(),), (tensor.nbytes,))


def _hardware() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
