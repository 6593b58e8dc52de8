"""``kvgw tenant``: who is served, within which limits."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvgw.cli.administration import ask_admin
from kvgw.cli.options import Config, Data, Json
from kvgw.cli.output import console, human_bytes, print_json, print_table

tenants = typer.Typer(help="Tenants, for the operator.", no_args_is_help=True)

TenantArgument = Annotated[str, typer.Argument(help="The tenant's name.")]
Bytes = Annotated[int | None, typer.Option(help="Sealed bytes of all its namespaces; 0: no limit.", min=0)]
Objects = Annotated[int | None, typer.Option(help="Chunks of all its namespaces; 0: no limit.", min=0)]
S3Bytes = Annotated[int | None, typer.Option(help="Bytes in S3 of all its namespaces; 0: no limit.", min=0)]


@tenants.command("create")
def create(
    name: Annotated[str, typer.Argument(help="a-z, 0-9, '.', '_', '-'; at most 64.")],
    limit_bytes: Bytes = None,
    limit_objects: Objects = None,
    limit_s3_bytes: S3Bytes = None,
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Make a tenant with the namespace default. Its tokens: kvgw token create --tenant NAME."""
    wanted = {"name": name, **_limits(limit_bytes, limit_objects, limit_s3_bytes)}
    _show(ask_admin(data, config, "POST", "/tenants", body=wanted), json)


@tenants.command("list")
def list_(data: Data = None, config: Config = None, json: Json = False) -> None:
    """List tenants with their limits and what they use."""
    _show(ask_admin(data, config, "GET", "/tenants"), json)


@tenants.command("show")
def show(tenant: TenantArgument, data: Data = None, config: Config = None, json: Json = False) -> None:
    """Show one tenant."""
    _show(ask_admin(data, config, "GET", f"/tenants/{tenant}"), json)


@tenants.command("limit")
def limit(
    tenant: TenantArgument,
    limit_bytes: Bytes = None,
    limit_objects: Objects = None,
    limit_s3_bytes: S3Bytes = None,
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Set what all namespaces of a tenant may hold together; what is not named has no limit."""
    change = {"limits": _limits(limit_bytes, limit_objects, limit_s3_bytes)}
    _show(ask_admin(data, config, "PATCH", f"/tenants/{tenant}", body=change), json)


@tenants.command("suspend")
def suspend(tenant: TenantArgument, data: Data = None, config: Config = None, json: Json = False) -> None:
    """Turn a tenant's tokens away, within seconds on every gateway; its chunks stay."""
    _show(ask_admin(data, config, "PATCH", f"/tenants/{tenant}", body={"state": "suspended"}), json)


@tenants.command("resume")
def resume(tenant: TenantArgument, data: Data = None, config: Config = None, json: Json = False) -> None:
    """Serve a suspended tenant again."""
    _show(ask_admin(data, config, "PATCH", f"/tenants/{tenant}", body={"state": "active"}), json)


def _limits(limit_bytes: int | None, limit_objects: int | None, limit_s3_bytes: int | None) -> dict[str, int]:
    named = {"limit_bytes": limit_bytes, "limit_objects": limit_objects, "limit_s3_bytes": limit_s3_bytes}
    return {name: value for name, value in named.items() if value is not None}


def _show(answer: Any, json: bool) -> None:
    if json:
        print_json(answer)
        return
    rows = answer if isinstance(answer, list) else [answer]
    print_table(
        "Tenants",
        ["tenant", "state", "stored ", "limit ", "objects ", "limit ", "in S3 ", "limit "],
        [
            [
                one["name"],
                one["state"],
                human_bytes(one["stored_bytes"]),
                human_bytes(one["limit_bytes"]) if one["limit_bytes"] else "none",
                str(one["objects"]),
                str(one["limit_objects"] or "none"),
                human_bytes(one["s3_bytes"]),
                human_bytes(one["limit_s3_bytes"]) if one["limit_s3_bytes"] else "none",
            ]
            for one in rows
        ],
    )
    if not isinstance(answer, list):
        console().print(f"id {answer['id']}", highlight=False)
