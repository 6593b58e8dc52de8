"""``kvgw keys``: the root key, and the life of all others."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any, TypeAlias

import typer

from kvgw.cli.administration import ask_admin
from kvgw.cli.options import Config, Data, Json, data_folder, settings_of
from kvgw.cli.output import console, print_json, print_table
from kvgw.errors import RequestRefused
from kvgw.runtime import SystemRng, ThreadWorkers
from kvgw.wiring.keys import keys_folder
from tenancy.keys.rootkey import FileRootKey

keys = typer.Typer(help="The root key, and rotating, re-wrapping and destroying keys.", no_args_is_help=True)

Tenant: TypeAlias = Annotated[str, typer.Option("--tenant", help="Whose; - is your own.")]
Name: TypeAlias = Annotated[str, typer.Argument(help="The namespace's name.")]
MaybeName: TypeAlias = Annotated[str | None, typer.Argument(help="The namespace's name.", show_default=False)]
Confirm: TypeAlias = Annotated[
    str | None, typer.Option("--confirm", help="The name again: this cannot be undone.", show_default=False)
]
Epoch: TypeAlias = Annotated[int | None, typer.Option(min=1, show_default=False)]


@keys.callback()
def _keys() -> None:
    """The root key, and rotating, re-wrapping and destroying keys."""


@keys.command("init")
def init(data: Data = None, config: Config = None, json: Json = False) -> None:
    """Make the root key of several gateways, once; a key that is there stays.

    Copy the folder to every gateway (keys.dir), readable by its user alone, and keep a copy apart from all data:
    without it nothing that was stored can be read again.
    """
    data_dir = data_folder(data)
    settings = settings_of(data_dir, config)
    if settings.keys.provider != "file":
        raise RequestRefused(f"keys.provider is {settings.keys.provider}: that is where its root key is made")
    folder = keys_folder(settings, data_dir)
    os.makedirs(folder.parent, mode=0o700, exist_ok=True)

    async def body() -> str:
        workers = ThreadWorkers(1)
        try:
            return (await FileRootKey.open_or_create(folder, workers, SystemRng().token)).key_id
        finally:
            workers.close()

    key_id = asyncio.run(body())
    _say({"folder": str(folder), "key_id": key_id}, f"root key {key_id} in {folder}", json)


@keys.command("status")
def status(
    name: MaybeName = None, tenant: Tenant = "-", data: Data = None, config: Config = None, json: Json = False
) -> None:
    """The root key and what it wraps; or with a name the epochs and versions of a namespace's keys."""
    path = "/keys" if name is None else f"/tenants/{tenant}/namespaces/{name}/keys"
    found = ask_admin(data, config, "GET", path)
    if json:
        print_json(found)
    elif name is None:
        print_table(
            f"Root key {found['key_id']} ({found['provider']})",
            ["root key", "wraps keys "],
            [(ref, str(count)) for ref, count in sorted(found["wrapped"].items())],
        )
    else:
        _show(found)


