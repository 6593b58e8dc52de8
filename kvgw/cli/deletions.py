"""``kvgw delete``, ``kvgw deletions`` and ``kvgw verify-receipt``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from kvgw.cli.administration import ask_admin
from kvgw.cli.options import Config, Data, Json
from kvgw.cli.output import console, human_bytes, print_json, print_table
from kvgw.errors import KvgwError, Outage, RequestRefused
from kvgw.settings import SettingsError
from tenancy.deletion.receipt import faults

deletions = typer.Typer(help="Deletions and their receipts.", no_args_is_help=True)

TRACES_MAX: Final = 1_000
POLL_SECONDS: Final = 0.5

Tenant = Annotated[
    str, typer.Option("--tenant", help="Whose; - is your own. One that is gone is named by its id, by an operator.")
]


def delete(
    namespace: Annotated[str, typer.Option(help="The namespace.")] = "default",
    tenant: Tenant = "-",
    kv_format: Annotated[
        str, typer.Option("--format", help="Fingerprint of the KV format of --key and --prefix, hexadecimal.")
    ] = "",
    key: Annotated[list[str] | None, typer.Option(help="An engine key, hexadecimal; may be repeated.")] = None,
    prefix: Annotated[str, typer.Option(help="An engine key, and everything that follows it.")] = "",
    label: Annotated[str, typer.Option(help="Every entry with this label, as in user=alice.")] = "",
    model: Annotated[str, typer.Option(help="Every entry of this model.")] = "",
    weights: Annotated[str, typer.Option(help="Every entry of this revision or digest of weights.")] = "",
    tokenizer: Annotated[str, typer.Option(help="Every entry of this tokenizer.")] = "",
    adapter: Annotated[str, typer.Option(help="Every entry of this adapter.")] = "",
    made_before: Annotated[str, typer.Option(help="Every entry older than this, as in 24h or 7d.")] = "",
    unread_for: Annotated[str, typer.Option(help="Every entry that nobody has read for this long.")] = "",
    everything: Annotated[bool, typer.Option("--everything", help="The whole namespace, with keys and name.")] = False,
    whole_tenant: Annotated[bool, typer.Option("--whole-tenant", help="The tenant with all its namespaces.")] = False,
    confirm: Annotated[str, typer.Option(help="The name of the namespace or tenant that goes, again.")] = "",
    wait: Annotated[float, typer.Option(help="Seconds to wait for the receipt.", min=0)] = 0.0,
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Delete by key, prefix, label, format or age, or a whole namespace or tenant, and get a receipt.

    When this says *acknowledged*, no read of any gateway finds it any more. The receipt follows when every gateway has
    looked: see kvgw deletions.
    """
    fields = {"model": model, "weights": weights, "tokenizer": tokenizer, "adapter": adapter}
    bodies: list[dict[str, Any]] = [
        {"format": {"field": field, "value": value}} for field, value in fields.items() if value
    ]
    bodies += [{"keys": {"format": kv_format, "keys": key}}] if key else []
    bodies += [{"prefix": {"format": kv_format, "key": prefix}}] if prefix else []
    bodies += [{"label": _label(label)}] if label else []
    bodies += [{"age": {"moment": "created", "older_than": made_before}}] if made_before else []
    bodies += [{"age": {"moment": "last_hit", "older_than": unread_for}}] if unread_for else []
    bodies += [{"everything": True}] if everything else []
    if len(bodies) + whole_tenant != 1:
        raise RequestRefused("say what to delete by exactly one option; kvgw delete --help lists them")
    query = {"confirm": confirm} if confirm else None
    if whole_tenant:
        job = ask_admin(data, config, "POST", f"/tenants/{tenant}/deletions", query=query)
    else:
        path = f"/tenants/{tenant}/namespaces/{namespace}/deletions"
        job = ask_admin(data, config, "POST", path, body=bodies[0], query=query)
    _show(_awaited(data, config, job, wait), json)


@deletions.command("list")
def list_jobs(tenant: Tenant = "-", data: Data = None, config: Config = None, json: Json = False) -> None:
    """The newest deletions of a tenant."""
    jobs = ask_admin(data, config, "GET", f"/tenants/{tenant}/deletions")
    if json:
        print_json(jobs)
        return
    print_table(
        "Deletions",
        ("job", "of", "state", "entries ", "chunks ", "bytes ", "retained ", "waits for"),
        [
            (
                one["id"],
                one["kind"],
                one["state"],
                str(one["entries"]),
                str(one["chunks"]),
                human_bytes(one["bytes"]),
                str(one["retained"]),
                one["sentence"],
            )
            for one in jobs
        ],
    )


