"""``kvgw replay``: recorded traffic through a gateway of its own, and what a cache of a given size could reuse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvgw.cli.options import Json
from kvgw.cli.output import console, error_console, human_bytes, print_json, print_table
from kvgw.replay import ideal, run
from kvgw.replay.outcome import ReplayReport
from kvgw.replay.plan import BYTES_PER_TOKEN, PREFILL_TOKENS_PER_S, ReplayOptions
from kvgw.replay.synthetic import synthetic_trace
from kvgw.replay.trace import Request, read_trace

SYNTHETIC_REQUESTS: Final = 500
PARTS: Final = (32, 16, 8, 4, 2)
"""Capacities of the plan: the blocks that an infinite cache would hold, divided by these."""


class Planned(msgspec.Struct, frozen=True):
    """One capacity: the share of blocks that is reused by each order of eviction."""

    blocks: int
    bytes: int
    share: dict[str, float]


def replay(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="Trace in the format of the Mooncake traces; none: a small synthetic one.", show_default=False
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="The first so many requests only.", show_default=False)
    ] = None,
    tenants: Annotated[int, typer.Option(help="Tenants that the conversations are spread over.")] = 4,
    bytes_per_token: Annotated[int, typer.Option(help="Length of a token's KV bytes.")] = BYTES_PER_TOKEN,
    speed: Annotated[
        float, typer.Option(help="Times faster than recorded; 0: each tenant as fast as it is answered.")
    ] = 0.0,
    nvme_bytes: Annotated[int, typer.Option(help="Capacity of the NVMe tier.")] = 8 * 1024**3,
    staging_bytes: Annotated[int, typer.Option(help="Size of staging.")] = 256 * 1024**2,
    prefill_tokens_per_s: Annotated[
        float, typer.Option(help="What an engine computes, for the seconds saved.")
    ] = PREFILL_TOKENS_PER_S,
    plan: Annotated[
        bool, typer.Option("--plan", help="No gateway: what caches of several sizes would reuse, and how they evict.")
    ] = False,
    json: Json = False,
) -> None:
    """Replay a request trace: what is reused, from which tier, how fast, and what an infinite cache would reuse."""
    chosen = synthetic_trace(requests or SYNTHETIC_REQUESTS) if trace is None else read_trace(trace, requests)
    options = ReplayOptions(
        tenants=tenants,
        bytes_per_token=bytes_per_token,
        speed=speed,
        nvme_bytes=nvme_bytes,
        staging_bytes=staging_bytes,
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
    if plan:
        _show_plan(chosen, options, json)
        return
    with _progress(len(chosen)) as step:
        report = asyncio.run(run.replay(chosen, options, step))
    if json:
        print_json(report)
    else:
        _show(report, options)
    if report.wrong:
        raise typer.Exit(1)


def _show_plan(requests: list[Request], options: ReplayOptions, json: bool) -> None:
    perfect = ideal.infinite(requests)
    distinct = ideal.distinct(requests)
    rows = [
        Planned(
            blocks,
            blocks * options.chunk_bytes,
            {order.value: ideal.bounded(requests, blocks, order).share for order in ideal.Order},
        )
        for blocks in (max(1, distinct // part) for part in PARTS)
    ]
    rows.append(
        Planned(distinct, distinct * options.chunk_bytes, {order.value: perfect.share for order in ideal.Order})
    )
    if json:
        print_json(rows)
        return
    print_table(
        f"Reuse by capacity: {len(requests)} requests, {perfect.blocks} blocks, {distinct} of them different",
        ["blocks ", "bytes ", *(f"{order.value} " for order in ideal.Order)],
        [[str(one.blocks), human_bytes(one.bytes), *(f"{share:.2%}" for share in one.share.values())] for one in rows],
    )
    console().print("One cache for all requests. The last line holds everything.", highlight=False)


def _show(report: ReplayReport, options: ReplayOptions) -> None:
    read = sum(report.bytes_by_tier.values())
    print_table(
        f"Replay: {report.requests} requests of {options.tenants} tenants in {report.seconds:.1f} s",
        ["blocks", "count ", "share "],
        [
            ["asked for", str(report.blocks), ""],
            ["reused", str(report.reused), f"{report.share:.2%}"],
            ["reused by an infinite cache", "", f"{report.infinite_share:.2%}"],
            *(
                [what, str(count), ""]
                for what, count in (
                    ("stored", report.stored),
                    ("refused", report.refused),
                    ("evicted", report.evicted),
                    ("wrong", report.wrong),
                    ("calls without an answer", report.outages),
                )
            ),
        ],
    )
    print_table(
        "Read from",
        ["tier", "bytes ", "share "],
        [[tier, human_bytes(count), f"{count / read:.0%}"] for tier, count in report.bytes_by_tier.items()],
    )
    print_table(
        "Calls",
        ["call", "calls ", "p50 ", "p99 "],
        [[name, str(one.calls), f"{one.p50_ms:.2f} ms", f"{one.p99_ms:.2f} ms"] for name, one in report.calls.items()],
    )
    line = (
        f"prefill saved: {report.prefill_seconds_saved:.1f} s of an engine that computes "
        f"{options.prefill_tokens_per_s:g} tokens a second, less the time of look-ups and reads"
    )
    if options.speed:
        line += f"; at most {report.late_s:.2f} s behind the trace"
    console().print(line, highlight=False, soft_wrap=True)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error if that is a terminal; silence otherwise."""
    out = error_console()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    )
    with bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)
