"""``kvgw token``: credentials of a tenant."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any

import typer

from kvgw.cli.administration import ask_admin
from kvgw.cli.namespaces import Tenant
from kvgw.cli.options import Config, Data, Json
from kvgw.cli.output import console, print_json, print_table

tokens = typer.Typer(help="Tokens of a tenant.", no_args_is_help=True)

KINDS = {
    "engine": ["chunk:get", "chunk:put", "chunk:delete", "ns:read"],
    "reader": ["chunk:get", "ns:read"],
    "metrics": ["metrics:read"],
    "admin": ["ns:read", "ns:admin", "tenant:admin", "audit:read"],
}
"""Sets of permissions that are usually wanted together."""

TokenArgument = Annotated[str, typer.Argument(help="The token's id: the part after kvgw_.")]
Expires = Annotated[str, typer.Option(help="Life of the token, at most 365d.")]


@tokens.command("create")
def create(
    name: Annotated[str, typer.Argument(help="What it is for, as in vllm-prod.")],
    kind: Annotated[str, typer.Option(help=f"{', '.join(KINDS)}; or name permissions one by one.")] = "engine",
    permission: Annotated[
        list[str] | None, typer.Option(help="Instead of a kind; may be repeated.", show_default=False)
    ] = None,
    namespace: Annotated[
        list[str] | None, typer.Option(help="Pattern of namespaces; may be repeated.", show_default="*")
    ] = None,
    default_namespace: Annotated[str, typer.Option(help="Where requests go that name none.")] = "default",
    expires: Expires = "90d",
    tenant: Tenant = "-",
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Make a token and print it, once: only a hash of it is kept."""
    if permission is None and kind not in KINDS:
        raise typer.BadParameter(f"{kind!r} is none of {', '.join(KINDS)}", param_hint="--kind")
    body = {
        "name": name,
        "permissions": permission or KINDS[kind],
        "namespaces": namespace or ["*"],
        "default_namespace": default_namespace,
        "expires_in": expires,
    }
    _print_made(ask_admin(data, config, "POST", f"/tenants/{tenant}/tokens", body=body), json)


@tokens.command("list")
def list_(tenant: Tenant = "-", data: Data = None, config: Config = None, json: Json = False) -> None:
    """List tokens, newest first; never their secrets."""
    answer = ask_admin(data, config, "GET", f"/tenants/{tenant}/tokens")
    if json:
        print_json(answer)
        return
    print_table(
        "Tokens",
        ["id", "name", "permissions", "namespaces", "expires (UTC)", "revoked (UTC)", "last used (UTC)"],
        [
            [
                one["id"],
                one["name"],
                " ".join(one["permissions"]),
                " ".join(one["namespaces"]),
                _day(one["expires_ms"]),
                _day(one["revoked_ms"]),
                _day(one["last_used_ms"]),
            ]
            for one in answer
        ],
    )


@tokens.command("rotate")
def rotate(
    token: TokenArgument,
    overlap: Annotated[str, typer.Option(help="How long the old one still works.")] = "24h",
    expires: Expires = "90d",
    tenant: Tenant = "-",
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Make a token's successor and print it, once; the old one ends after the overlap."""
    body = {"overlap": overlap, "expires_in": expires}
    _print_made(ask_admin(data, config, "POST", f"/tenants/{tenant}/tokens/{token}/rotate", body=body), json)


@tokens.command("revoke")
def revoke(
    token: TokenArgument, tenant: Tenant = "-", data: Data = None, config: Config = None, json: Json = False
) -> None:
    """End a token on every gateway within five seconds."""
    answer = ask_admin(data, config, "DELETE", f"/tenants/{tenant}/tokens/{token}")
    if json:
        print_json(answer)
    else:
        console().print("revoked" if answer["revoked"] else "there was no such token to revoke", highlight=False)


def _print_made(answer: Any, json: bool) -> None:
    if json:
        print_json(answer)
        return
    console().print(
        f"token {answer['id']} for {' '.join(answer['permissions'])} in {' '.join(answer['namespaces'])}, until "
        f"{_day(answer['expires_ms'])}. Keep it now; it is never shown again:",
        highlight=False,
        soft_wrap=True,
    )
    console().print(answer["token"], highlight=False, soft_wrap=True)


def _day(milliseconds: int | None) -> str:
    if milliseconds is None:
        return "–"
    return dt.datetime.fromtimestamp(milliseconds / 1000, dt.UTC).strftime("%Y-%m-%d %H:%M")
