"""``kvgw scrub``: open blobs again that nobody reads."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvgw.cli.administration import ask_admin
from kvgw.cli.options import Config, Data, Json
from kvgw.cli.output import console, human_bytes, print_json, print_table


def scrub(
    rate: Annotated[
        int | None, typer.Option(min=0, help="Bytes a second; 0: no limit (default: 64 MiB).", show_default=False)
    ] = None,
    sample: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the blobs, drawn by chance.")] = 1.0,
    status: Annotated[bool, typer.Option("--status", help="Only say how far the last one is.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the one that is under way.")] = False,
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Have the running gateway open every blob of its NVMe and of S3 again; damaged ones are quarantined and replaced.

    Exit code 1 when the last scrub found damage, or did not come to its end.
    """
    if status or stop:
        answer = ask_admin(data, config, "DELETE" if stop else "GET", "/scrub")
    else:
        pace = {} if rate is None else {"rate": rate}
        answer = ask_admin(data, config, "POST", "/scrub", body={**pace, "sample": sample})
    if json:
        print_json(answer)
    else:
        _print(answer)
    damaged = sum(one["damaged"] for one in answer["tiers"].values())
    if damaged or answer["state"] in ("failed", "refused"):
        raise typer.Exit(1)


def _print(answer: Any) -> None:
    out = console()
    if answer["state"] == "none":
        out.print("nothing was scrubbed since the gateway started")
        return
    print_table(
        f"Scrub: {answer['state']}",
        ["tier", "blobs ", "bytes ", "damaged ", "skipped "],
        [
            [label, str(one["blobs"]), human_bytes(one["bytes"]), str(one["damaged"]), str(one["skipped"])]
            for label, one in answer["tiers"].items()
        ],
    )
    if answer["sentence"]:
        out.print(answer["sentence"], highlight=False, markup=False, soft_wrap=True)
