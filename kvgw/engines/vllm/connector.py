"""`KvgwConnector`: what vLLM loads. Both of its halves do the work; this class translates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

from kvgw.engines.blocks import Paged
from kvgw.engines.counters import Counters
from kvgw.engines.options import parse_options
from kvgw.engines.vllm.facts import check_supported, digest_dir_of, read_facts
from kvgw.engines.vllm.format import format_of
from kvgw.engines.vllm.handover import check_waits
from kvgw.engines.vllm.plan import Loaded, Plan
from kvgw.engines.vllm.scheduler import SchedulerHalf
from kvgw.engines.vllm.stats import KvgwPromMetrics, KvgwStats
from kvgw.engines.vllm.worker import WorkerHalf
from kvgw.errors import FormatError
from kvgw.kvformat import KVFormat
from kvgw.runtime import SystemClock

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvgw")


@dataclass
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """The plan of one step, as vLLM carries it to the workers."""

    plan: Plan = field(default_factory=Plan)


@dataclass
class WorkerFormat(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """The canonical KV format of one worker, as vLLM carries it to the scheduler."""

    canonical: bytes


@dataclass
class WorkerTimes(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """How long loads took, as vLLM carries it from the workers to the scheduler."""

    loads: list[Loaded]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerTimes:
        assert isinstance(other, WorkerTimes)
        return WorkerTimes(self.loads + other.loads)


class KvgwConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps the KV of prompts in a gateway and takes it back. See docs/engines/vllm.md.

    Raises `FormatError` while the engine starts, for settings or a model that cannot be served right. Afterwards it
    raises nothing: what the gateway cannot give is computed.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_supported(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if not transfer.is_kv_consumer:
            raise FormatError(
                f"kv_role {transfer.kv_role!r} would never read; use kv_both, or kv_consumer to only read"
            )
        options = parse_options(transfer.kv_connector_extra_config)
        self._options = structs.replace(options, store=options.store and transfer.is_kv_producer)
        check_waits(self._options)
        self._tenants = self._options.tenants()
        self._counters = Counters(logger)
        self._clock = SystemClock()
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._format: KVFormat | None = None
        if role is not KVConnectorRole.SCHEDULER:
            return
        if transfer.kv_load_failure_policy != "recompute":
            logger.warning(
                "kvgw: kv_load_failure_policy is %r: EVERY REQUEST WHOSE KV CANNOT BE READ FROM THE GATEWAY WILL FAIL. "
                'Set "kv_load_failure_policy": "recompute" in --kv-transfer-config.',
                transfer.kv_load_failure_policy,
            )
        self._scheduler = SchedulerHalf(
            self._options,
            self._tenants,
            self._counters,
            self._clock,
            block_tokens=kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
            digest_dir=digest_dir_of(self._options),
        )

    # The scheduler's half.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], WorkerFormat]) -> None:
        formats = [KVFormat.from_canonical(metadata[rank].canonical) for rank in sorted(metadata)]
        parallel = self._vllm_config.parallel_config
        workers = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        if len(formats) != workers:
            raise FormatError(f"{len(formats)} workers said in which format they keep KV, and there are {workers}")
        assert self._scheduler is not None
        self._scheduler.learn(formats)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepPlan:
        assert self._scheduler is not None
        return StepPlan(self._scheduler.plan(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._scheduler is not None
        if connector_output.invalid_block_ids:
            self._scheduler.lost(connector_output.invalid_block_ids)
        times = connector_output.kv_connector_worker_meta
        if times is not None:
            assert isinstance(times, WorkerTimes)
            self._scheduler.measured(times.loads)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        self._scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is lost is a miss later, never a reason to compute a request twice."""
        return False

    # The worker's half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        facts = read_facts(self._vllm_config, self._kv_cache_config, kv_caches, self._options)
        self._format = format_of(facts, self._options.tokens_per_chunk)
        caches = Paged([kv_caches[name] for name in facts.layers], self._kv_cache_config.num_blocks)
        self._worker = WorkerHalf(
            self._options,
            self._tenants,
            self._counters,
            self._clock,
            kv_format=self._format,
            caches=caches,
            blocks_per_chunk=self._options.tokens_per_chunk // facts.block_tokens,
        )
        logger.info(
            "kvgw: chunks of %d tokens, %d bytes, in %s; KV format: %s",
            self._options.tokens_per_chunk,
            self._format.chunk_bytes,
            self._format.layout,
            self._format.engine_abi,
        )

    def get_handshake_metadata(self) -> WorkerFormat | None:
        return None if self._format is None else WorkerFormat(self._format.canonical())

    def start_load_kv(
        self,
        forward_context: Any,
        scheduler_output: Any = None,
        request_state_indices: Any = None,
        request_ids: Any = None,
        num_tokens: Any = None,
        attn_metadata: Any = None,
    ) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done before a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any) -> None:
        """Chunks are stored whole, after the step."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.start_stores(self._plan())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None if self._worker is None else self._worker.finished_loads()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> WorkerTimes | None:
        loads = [] if self._worker is None else self._worker.take_loaded()
        return WorkerTimes(loads) if loads else None

    def _plan(self) -> Plan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepPlan)
        return metadata.plan

    # Both.

    def get_kv_connector_stats(self) -> KvgwStats | None:
        counts = self._counters.take()
        return KvgwStats(data={**counts, **self._counters.gauges}) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvgwStats | None:
        return KvgwStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvgwPromMetrics:
        return KvgwPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End the transfers; the caches may be freed afterwards."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
