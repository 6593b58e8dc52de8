"""`KvgwTier`: what vLLM loads. Its scheduler asks and submits; one thread of its own talks to the gateway."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvgw.engines.breakeven import arrived
from kvgw.engines.counters import COUNTERS, GAUGES, Counters
from kvgw.engines.keyed import KeyedRemote
from kvgw.engines.loop import LoopThread
from kvgw.engines.remote import Found
from kvgw.engines.vllm_tier.format import format_of
from kvgw.engines.vllm_tier.jobs import Allowance, Ended, Job, Jobs
from kvgw.engines.vllm_tier.lookups import Lookups, Whose
from kvgw.engines.vllm_tier.options import parse_tier_options
from kvgw.engines.vllm_tier.transfers import Chunk, Transfers
from kvgw.runtime import SystemClock

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import (
        OffloadingMetricMetadata,
        OffloadingSpec,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob

logger = init_logger("vllm.kvgw")

_METRICS = "vllm:kvgw_tier_"


class KvgwTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Keeps chunks of vLLM's primary tier in a gateway. See docs/engines/vllm-tier.md.

    Raises `FormatError` while the engine starts, for settings or a model that cannot be served right. Afterwards
    nothing here waits but `drain_jobs`, every job ends by its deadline, and what the gateway cannot give is a miss.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **settings: object,
    ) -> None:
        """`settings`: the entry of ``secondary_tiers``, without what vLLM reads itself; unknown ones are refused."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._options, self._tenants = parse_tier_options(settings)
        self.locality = None if self._options.locality is None else Locality(self._options.locality)
        self._format = format_of(
            offloading_spec.config,
            self.block_size_bytes,
            replicated=offloading_spec.replicated_layout,
            options=self._options,
            abi=(("vllm", vllm.__version__), ("torch", version("torch"))),
        )
        self._memory = primary_kv_view.cast("B")
        self._whose: dict[str, Whose] = {}
        self._counters = Counters(logger)
        self._clock = SystemClock()
        self._guard = self._options.guard()
        self._loop = LoopThread("kvgw-vllm-tier")
        self._remote = KeyedRemote(self._options, self._tenants, self._counters, self._clock)
        self._transfers = Transfers(self._remote, self._format, self._counters, self._clock)
        self._jobs = Jobs(self._loop, self._counters, self._clock)
        self._inward = Allowance(max(1, self._options.load_bytes // self.block_size_bytes))
        self._outward = Allowance(max(1, self._options.store_bytes // self.block_size_bytes))
        self._lookups = Lookups(
            self._match,
            self._loop,
            self._counters,
            self._clock,
            deadline_s=self._options.lookup_deadline_s,
            belief_s=self._options.lease_s,
        )
        logger.info(
            "kvgw: chunks of %d tokens, %d bytes: %s",
            self._format.tokens_per_chunk,
            self.block_size_bytes,
            self._format,
        )

    # Requests and lookups.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._whose_of(req_context)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """RETRY until the gateway has said, by ``lookup_deadline_s`` after the step in which it was first asked."""
        found = self._lookups.look_up(req_context.req_id, self._whose_of(req_context), key)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.forget(req_context.req_id)
        self._whose.pop(req_context.req_id, None)

    # Jobs.

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Store chunks. Their rows are read until the job is reported."""
        whose = self._whose_of(job_metadata.req_context)
        job = _job(job_metadata, whose)
        chunks = self._chunks(job_metadata)
        fits = self._outward.take(len(chunks)) if self._options.store else 0
        if self._options.store and fits < len(chunks):
            self._counters.reason(
                "chunks_dropped", "more chunks wait to be stored than store_bytes allows", len(chunks) - fits
            )
        if not fits:
            self._jobs.refuse(job)
            return
        until = self._clock.monotonic() + self._options.store_deadline_s
        self._jobs.start(job, partial(self._store, whose, chunks[:fits], until))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Read chunks into their rows, which are written until the job is reported."""
        whose = self._whose_of(job_metadata.req_context)
        job = _job(job_metadata, whose)
        chunks = self._chunks(job_metadata)
        fits = self._inward.take(len(chunks))
        if fits < len(chunks):
            self._counters.reason("load_outages", "more chunks wait to be loaded than load_bytes allows")
            self._counters.add("tokens_lost", (len(chunks) - fits) * self._format.tokens_per_chunk)
        if not fits:
            self._jobs.refuse(job)
            return
        until = self._clock.monotonic() + self._options.load_deadline_s
        self._jobs.start(job, partial(self._load, whose, chunks[:fits], until))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs whose rows nothing here touches any more."""
        return [self._report(ended) for ended in self._jobs.take()]

    def drain_jobs(self) -> None:
        """Wait for every job: the longest of their deadlines at most, where the gateway does not answer."""
        self._jobs.drain()

    def shutdown(self) -> None:
        """End jobs, connections and the thread; nothing here uses the primary tier's memory afterwards.

        Raises `RuntimeError` where that cannot be promised: vLLM then keeps the memory.
        """
        if not self._loop.close(self._remote.aclose):
            raise RuntimeError("kvgw's thread did not end, and may still use the primary tier's memory")
        self._memory.release()

    # What vLLM exports.

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {
            **{_METRICS + name: OffloadingCounterMetadata(f"kvgw: {text}.") for name, text in COUNTERS.items()},
            **{_METRICS + name: OffloadingGaugeMetadata(f"kvgw: {text}.") for name, text in GAUGES.items()},
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        stats = OffloadingConnectorStats()
        for name, count in self._counters.take().items():
            stats.increase_counter(_METRICS + name, count)
        for name, value in self._counters.gauges.items():
            stats.set_gauge(_METRICS + name, value)
        return None if stats.is_empty() else stats

    @classmethod
    def config_info_keys(cls, tier_config: Mapping[str, Any]) -> tuple[str, ...]:
        return ("kvgw_endpoint", "kvgw_model", "kvgw_tokens_per_chunk", "kvgw_chunk_bytes")

    def config_info(self) -> dict[str, str | int]:
        return {
            "kvgw_endpoint": ",".join(self._options.endpoints),
            "kvgw_model": self._format.model,
            "kvgw_tokens_per_chunk": self._format.tokens_per_chunk,
            "kvgw_chunk_bytes": self._format.chunk_bytes,
        }

    # In the tier's own thread.

    async def _match(self, tenant: str, keys: list[bytes], until: float) -> Found:
        found = await self._remote.match(tenant, [self._format], keys, until)
        tokens, nbytes = found.count * self._format.tokens_per_chunk, found.count * self._format.chunk_bytes
        if tokens and not self._guard.pays(tokens, nbytes, self._clock.monotonic()):
            self._counters.add("hits_declined")
            return Found(0, answered=True)
        self._counters.add("tokens_planned", tokens)
        return found

    async def _store(self, whose: Whose, chunks: list[Chunk], until: float) -> frozenset[bytes]:
        try:
            return await self._transfers.store(whose, chunks, until)
        finally:
            self._outward.give(len(chunks))

    async def _load(self, whose: Whose, chunks: list[Chunk], until: float) -> frozenset[bytes]:
        started = self._clock.monotonic()
        try:
            there = await self._transfers.load(whose, chunks, until)
        finally:
            self._inward.give(len(chunks))
        seconds = self._clock.monotonic() - started
        nbytes = arrived(len(there), self._format.chunk_bytes, seconds, self._options.load_deadline_s)
        self._guard.loaded(nbytes, seconds)
        self._counters.show("load_bytes_per_second", self._guard.load_bytes_per_s)
        return there

    def _report(self, ended: Ended) -> JobResult:
        job = ended.job
        if job.load and not ended.success:
            # Found once more, they would be loaded in vain once more.
            self._lookups.lost(job.whose, [key for key in job.keys if key not in ended.done])
        return JobResult(
            job_id=job.number,
            success=ended.success,
            successful_keys=tuple(ended.done) if job.load and ended.done and not ended.success else None,
            transfer_time=ended.seconds,
            transfer_bytes=len(ended.done) * self.block_size_bytes,
        )

    def _whose_of(self, context: ReqContext) -> Whose:
        known = self._whose.get(context.req_id)
        if known is None:
            tenant, salt = self._tenants.resolve(None, context.kv_transfer_params)
            known = self._whose[context.req_id] = Whose.of(tenant, salt)
        return known

    def _chunks(self, metadata: TransferJob) -> list[Chunk]:
        """The chunks of a job, in the order of their prompt where vLLM says it."""
        size, tokens, context = self.block_size_bytes, self._format.tokens_per_chunk, metadata.req_context
        # All of the request's chunks, those included of which this tier never heard; vLLM has no other access.
        keys: Mapping[OffloadKey, int] = getattr(context, "_offload_key_positions", {})
        at = {end: key for key, end in keys.items()}
        chunks = []
        for key, row in zip(metadata.keys, metadata.chunk_ids, strict=True):
            memory = self._memory[int(row) * size : (int(row) + 1) * size]
            end = context.get_offload_key_position(key)
            known = end is not None and end >= tokens
            depth, parent = (end // tokens - 1, at.get(end - tokens)) if known else (None, None)
            chunks.append(Chunk(key, memory, depth, parent))
        return sorted(chunks, key=lambda chunk: -1 if chunk.depth is None else chunk.depth)


def _job(metadata: TransferJob, whose: Whose) -> Job:
    keys: Collection[bytes] = metadata.keys
    return Job(metadata.job_id, metadata.is_promotion, whose, tuple(keys))