@deletions.command("show")
def show(
    job: Annotated[str, typer.Argument(help="The job's id.")],
    tenant: Tenant = "-",
    receipt: Annotated[Path | None, typer.Option(help="Write the receipt to this file.", show_default=False)] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the receipt.", min=0)] = 0.0,
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """One deletion, with its receipt once it is done."""
    found = _awaited(data, config, _job(data, config, tenant, job), wait)
    if receipt is not None:
        if found["receipt"] is None:
            raise RequestRefused(f"there is no receipt yet: the job is {found['state']}; {found['sentence']}")
        try:
            receipt.write_bytes(msgspec.json.encode(found["receipt"], order="sorted"))
        except OSError as error:
            raise SettingsError(f"the receipt cannot be written to {receipt}: {error.strerror}") from error
    _show(found, json)


def verify_receipt(
    file: Annotated[Path, typer.Argument(help="A receipt, as kvgw deletions show --receipt wrote it.")],
    public_key: Annotated[
        str, typer.Option(help="The key that must have signed it, hexadecimal; else the gateway's.")
    ] = "",
    offline: Annotated[bool, typer.Option("--offline", help="Ask no gateway: form, signature and root only.")] = False,
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Check a receipt's signature and Merkle root, and look for what it says is gone.

    Exit code 0: genuine, and nothing was found. 1: not genuine, or something is still there. 2: genuine as far as it
    could be checked, but not everywhere could be looked, or there was no key to compare with.
    """
    try:
        text = file.read_bytes()
    except OSError as error:
        raise SettingsError(f"the receipt {file} cannot be read: {error.strerror}") from error
    unknown: list[str] = []
    key = public_key or ("" if offline else _gateways_key(data, config, unknown))
    if not key:
        unknown.append("there is no key to compare the receipt's with: give --public-key")
    try:
        trusted = bytes.fromhex(key) if key else None
    except ValueError as error:
        raise RequestRefused(f"--public-key {key!r} is not hexadecimal") from error
    wrong = faults(text, trusted)
    looks: list[dict[str, Any]] = []
    if not wrong and not offline:
        looks = _look_again(data, config, msgspec.json.decode(text), unknown)
    elif offline:
        unknown.append("nothing was looked for: --offline")
    unknown += [f"{look['tier']} could not be looked through: {look['unseen']}" for look in looks if look["unseen"]]
    wrong += [f"{look['tier']} of node {look['node']}: {what}" for look in looks for what in look["left"]]
    if json:
        print_json({"wrong": wrong, "unknown": unknown, "looks": looks})
    else:
        for look in (one for one in looks if not one["unseen"]):
            console().print(f"{look['tier']}: looked ({look['method']})", highlight=False)
        for sentence in (*wrong, *unknown):
            console().print(sentence, highlight=False, markup=False, soft_wrap=True)
        if not wrong and not unknown:
            console().print("the receipt is genuine, and nothing of what it names was found", highlight=False)
    if wrong or unknown:
        raise typer.Exit(1 if wrong else 2)


def _gateways_key(data: Path | None, config: Path | None, unknown: list[str]) -> str:
    try:
        return str(ask_admin(data, config, "GET", "/signing-key")["public_key"])
    except Outage as error:
        unknown.append(str(error))
        return ""


def _look_again(data: Path | None, config: Path | None, receipt: dict[str, Any], unknown: list[str]) -> list[Any]:
    """What a gateway sees of what the receipt names, in pieces of bounded length."""
    if receipt["kind"] == "tenant":
        whole = [part["namespace"] for part in receipt["parts"]]
        asked = [{"namespace": one, "whole": True} for one in whole]
    elif receipt["kind"] == "namespace":
        asked = [{"namespace": receipt["namespace"]["id"], "whole": True}]
    elif receipt["blobs"]["ids"] is None:
        unknown.append(f"it names {receipt['blobs']['count']} blobs by their root alone: they cannot be looked for")
        asked = []
    else:
        ids, namespace = receipt["blobs"]["ids"], receipt["namespace"]["id"]
        asked = [
            {"namespace": namespace, "blobs": ids[start : start + TRACES_MAX]}
            for start in range(0, len(ids), TRACES_MAX)
        ]
    looks: list[Any] = []
    for one in asked:
        try:
            looks += ask_admin(data, config, "POST", "/traces", body={"tenant": receipt["tenant"]["id"], **one})
        except KvgwError as error:
            unknown.append(f"it could not be looked for: {error}")
            break
    return looks


def _label(text: str) -> dict[str, str]:
    kind, equals, value = text.partition("=")
    if not equals or not kind or not value:
        raise RequestRefused(f"{text!r} is no label: write kind=value, as in user=alice")
    return {"kind": kind, "value": value}


def _job(data: Path | None, config: Path | None, tenant: str, job: str) -> dict[str, Any]:
    found: dict[str, Any] = ask_admin(data, config, "GET", f"/tenants/{tenant}/deletions/{job}")
    return found


def _awaited(data: Path | None, config: Path | None, job: dict[str, Any], wait: float) -> dict[str, Any]:
    """The job when it is done, or after `wait` seconds."""
    until = time.monotonic() + wait
    while job["state"] != "done" and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        # A tenant that is on its way is found by its id alone.
        job = _job(data, config, job["tenant"], job["id"])
    return job


def _show(job: dict[str, Any], json: bool) -> None:
    if json:
        print_json(job)
        return
    said = "acknowledged" if job["acknowledged"] else "not acknowledged yet: it goes on by itself"
    console().print(
        f"deletion {job['id']} of tenant {job['tenant']}: {job['kind']}, {job['state']}, {said}\n"
        f"{job['entries']} entries, {job['chunks']} chunks, {human_bytes(job['bytes'])}; retained {job['retained']}",
        highlight=False,
        soft_wrap=True,
    )
    if job["sentence"]:
        console().print(job["sentence"], highlight=False, markup=False, soft_wrap=True)
    if job["receipt"] is not None:
        for look in job["receipt"]["looks"]:
            console().print(f"{look['tier']} of node {look['node']}: clean", highlight=False)
