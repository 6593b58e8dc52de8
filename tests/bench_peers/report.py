"""From samples to rows, and how rows are shown: a table for the terminal, a plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvgw.bench.plan import KIB, MATCH_KEYS, MIB, Case, Limit, Op, Sample
from kvgw.bench.report import percentile
from tests.bench_peers.contenders import About
from tests.bench_peers.plan import Report, Row

Figures: TypeAlias = dict[tuple[str, Op, Case], list[Sample]]
"""Samples of the rounds that count, by system, operation and case."""

OPS: Final = ("put", "get", "match64")
TIERS: Final = ("memory", "postgres", "nvme", "s3")
COLUMNS: Final = ("system", "over", "GB/s", "p50", "p99", "limit", "server", "later", "client", "cpu")
WIDTHS: Final = (20, 4, 6, 9, 9, 6, 7, 7, 7, 5)
NAMING: Final = 2
"""So many columns are words."""


def rows(
    abouts: Mapping[str, About], figures: Figures, limits: Mapping[str, Limit], round_trips_us: Mapping[str, float]
) -> list[Row]:
    """One row for each system, operation and case; the fastest system first within each."""
    made = [
        _row(abouts[name], op, case, samples, limits, round_trips_us) for (name, op, case), samples in figures.items()
    ]
    return sorted(
        made,
        key=lambda row: (TIERS.index(row.tier), -row.chunk_bytes, OPS.index(row.op), -(row.gb_per_s or 0), row.p50_us),
    )


def _row(
    about: About,
    op: Op,
    case: Case,
    samples: Sequence[Sample],
    limits: Mapping[str, Limit],
    round_trips_us: Mapping[str, float],
) -> Row:
    durations = sorted(duration for one in samples for duration in one.call_us)
    p50 = percentile(durations, 0.50)
    gigabytes = sum(one.payload_bytes for one in samples) / 1e9
    speed = statistics.median(one.payload_bytes / 1e9 / one.seconds for one in samples) if gigabytes else None
    server = _per_gb([one.server_cpu_s for one in samples], gigabytes)
    limit, share = limit_of(about, op), None
    if op == "match64" and limit in round_trips_us:
        share = round_trips_us[limit] / p50
    elif speed is not None and limit in limits:
        share = speed / limits[limit].gb_per_s
    least = least_cpu_per_gb(about, op, limits)
    return Row(
        system=about.system,
        version=about.version,
        op=op,
        transport=about.transport,
        tier=about.tier,
        chunk_bytes=0 if op == "match64" else case.chunk_bytes,
        batch=MATCH_KEYS if op == "match64" else case.batch,
        rounds=len(samples),
        calls=len(durations),
        gb_per_s=speed,
        p50_us=p50,
        p99_us=percentile(durations, 0.99),
        gateway_cpu_s_per_gb=server,
        later_cpu_s_per_gb=_per_gb([one.later_cpu_s for one in samples], gigabytes),
        client_cpu_s_per_gb=_per_gb([one.client_cpu_s for one in samples], gigabytes),
        limit=limit if share is not None else None,
        limit_share=share,
        cpu_share=least / server if least is not None and server else None,
    )


def limit_of(about: About, op: Op) -> str:
    """The limit that a system's operation can at most reach."""
    if op == "match64":
        return "tcp" if about.transport == "tcp" else "unix"  # a question in shared memory is announced over a socket
    if about.tier == "nvme":
        return "odirect_write" if op == "put" else "odirect_read"
    if about.transport == "shm":
        return "copy"
    return "unix_socket_send" if about.transport == "unix" and about.tier == "memory" else "tcp_socket_send"


def least_cpu_per_gb(about: About, op: Op, limits: Mapping[str, Limit]) -> float | None:
    """CPU seconds for a GB if the server did nothing but its building blocks; a tier that is written is left out."""
    if op == "match64":
        return None
    blocks = []
    if about.transport in ("unix", "tcp"):
        blocks.append(f"{about.transport}_socket_{'receive' if op == 'put' else 'send'}")
    elif about.transport == "shm" and op == "put":
        blocks.append("copy")
    if about.system.startswith("kvgw"):
        blocks += ["blake3", "aes_256_gcm"] if op == "put" else ["aes_256_gcm"]
    return sum(1 / limits[block].gb_per_cpu_s for block in blocks)


def _per_gb(seconds: Sequence[float | None], gigabytes: float) -> float | None:
    known = [one for one in seconds if one is not None]
    return sum(known) / gigabytes if known and gigabytes else None