@keys.command("rotate")
def rotate(
    name: MaybeName = None,
    wrapping: Annotated[
        bool, typer.Option("--wrapping", help="The namespace's own key, which wraps its data keys.")
    ] = False,
    root: Annotated[bool, typer.Option("--root", help="The root key; then run kvgw keys rewrap.")] = False,
    tenant: Tenant = "-",
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Use a new key from now on. What was stored before stays readable, and no data is rewritten.

    A root key in a file: copy the keys folder to every gateway before kvgw keys rewrap.
    """
    if root == (name is not None) or (root and wrapping):
        raise RequestRefused("name a namespace, or give --root alone")
    if root:
        made = ask_admin(data, config, "POST", "/keys/rotate")
        _say(made, f"root key {made['key_id']}; copy the keys folder to every gateway, then: kvgw keys rewrap", json)
        return
    body = {"key": "namespace" if wrapping else "data"}
    found = ask_admin(data, config, "POST", f"/tenants/{tenant}/namespaces/{name}/keys/rotate", body=body)
    print_json(found) if json else _show(found)


@keys.command("rewrap")
def rewrap(
    retire: Annotated[
        bool, typer.Option("--retire", help="Destroy root keys that then wrap nothing; needs --confirm.")
    ] = False,
    confirm: Annotated[str | None, typer.Option(help="The id of the root key that stays.", show_default=False)] = None,
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Wrap every namespace's keys by the newest root key. It may be interrupted and run again."""
    query = {"retire": "true", "confirm": confirm or ""} if retire else None
    done = ask_admin(data, config, "POST", "/keys/rewrap", query=query)
    sentence = (
        f"{done['namespaces']} namespaces under root key {done['root_key']}: {done['versions']} namespace keys and "
        f"{done['rows']} rows were wrapped anew, {done['gone']} namespaces have no keys any more"
    )
    told = [sentence, *(f"not done: {namespace}: {why}" for namespace, why in done["failed"].items())]
    told += [f"destroyed root key {ref}" for ref in done["retired"]]
    _say(done, "\n".join(told), json)
    if done["failed"]:
        raise typer.Exit(1)


@keys.command("change")
def change(
    name: Name,
    min_decrypt_epoch: Epoch = None,
    min_encrypt_epoch: Epoch = None,
    protect: Annotated[
        bool | None,
        typer.Option("--protect/--unprotect", help="Whether deleting and shredding are refused.", show_default=False),
    ] = None,
    confirm: Confirm = None,
    tenant: Tenant = "-",
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Say which epochs may be opened and sealed, and whether the namespace may be destroyed.

    Chunks of epochs below --min-decrypt-epoch are misses at once, and then deleted.
    """
    wanted = {
        "min_decrypt_epoch": min_decrypt_epoch,
        "min_encrypt_epoch": min_encrypt_epoch,
        "deletion_allowed": None if protect is None else not protect,
    }
    found = ask_admin(
        data,
        config,
        "PATCH",
        f"/tenants/{tenant}/namespaces/{name}/keys",
        body={key: value for key, value in wanted.items() if value is not None},
        query={"confirm": confirm} if confirm else None,
    )
    print_json(found) if json else _show(found)


@keys.command("shred")
def shred(
    name: MaybeName = None,
    tenant: Tenant = "-",
    whole_tenant: Annotated[bool, typer.Option("--whole-tenant", help="All namespaces of the tenant.")] = False,
    confirm: Confirm = None,
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Destroy a namespace's key: nothing of it opens again, from whatever copy or backup. It may be run again."""
    if whole_tenant == (name is not None):
        raise RequestRefused("name a namespace, or give --whole-tenant")
    path = f"/tenants/{tenant}/shred" if whole_tenant else f"/tenants/{tenant}/namespaces/{name}/shred"
    done = ask_admin(data, config, "POST", path, query={"confirm": confirm or ""})
    _say(done, f"shredded: {', '.join(done['shredded']) or 'nothing, there was none'}", json)


def _show(found: Any) -> None:
    versions = [f"version {version}, by root key {ref}" for version, ref in found["versions"].items()]
    facts = (
        ("its own key", "destroyed: nothing opens any more" if found["destroyed"] else "; ".join(versions)),
        ("seals in epoch", str(found["epoch"])),
        ("takes PUTs from epoch", str(found["min_encrypt_epoch"])),
        ("opens from epoch", str(found["min_decrypt_epoch"])),
        ("may be destroyed", "yes" if found["deletion_allowed"] else "no"),
    )
    rows = [(f"live chunks of epoch {one['epoch']}", str(one["live_chunks"])) for one in found["epochs"]]
    print_table(f"Keys of {found['namespace']} ({found['state']})", ["what", "value"], [*facts, *rows])


def _say(value: object, sentence: str, json: bool) -> None:
    if json:
        print_json(value)
    else:
        console().print(sentence, highlight=False, soft_wrap=True)
