"""``kvgw fsck``: rows, tiers, counters and leases against each other."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from kvgw.cli.administration import ask_admin
from kvgw.cli.options import Config, Data, Json
from kvgw.cli.output import console, error_console, print_json, print_table

_EXIT_CODES: Final = {"clean": 0, "findings": 1, "refused": 2, "unseen": 3}


def fsck(
    repair: Annotated[bool, typer.Option("--repair", help="Set right what can be set right without guessing.")] = False,
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Compare the catalog with this node's NVMe and S3, and with itself, while the gateway serves.

    Exit code 0 clean · 1 findings are left · 2 what is seen is implausible, so that nothing was touched there · 3
    something could not be looked at.
    """
    answer = ask_admin(data, config, "POST", "/fsck", body={"repair": repair}, patient=True)
    if json:
        print_json(answer)
    else:
        _print(answer)
    raise typer.Exit(_EXIT_CODES[answer["verdict"]])


def _print(answer: Any) -> None:
    out = console()
    out.print("looked at " + ", ".join(f"{count} {what}" for what, count in answer["looked"].items()), highlight=False)
    if answer["found"]:
        print_table(
            "Findings",
            ["kind", "found ", "set right "],
            [[kind, str(count), str(answer["mended"].get(kind, 0))] for kind, count in answer["found"].items()],
        )
        for one in answer["findings"]:
            out.print(f"{one['kind']} {one['what']}: {one['sentence']}", highlight=False, markup=False, soft_wrap=True)
    for sentence in (*answer["refused"], *answer["unseen"]):
        error_console().print(sentence, highlight=False, markup=False, soft_wrap=True)
    if answer["verdict"] == "clean":
        out.print("everything agrees" + (" now" if answer["found"] else ""), highlight=False)
