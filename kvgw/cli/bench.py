"""``kvgw bench``: what a gateway does on this machine, beside Redis and the machine's own limits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvgw.bench import run as runner
from kvgw.bench.plan import (
    CHUNK_BYTES_DEFAULT,
    ROUND_BYTES_DEFAULT,
    BenchError,
    Options,
    Report,
    Row,
    SocketName,
    TransportName,
    socket_of,
)
from kvgw.cli.output import console, error_console, human_bytes, print_table
from kvgw.endpoint import TcpEndpoint, parse_endpoint
from kvgw.model import Durability

SPEED: Final = ("what", "batch ", "GB/s ", "p50 ", "p99 ", "socket ", "× redis ")
"""socket: share of what two threads move through one."""
WORK: Final = ("what", "batch ", "server ", "later ", "client ", "call ", "limit ")
"""later: the server's, until it was quiet again. limit: share of the server's that its building blocks would need."""


def bench(
    chunk_bytes: Annotated[
        list[int] | None,
        typer.Option(
            help="Length of a chunk in bytes; may be repeated (default: 4 MiB and 64 KiB).", show_default=False
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Chunks in one call (default: what fits 64 MiB, at most 64).", show_default=False)
    ] = None,
    clients: Annotated[int, typer.Option(help="Client processes.")] = 1,
    namespaces: Annotated[int, typer.Option(help="Namespaces that the clients are spread over.")] = 1,
    transport: Annotated[
        TransportName | None,
        typer.Option(
            help="How clients reach the gateway (default: as the endpoint says, else unix).", show_default=False
        ),
    ] = None,
    durability: Annotated[Durability, typer.Option(help="What an acknowledged PUT survives.")] = Durability.STAGED,
    rounds: Annotated[int, typer.Option(help="Rounds that count; one more warms up.")] = 9,
    round_bytes: Annotated[
        int, typer.Option(help="Payload that a client moves in a round; at most 32 calls.")
    ] = ROUND_BYTES_DEFAULT,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Running gateway to measure: unix:/path or tcp:host:port with $KVGW_TOKEN "
            "(default: one is started on a temporary data folder).",
            show_default=False,
        ),
    ] = None,
    redis: Annotated[
        bool | None,
        typer.Option("--redis/--no-redis", help="Measure Redis too (default: if it is installed).", show_default=False),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write rows, limits and machine to this file.")] = None,
) -> None:
    """Measure put, get and match64 from other processes, and Redis the same way in the same rounds.

    GET reads what is in staging and is checked. Every figure is also given as a share of what this machine can do.
    """
    options = Options(
        chunk_bytes=tuple(chunk_bytes or CHUNK_BYTES_DEFAULT),
        batch=batch,
        clients=clients,
        namespaces=namespaces,
        transport=_transport(transport, endpoint),
        durability=durability,
        rounds=rounds,
        round_bytes=round_bytes,
        endpoint=endpoint,
        token=os.environ.get("KVGW_TOKEN"),
        redis=redis,
    )
    with _progress() as progress:
        report = asyncio.run(runner.run(options, progress))
    if json is not None:
        _write(json, report)
    _print(report)


def _transport(given: TransportName | None, endpoint: str | None) -> TransportName:
    if endpoint is None:
        return given or "unix"
    named: SocketName = "tcp" if isinstance(parse_endpoint(endpoint), TcpEndpoint) else "unix"
    if given is not None and socket_of(given) != named:
        raise BenchError(f"--transport {given} does not go with --endpoint {endpoint}; leave --transport out")
    return given or named


@contextmanager
def _progress() -> Iterator[runner.Progress]:
    """A bar on standard error if that is a terminal; silence otherwise."""
    out = error_console()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    )
    with bar:
        task = bar.add_task("starting", total=None)

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield tell


def _write(file: Path, report: Report) -> None:
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except OSError as error:
        raise BenchError(f"the report cannot be written to {file}: {error.strerror}") from error


def _print(report: Report) -> None:
    """Print rows, limits, the machine and notes: tables narrow enough for an ordinary terminal."""
    redis = {(row.op, row.chunk_bytes): row for row in report.rows if row.system == "redis"}
    options, machine = report.options, report.machine
    print_table(
        f"Speed: clients {options['clients']}, transport {options['transport']}, durability {options['durability']}, "
        f"rounds {options['rounds']}",
        SPEED,
        [
            [
                *_subject(row),
                _number(row.gb_per_s, ".2f"),
                _duration(row.p50_us),
                _duration(row.p99_us),
                _number(row.socket_share, ".0%"),
                "" if row.system == "redis" else _number(_ratio(row, redis.get((row.op, row.chunk_bytes))), ".2f"),
            ]
            for row in report.rows
        ],
    )
    print_table(
        "Work: CPU seconds for a GB of server and client; the server's CPU time for a call",
        WORK,
        [
            [
                *_subject(row),
                _number(row.gateway_cpu_s_per_gb, ".2f"),
                _number(row.later_cpu_s_per_gb, ".2f"),
                _number(row.client_cpu_s_per_gb, ".2f"),
                _duration(row.gateway_cpu_us_per_call),
                _number(row.cpu_share, ".0%"),
            ]
            for row in report.rows
        ],
    )
    print_table(
        "Limits of this machine, one core",
        ["block", "GB/s ", "GB per CPU-s "],
        [[name, f"{one.gb_per_s:.2f}", f"{one.gb_per_cpu_s:.2f}"] for name, one in report.limits.items()],
    )
    sentences = [
        ", ".join(sorted({f"{row.system} {row.version}" for row in report.rows})),
        f"{machine['cpu']}, {machine['cpus']} CPUs, Linux {machine['kernel']}, Python {machine['python']}",
        f"load average over 1, 5 and 15 minutes: {machine['load_before']} before, {machine['load_after']} after",
        *(f"! {note}" for note in report.notes),
    ]
    for sentence in sentences:
        console().print(sentence, highlight=False, soft_wrap=True, markup=False)


def _subject(row: Row) -> list[str]:
    size = f"×{human_bytes(row.chunk_bytes)}".replace(".0 ", " ") if row.chunk_bytes else ""
    return [f"{row.system} {row.op}", f"{row.batch}{size}"]


def _ratio(row: Row, redis: Row | None) -> float | None:
    """How many times as fast as Redis: by throughput, or by the median call where nothing is moved."""
    if redis is None:
        return None
    if row.gb_per_s is None or redis.gb_per_s is None:
        return redis.p50_us / row.p50_us
    return row.gb_per_s / redis.gb_per_s


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _duration(microseconds: float | None) -> str:
    if microseconds is None:
        return "–"
    return f"{microseconds / 1000:.1f} ms" if microseconds >= 1000 else f"{microseconds:.0f} µs"
