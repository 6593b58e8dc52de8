"""``kvgw doctor``: what is wrong with this set-up, and what to do about it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import typer
from rich.text import Text

from kvgw.cli.options import Config, Data, Json, data_folder, settings_of
from kvgw.cli.output import console, print_json, print_table
from kvgw.examine import Finding, Verdict, examine
from kvgw.settings import Settings, SettingsError


def doctor(data: Data = None, config: Config = None, json: Json = False) -> None:
    """Examine settings, data folder, catalog, keys, tiers, S3 and memory. Exit code 1 if something is wrong.

    Changes nothing. Works beside a running gateway, and before the first start.
    """
    folder = data_folder(data)
    findings = _findings(folder, config)
    if json:
        print_json(findings)
    else:
        marks = {
            Verdict.GOOD: Text("ok", "green"),
            Verdict.NOTE: Text("note", "yellow"),
            Verdict.BAD: Text("wrong", "red"),
        }
        print_table(
            f"kvgw doctor: {folder}",
            ["", "subject", "what", "what to do"],
            [[marks[one.verdict], one.subject, one.what, one.remedy] for one in findings],
        )
        wrong = sum(one.verdict is Verdict.BAD for one in findings)
        console().print("nothing is wrong" if not wrong else f"{wrong} wrong", highlight=False)
    if any(one.verdict is Verdict.BAD for one in findings):
        raise typer.Exit(1)


def _findings(folder: Path, config: Path | None) -> list[Finding]:
    try:
        settings: Settings = settings_of(folder, config)
    except SettingsError as error:
        return [Finding("settings", Verdict.BAD, str(error), "correct the setting that is named")]
    return [Finding("settings", Verdict.GOOD, "read", ""), *asyncio.run(examine(settings, folder))]
