"""What vLLM logs and exports of this adapter: its counters, as ``vllm:kvgw_<name>_total``, and its gauges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvgw.engines.counters import COUNTERS, GAUGES


class KvgwStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Counts since the last report, and the gauges as they are; `data` is name → number."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        gauges = {name: value for data in (self.data, other.data) for name, value in data.items() if name in GAUGES}
        self.data = dict(Counter(self.data) + Counter(other.data)) | gauges
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KvgwPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One Prometheus metric for each name in `COUNTERS` and `GAUGES`, and engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        counter = self._counter_cls
        gauge = partial(self._gauge_cls, multiprocess_mode="mostrecent")

        def per_engine(make: Callable[..., Any], name: str, text: str) -> dict[int, Any]:
            family = make(f"vllm:kvgw_{name}", f"kvgw: {text}.", labelnames=labelnames)
            return {engine: family.labels(*values) for engine, values in per_engine_labelvalues.items()}

        self._counters = {name: per_engine(counter, name, text) for name, text in COUNTERS.items()}
        self._gauges = {name: per_engine(gauge, name, text) for name, text in GAUGES.items()}

    def observe(self, transfer_stats_data: dict[str, float], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in GAUGES:
                self._gauges[name][engine_idx].set(value)
            else:
                self._counters[name][engine_idx].inc(value)
