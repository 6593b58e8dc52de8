"""``kvgw audit``: the log of what was done, listed, exported and verified."""

from __future__ import annotations

import asyncio
import datetime as dt
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import typer

from kvgw.cli.administration import ask_admin, walk_admin
from kvgw.cli.options import Config, Data, Json, data_folder, settings_of
from kvgw.cli.output import console, error_console, print_json, print_table
from kvgw.durations import duration_ms
from kvgw.errors import KvgwError, RequestRefused
from kvgw.runtime import SystemClock, SystemRng, ThreadWorkers
from kvgw.settings import Settings, SettingsError
from kvgw.verify import CheckpointLine, HeadLine, Log, RecordLine, encode_line, verify_catalog, verify_file
from kvgw.wiring.catalog import open_to_read
from kvgw.wiring.keys import open_keys
from kvgw.wiring.tiers import open_audit_objects
from kvgw.witness import FILE, FOLDER, notes_from, notes_in
from storage.errors import StorageError
from tenancy import migrate
from tenancy.audit.printing import printable
from tenancy.audit.verifying import Finding, Verdict
from tenancy.errors import TenancyError

audit = typer.Typer(help="The log of what was done, by whom.", no_args_is_help=True)

Whose = Annotated[str, typer.Option("--tenant", help="A tenant; - for the caller's own; * for all (operators).")]
PAGE = 2000


@audit.command("list")
def list_(
    tenant: Whose = "*",
    namespace: Annotated[str | None, typer.Option(help="Of one namespace of the tenant.")] = None,
    actor: Annotated[str, typer.Option(help="Who did it: owner, gateway, token:<id>.")] = "",
    action: Annotated[str, typer.Option(help="What, as in token.create; token: all of them.")] = "",
    since: Annotated[str | None, typer.Option(help="Not older than, as in 24h.", show_default=False)] = None,
    before: Annotated[int | None, typer.Option(help="Go on below this number.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, max=PAGE)] = 50,
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """List records, the newest first."""
    query: dict[str, str | int | None] = {
        "tenant": tenant,
        "namespace": namespace,
        "actor": actor,
        "action": action,
        "since_ms": None if since is None else SystemClock().now_ms() - duration_ms(since),
        "before": before,
        "limit": limit,
    }
    found = ask_admin(data, config, "GET", "/audit", query={k: v for k, v in query.items() if v is not None})
    if json:
        print_json(found)
        return
    columns = ["number ", "time (UTC)", "actor", "action", "target", "result", "detail"]
    print_table("Audit log", columns, [_row(one) for one in found])


@audit.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="Where to write it, one JSON document a line; - for standard output.")],
    tenant: Whose = "*",
    data: Data = None,
    config: Config = None,
) -> None:
    """Write the log, or one tenant's records, with everything that is needed to verify it elsewhere."""
    if str(file) == "-":
        _export(sys.stdout.buffer, tenant, data, config)
        return
    try:
        with file.open("xb") as out:
            count = _export(out, tenant, data, config)
    except OSError as error:
        raise SettingsError(f"the export cannot be written to {file}: {error.strerror}") from error
    console().print(f"exported {count} records to {file}", highlight=False, soft_wrap=True)


@audit.command("verify")
def verify(
    file: Annotated[
        Path | None, typer.Argument(help="An export; without it: the catalog itself.", show_default=False)
    ] = None,
    public_key: Annotated[
        str | None, typer.Option(help="Who must have signed, in hexadecimal.", show_default="the export's own")
    ] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(help="A copy of a gateway's audit/checkpoints.", show_default=False)
    ] = None,
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Compute every link anew and compare it with the checkpoints, those outside the database too.

    Exit codes: 0 whole · 1 tampered with · 2 truncated, or checkpoints missing · 3 cannot be read.
    """
    try:
        if file is not None:
            verdict = verify_file(file, None if public_key is None else _key(public_key), checkpoints)
        else:
            folder = data_folder(data)
            verdict = asyncio.run(_verify(settings_of(folder, config), folder, checkpoints))
    except (KvgwError, StorageError, TenancyError) as error:
        verdict = Verdict(Finding.UNREADABLE, 0, str(error), 0, 0)
    _say(verdict, json)
    raise typer.Exit(int(verdict.finding))


async def _verify(settings: Settings, folder: Path, more: Path | None) -> Verdict:
    """Verify the catalog beside the gateways that run, without asking them."""
    async with AsyncExitStack() as stack:
        database = await open_to_read(stack, settings.catalog, folder)
        if await database.read(migrate.check_known) is None:
            raise SettingsError(f"there is no catalog in {folder}; name the right data folder with --data")
        workers = ThreadWorkers(1)
        stack.callback(workers.close)
        keys = await open_keys(stack, settings, folder, workers, SystemRng())
        outside = {f"in {path}": _async(path) for path in (folder / FOLDER / FILE, more) if path is not None}
        objects = open_audit_objects(stack, settings)
        if objects is not None:
            outside[f"in {objects.place}"] = notes_from(objects)
        return await verify_catalog(database, keys.signer.public_key, outside)


async def _async(file: Path) -> AsyncIterator[str]:
    for note in notes_in(file):
        yield note


def _export(out: BinaryIO, tenant: str, data: Path | None, config: Path | None) -> int:
    """Write the pages of the log as lines; how many records there were."""
    begun = False
    count = 0

    def turn(page: Any) -> Mapping[str, str | int] | None:
        nonlocal begun, count
        if not begun:
            out.write(encode_line(Log(1, page["whole"], page["public_key"])))
            begun = True
        notes = iter(page["checkpoints"])
        note = next(notes, None)
        for record in page["records"]:
            out.write(encode_line(msgspec.convert(record, RecordLine)))
            while note is not None and note["seq"] <= record["seq"]:
                out.write(encode_line(msgspec.convert(note, CheckpointLine)))
                note = next(notes, None)
        count += len(page["records"])
        if len(page["records"]) == PAGE:
            return {"tenant": tenant, "limit": PAGE, "after": page["records"][-1]["seq"]}
        while note is not None:  # of records that are not there any more
            out.write(encode_line(msgspec.convert(note, CheckpointLine)))
            note = next(notes, None)
        out.write(encode_line(msgspec.convert(page["head"], HeadLine)))
        return None

    walk_admin(data, config, "/audit/records", {"tenant": tenant, "limit": PAGE}, turn)
    return count


def _say(verdict: Verdict, json: bool) -> None:
    if json:
        print_json(
            {
                "finding": verdict.finding.name.lower(),
                "record": verdict.seq,
                "sentence": verdict.sentence,
                "records": verdict.records,
                "checkpoints": verdict.checkpoints,
            }
        )
        return
    sentence = printable(verdict.sentence)
    if verdict.finding is Finding.WHOLE:
        told = f"{sentence}: {verdict.records} records, {verdict.checkpoints} checkpoints"
        console().print(told, highlight=False, markup=False, soft_wrap=True)
        return
    where = f" at record {verdict.seq}" if verdict.seq else ""
    told = f"{verdict.finding.name.lower()}{where}: {sentence}"
    error_console().print(told, highlight=False, markup=False, soft_wrap=True)


def _row(one: Mapping[str, Any]) -> list[str]:
    time = dt.datetime.fromtimestamp(one["at_ms"] / 1000, dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
    texts = [one["actor"], one["action"], one["target"], one["result"], one["detail"]]
    return [str(one["seq"]), time, *(printable(text).replace("[", "\\[") for text in texts)]


def _key(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise RequestRefused(f"--public-key {text!r:.80} is not hexadecimal") from None