def show(report: Report) -> None:
    """Print a table for each thing that was measured, the limits, the machine and the notes."""
    machine = report.machine
    print(*tables(report), sep="\n")
    print(
        "limit: share of the socket, the copy or the disk; for match64, of a bare round trip",
        "server, later, client: CPU seconds for a GB; cpu: share of the server's that its building blocks would take",
        "",
        "; ".join(dict.fromkeys(f"{row.system}: {row.version}" for row in report.rows)),
        f"{machine['cpu']}, {machine['cpus']} CPUs, Linux {machine['kernel']}, Python {machine['python']}",
        f"load average over 1, 5 and 15 minutes: {machine['load_before']} before, {machine['load_after']} after",
        f"load average over 1 minute after each round: {report.load_by_round}",
        f"{report.rounds} rounds, {report.seconds:.0f} s in all",
        *(f"! {note}" for note in report.notes),
        sep="\n",
    )


def tables(report: Report) -> list[str]:
    """Lines of 80 columns: a table for each thing that was measured, and the limits."""
    lines: list[str] = []
    for (tier, op, _), found in grouped(report.rows).items():
        lines += [f"{title(op, found[0])}, {tier}", _columns(COLUMNS)]
        lines += [*(_columns(cells(row)) for row in found), ""]
    lines.append(f"{'limits in the same rounds, one core (disk: four threads)':<60}  GB/s  GB per CPU-s")
    lines += [f"{name:<60}{one.gb_per_s:>6.2f}{one.gb_per_cpu_s:>14.2f}" for name, one in report.limits.items()]
    lines += [f"{name + ' round trip':<60}{value:>6.0f} µs" for name, value in report.round_trips_us.items()]
    return [*lines, ""]


def _columns(words: Sequence[str]) -> str:
    return "".join(
        f"{word:<{width}}" if at < NAMING else f"{word:>{width}}"
        for at, (word, width) in enumerate(zip(words, WIDTHS, strict=True))
    )


def grouped(found: Sequence[Row]) -> dict[tuple[str, str, int], list[Row]]:
    """Rows that answer the same question, in their order."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in found:
        groups.setdefault((row.tier, row.op, row.chunk_bytes), []).append(row)
    return groups


def cells(row: Row) -> list[str]:
    """A row's cells, as `COLUMNS` names them."""
    return [
        row.system,
        row.transport,
        _number(row.gb_per_s, ".2f"),
        _duration(row.p50_us),
        _duration(row.p99_us),
        _number(row.limit_share, ".0%"),
        _number(row.gateway_cpu_s_per_gb, ".2f"),
        _number(row.later_cpu_s_per_gb, ".2f"),
        _number(row.client_cpu_s_per_gb, ".2f"),
        _number(row.cpu_share, ".0%"),
    ]


def title(op: str, row: Row) -> str:
    """What was asked: get of 16 × 4 MiB."""
    if not row.chunk_bytes:
        return op
    size = f"{row.chunk_bytes // MIB} MiB" if row.chunk_bytes >= MIB else f"{row.chunk_bytes // KIB} KiB"
    return f"{op} of {row.batch} × {size}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _duration(microseconds: float) -> str:
    if microseconds >= 1e6:
        return f"{microseconds / 1e6:.1f} s"
    return f"{microseconds / 1e3:.1f} ms" if microseconds >= 1e3 else f"{microseconds:.0f} µs"


def plot(report: Report, file: Path) -> None:
    """Bars, a panel for each thing that was measured; the limit as a line. The name's ending says the format."""
    import matplotlib as mpl  # half a second that only a plot needs

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    groups = grouped(report.rows)
    columns = 2
    lines = -(-len(groups) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(11, 2.6 * lines), squeeze=False, layout="constrained")
    for panel, (key, found) in zip(axes.flat, groups.items(), strict=False):
        _bars(panel, key, found, report)
    for panel in axes.flat[len(groups) :]:
        panel.set_axis_off()
    load = report.machine["load_before"]
    figure.suptitle(f"kvgw and others: medians of {report.rounds} rounds, load average before {load}", fontsize=10)
    figure.savefig(file)
    plt.close(figure)


def _bars(panel: Any, key: tuple[str, str, int], found: Sequence[Row], report: Report) -> None:
    tier, op, _ = key
    names = [f"{row.system}, {row.transport}" for row in found][::-1]
    values = [row.p50_us if row.gb_per_s is None else row.gb_per_s for row in found][::-1]
    colours = ["#d95f02" if row.system.startswith("kvgw") else "#7f8fa6" for row in found][::-1]
    bars = panel.barh(names, values, color=colours)
    panel.bar_label(bars, [f"{value:.0f}" if op == "match64" else f"{value:.2f}" for value in values], padding=3)
    panel.margins(x=0.15)
    panel.set_title(f"{title(op, found[0])}, {tier}", fontsize=9)
    panel.set_xlabel("µs, median: less is better" if op == "match64" else "GB/s", fontsize=8)
    panel.tick_params(labelsize=8)
    if op == "match64":
        panel.set_xscale("log")
    elif tier == "nvme":
        panel.axvline(report.limits[found[0].limit].gb_per_s if found[0].limit else 0, color="#333", linestyle=":")
