"""``kvgw usage`` and ``kvgw explain``: what a tenant used, and why there was no hit."""

from __future__ import annotations

import csv
import datetime as dt
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from kvgw.cli.administration import ask_admin
from kvgw.cli.options import Config, Data, Json
from kvgw.cli.output import console, human_bytes, print_json, print_table
from kvgw.durations import duration_ms
from kvgw.runtime import SystemClock
from tenancy.metering import METERS

Tenant = Annotated[str, typer.Option("--tenant", help="A tenant; - for the caller's own.")]


class Format(StrEnum):
    """How usage is printed."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


class By(StrEnum):
    """What is added up."""

    HOUR = "hour"
    DAY = "day"
    MONTH = "month"


def usage(
    tenant: Tenant = "-",
    namespace: Annotated[str | None, typer.Option(help="One namespace.", show_default="all")] = None,
    since: Annotated[str, typer.Option(help="How far back, as in 24h or 90d.")] = "30d",
    by: Annotated[By, typer.Option(help="Add up hours, days or months of UTC.")] = By.DAY,
    form: Annotated[Format, typer.Option("--format", help="table, csv or json.")] = Format.TABLE,
    data: Data = None,
    config: Config = None,
) -> None:
    """Say what a tenant asked for and kept, by namespace and time."""
    query: dict[str, str | int] = {"since_ms": SystemClock().now_ms() - duration_ms(since), "by": by.value}
    if namespace is not None:
        query["namespace"] = namespace
    found = ask_admin(data, config, "GET", f"/tenants/{tenant}/usage", query=query)
    if form is Format.JSON:
        print_json(found)
    elif form is Format.CSV:
        _print_csv(found)
    else:
        _print_usage(found, by)


def explain(
    key: Annotated[list[str], typer.Argument(help="Engine keys, in hexadecimal.")],
    fingerprint: Annotated[
        str | None, typer.Option(help="The KV format's fingerprint, in hexadecimal.", show_default=False)
    ] = None,
    canonical: Annotated[
        str | None, typer.Option(help="Or its canonical form, in hexadecimal.", show_default=False)
    ] = None,
    tenant: Tenant = "-",
    namespace: Annotated[str, typer.Option(help="Where the keys belong.")] = "default",
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Say why keys cannot be had: expired, evicted, deleted, over quota, another KV format, …"""
    body = {"keys": key, "fingerprint": fingerprint, "canonical": canonical}
    answer = ask_admin(data, config, "POST", f"/tenants/{tenant}/namespaces/{namespace}/explain", body=body)
    if json:
        print_json(answer)
        return
    rows = [
        [one["key"], one["why"].replace("_", " "), _time(one["at_ms"], "%Y-%m-%d %H:%M:%S")]
        for one in answer["answers"]
    ]
    print_table("Keys", ["key", "why", "since (UTC)"], rows)
    if answer["differences"]:
        differences = [[one["field"], one["asked"], one["nearest"]] for one in answer["differences"]]
        print_table("KV format", ["field", "asked for", "nearest registered"], differences)
    if answer["sentence"]:
        console().print(answer["sentence"], highlight=False, markup=False, soft_wrap=True)


def _print_csv(found: Sequence[Mapping[str, Any]]) -> None:
    lines = csv.writer(sys.stdout, lineterminator="\n")
    lines.writerow(["namespace", "start_utc", *METERS])
    for one in found:
        start = _time(one["start_ms"], "%Y-%m-%dT%H:%M:%SZ")
        lines.writerow([one["namespace"], start, *(one["meters"].get(meter, 0) for meter in METERS)])


def _print_usage(found: Sequence[Mapping[str, Any]], by: By) -> None:
    form = {By.HOUR: "%Y-%m-%d %H:00", By.DAY: "%Y-%m-%d", By.MONTH: "%Y-%m"}[by]
    columns = ["namespace", by.value, "lookups ", "keys hit ", "tokens hit ", "read ", "stored "]
    rows = []
    for one in found:
        meters = one["meters"]
        asked = meters.get("matched_keys", 0) + meters.get("missed_keys", 0)
        share = f" ({100 * meters.get('matched_keys', 0) / asked:.0f} %)" if asked else ""
        rows.append(
            [
                one["namespace"],
                _time(one["start_ms"], form),
                str(meters.get("lookups", 0)),
                f"{meters.get('matched_keys', 0)}{share}",
                str(meters.get("matched_tokens", 0)),
                human_bytes(sum(count for name, count in meters.items() if name.startswith("get_bytes_"))),
                human_bytes(meters.get("put_bytes", 0)),
                str(meters.get("deleted_chunks", 0)),
                str(meters.get("limit_hits", 0)),
                f"{meters.get('kv_byte_hours', 0) / 1e9:.3f}",
            ]
        )
    print_table("Usage", [*columns, "deleted ", "refused ", "kept, GB·h "], rows)


def _time(time_ms: int, form: str) -> str:
    return dt.datetime.fromtimestamp(time_ms / 1000, dt.UTC).strftime(form) if time_ms else "–"
