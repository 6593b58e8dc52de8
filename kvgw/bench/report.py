"""From samples to rows. GB are 10**9 bytes."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from kvgw.bench.plan import MATCH_KEYS, Case, Limit, Op, Options, Row, Sample, SystemName, socket_of
from kvgw.runtime import usable_cpus

Figures: TypeAlias = dict[tuple[SystemName, Op, Case], list[Sample]]


def rows(
    options: Options, versions: Mapping[SystemName, str], figures: Figures, limits: Mapping[str, Limit]
) -> list[Row]:
    """One row for each system, operation and case, systems side by side."""
    made = [
        _row(options, versions[system], system, op, case, samples, limits)
        for (system, op, case), samples in figures.items()
    ]
    order = {op: number for number, op in enumerate(("put", "get", "match64"))}
    return sorted(made, key=lambda row: (-row.chunk_bytes, order[row.op], row.system))


def _row(
    options: Options,
    version: str,
    system: SystemName,
    op: Op,
    case: Case,
    samples: Sequence[Sample],
    limits: Mapping[str, Limit],
) -> Row:
    durations = sorted(duration for one in samples for duration in one.call_us)
    gigabytes = sum(one.payload_bytes for one in samples) / 1e9
    gb_per_s = statistics.median(one.payload_bytes / 1e9 / one.seconds for one in samples) if gigabytes else None
    client_cpu = sum(one.client_cpu_s for one in samples)
    server_cpu = _sum_known([one.server_cpu_s for one in samples])
    later_cpu = _sum_known([one.later_cpu_s for one in samples])
    per_gb = None if server_cpu is None or not gigabytes else server_cpu / gigabytes
    least = _least_cpu_per_gb(system, op, options, limits)
    socket = limits[f"{socket_of(options.transport)}_socket_send"].gb_per_s
    return Row(
        system=system,
        version=version,
        op=op,
        transport=options.transport if system == "kvgw" else socket_of(options.transport),
        chunk_bytes=0 if op == "match64" else case.chunk_bytes,
        batch=MATCH_KEYS if op == "match64" else case.batch,
        clients=options.clients,
        rounds=len(samples),
        calls=len(durations),
        gb_per_s=gb_per_s,
        p50_us=percentile(durations, 0.50),
        p99_us=percentile(durations, 0.99),
        gateway_cpu_s_per_gb=per_gb,
        later_cpu_s_per_gb=None if later_cpu is None or not gigabytes else later_cpu / gigabytes,
        client_cpu_s_per_gb=client_cpu / gigabytes if gigabytes else None,
        gateway_cpu_us_per_call=None if server_cpu is None else server_cpu * 1e6 / len(durations),
        client_cpu_us_per_call=client_cpu * 1e6 / len(durations),
        socket_share=None if gb_per_s is None else gb_per_s / socket,
        cpu_share=least / per_gb if least is not None and per_gb else None,
    )


def _least_cpu_per_gb(system: SystemName, op: Op, options: Options, limits: Mapping[str, Limit]) -> float | None:
    """CPU seconds for a GB if the server did nothing but its building blocks; a tier that is written is left out."""
    if op == "match64":
        return None
    blocks = [f"{socket_of(options.transport)}_socket_{'receive' if op == 'put' else 'send'}"]
    if system == "kvgw":
        if options.transport == "shm":
            blocks = ["copy"] if op == "put" else []
        blocks += ["blake3", "aes_256_gcm"] if op == "put" else ["aes_256_gcm"]
    return sum(1 / limits[block].gb_per_cpu_s for block in blocks)


def _sum_known(values: Sequence[float | None]) -> float | None:
    """The sum; None where a value is not known, in which case none of them is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the ordered values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median_limits(measured: Sequence[Mapping[str, Limit]]) -> dict[str, Limit]:
    """The median of each limit over the rounds."""
    return {
        name: Limit(
            statistics.median(one[name].gb_per_s for one in measured),
            statistics.median(one[name].gb_per_cpu_s for one in measured),
        )
        for name in measured[0]
    }


def machine(
    load_before: tuple[float, float, float], load_after: tuple[float, float, float]
) -> dict[str, str | int | float | list[float]]:
    """What was measured on, and how busy it was."""
    return {
        "cpu": _cpu_model(),
        "cpus": usable_cpus(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": [round(one, 2) for one in load_before],
        "load_after": [round(one, 2) for one in load_after],
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()
