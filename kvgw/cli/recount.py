"""``kvgw recount``: quota counters against the rows that they stand for."""

from __future__ import annotations

from typing import Annotated

import typer

from kvgw.cli.administration import ask_admin
from kvgw.cli.options import Config, Data, Json
from kvgw.cli.output import console, print_json, print_table


def recount(
    repair: Annotated[bool, typer.Option("--repair", help="Set the counters that are off.")] = False,
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Count what every namespace holds and compare it with its quota counters, while the gateway serves.

    Exit code 1 when counters were off and were not set.
    """
    answer = ask_admin(data, config, "POST", "/recount", body={"repair": repair})
    if json:
        print_json(answer)
    elif not answer["drifts"]:
        console().print(f"{answer['counted']} counters agree with their rows", highlight=False)
    else:
        print_table(
            "Counters that are off (counter minus rows)" + (": set" if repair else ""),
            ["tenant", "namespace", "bytes ", "objects ", "bytes in S3 "],
            [
                [
                    one["tenant"],
                    one["namespace"] or "all",
                    str(one["stored_bytes"]),
                    str(one["objects"]),
                    str(one["s3_bytes"]),
                ]
                for one in answer["drifts"]
            ],
        )
    if answer["drifts"] and not answer["repaired"]:
        raise typer.Exit(1)
