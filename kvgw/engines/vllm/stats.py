"""What vLLM logs and exports of this adapter: its counters, as ``vllm:kvgw_<name>_total``."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvgw.engines.counters import COUNTERS


class KvgwStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Counts since the last report; `data` is counter → count."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KvgwPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One Prometheus counter for each name in `COUNTERS` and engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: {
                engine: family.labels(*values)
                for family in [self._counter_cls(f"vllm:kvgw_{name}", f"kvgw: {text}.", labelnames=labelnames)]
                for engine, values in per_engine_labelvalues.items()
            }
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, int], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)
