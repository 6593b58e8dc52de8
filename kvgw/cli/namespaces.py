"""``kvgw namespace``: isolation, keys, quota and policy inside a tenant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import typer

from kvgw.cli.administration import ask_admin
from kvgw.cli.options import Config, Data, Json
from kvgw.cli.output import human_bytes, print_json, print_table
from kvgw.model import Durability

namespaces = typer.Typer(help="Namespaces of a tenant.", no_args_is_help=True)

Tenant: TypeAlias = Annotated[str, typer.Option("--tenant", help="Whose; - is your own.")]
NameArgument = Annotated[str, typer.Argument(help="The namespace's name.")]
DurabilityOption = Annotated[
    Durability | None, typer.Option(help="What an acknowledged PUT survives.", show_default=False)
]
Ttl = Annotated[str | None, typer.Option(help="Life of entries without a TTL, as in 5m, 1h, 24h.", show_default=False)]
MaxTtl = Annotated[str | None, typer.Option(help="Longest life that a PUT may ask for.", show_default=False)]
Sliding = Annotated[
    bool | None, typer.Option("--sliding/--fixed", help="Whether a GET extends the life.", show_default=False)
]
LimitBytes = Annotated[int | None, typer.Option(help="Sealed bytes it may hold; 0: no limit.", min=0)]
LimitObjects = Annotated[int | None, typer.Option(help="Chunks it may hold; 0: no limit.", min=0)]
LimitS3Bytes = Annotated[int | None, typer.Option(help="Bytes it may hold in S3; 0: no limit.", min=0)]
NvmeBytes = Annotated[int | None, typer.Option(help="Bytes it may hold on each node's NVMe; 0: no share.", min=0)]
HoldBytes = Annotated[int | None, typer.Option(help="Bytes that holds may protect; 0: no holds.", min=0)]
Requests = Annotated[int | None, typer.Option(help="Requests a second; 0: no limit.", min=0)]
Rate = Annotated[int | None, typer.Option(help="Payload bytes a second; 0: no limit.", min=0)]
Concurrent = Annotated[int | None, typer.Option(help="Requests at once; 0: no limit.", min=0)]
OverQuota = Annotated[
    str | None, typer.Option(help="At the quota: reject, or make_room by its own least valuable.", show_default=False)
]
Readers = Annotated[
    list[str] | None,
    typer.Option("--reader", help="Public, readable by this tenant, or '*'; may be repeated.", show_default=False),
]


@namespaces.command("create")
def create(
    name: Annotated[str, typer.Argument(help="a-z, 0-9, '.', '_', '-'; at most 64.")],
    tenant: Tenant = "-",
    durability: DurabilityOption = None,
    ttl: Ttl = None,
    max_ttl: MaxTtl = None,
    sliding: Sliding = None,
    limit_bytes: LimitBytes = None,
    limit_objects: LimitObjects = None,
    limit_s3_bytes: LimitS3Bytes = None,
    nvme_bytes: NvmeBytes = None,
    hold_bytes: HoldBytes = None,
    requests_per_second: Requests = None,
    bytes_per_second: Rate = None,
    concurrent_requests: Concurrent = None,
    over_quota: OverQuota = None,
    reader: Readers = None,
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Make a namespace: its own keys, its own quota; it shares nothing with others, unless it has readers."""
    policy = {
        "durability": durability,
        "default_ttl": ttl,
        "max_ttl": max_ttl,
        "sliding_ttl": sliding,
        "limit_bytes": limit_bytes,
        "limit_objects": limit_objects,
        "limit_s3_bytes": limit_s3_bytes,
        "nvme_bytes": nvme_bytes,
        "hold_bytes": hold_bytes,
        "requests_per_second": requests_per_second,
        "bytes_per_second": bytes_per_second,
        "concurrent_requests": concurrent_requests,
        "over_quota": over_quota,
        **({"visibility": "public", "readers": reader} if reader else {}),
    }
    body = {"name": name, **_named(policy)}
    _show(ask_admin(data, config, "POST", f"/tenants/{tenant}/namespaces", body=body), json)


@namespaces.command("set")
def set_(
    name: NameArgument,
    tenant: Tenant = "-",
    durability: DurabilityOption = None,
    ttl: Ttl = None,
    max_ttl: MaxTtl = None,
    sliding: Sliding = None,
    limit_bytes: LimitBytes = None,
    limit_objects: LimitObjects = None,
    limit_s3_bytes: LimitS3Bytes = None,
    nvme_bytes: NvmeBytes = None,
    hold_bytes: HoldBytes = None,
    requests_per_second: Requests = None,
    bytes_per_second: Rate = None,
    concurrent_requests: Concurrent = None,
    over_quota: OverQuota = None,
    reader: Readers = None,
    private: Annotated[bool, typer.Option("--private", help="No other tenant reads it any more.")] = False,
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Change the policy; what is not named stays. Every gateway follows within seconds."""
    policy = {
        "durability": durability,
        "default_ttl": ttl,
        "max_ttl": max_ttl,
        "sliding_ttl": sliding,
        "limit_bytes": limit_bytes,
        "limit_objects": limit_objects,
        "limit_s3_bytes": limit_s3_bytes,
        "nvme_bytes": nvme_bytes,
        "hold_bytes": hold_bytes,
        "requests_per_second": requests_per_second,
        "bytes_per_second": bytes_per_second,
        "concurrent_requests": concurrent_requests,
        "over_quota": over_quota,
        **({"visibility": "public", "readers": reader} if reader else {}),
        **({"visibility": "private", "readers": []} if private else {}),
    }
    _show(ask_admin(data, config, "PATCH", f"/tenants/{tenant}/namespaces/{name}", body=_named(policy)), json)


@namespaces.command("suspend")
def suspend(
    name: NameArgument, tenant: Tenant = "-", data: Data = None, config: Config = None, json: Json = False
) -> None:
    """Take no request for a namespace; its chunks stay."""
    path = f"/tenants/{tenant}/namespaces/{name}"
    _show(ask_admin(data, config, "PATCH", path, body={"state": "suspended"}), json)


@namespaces.command("resume")
def resume(
    name: NameArgument, tenant: Tenant = "-", data: Data = None, config: Config = None, json: Json = False
) -> None:
    """Serve a suspended namespace again."""
    _show(ask_admin(data, config, "PATCH", f"/tenants/{tenant}/namespaces/{name}", body={"state": "active"}), json)


@namespaces.command("list")
def list_(tenant: Tenant = "-", data: Data = None, config: Config = None, json: Json = False) -> None:
    """List namespaces with their policy."""
    _show(ask_admin(data, config, "GET", f"/tenants/{tenant}/namespaces"), json)


@namespaces.command("show")
def show(
    name: NameArgument, tenant: Tenant = "-", data: Data = None, config: Config = None, json: Json = False
) -> None:
    """Show one namespace with its whole policy."""
    answer = ask_admin(data, config, "GET", f"/tenants/{tenant}/namespaces/{name}")
    if json:
        print_json(answer)
        return
    print_table(f"Namespace {name}", ["what", "value"], [[key, str(value)] for key, value in answer.items()])


def _named(policy: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in policy.items() if value is not None}


def _show(answer: Any, json: bool) -> None:
    if json:
        print_json(answer)
        return
    print_table(
        "Namespaces",
        ["namespace", "state", "durability", "TTL ", "longest TTL ", "epoch ", "stored ", "limit ", "readers"],
        [
            [
                one["name"],
                one["state"],
                one["durability"],
                one["default_ttl"],
                one["max_ttl"],
                str(one["epoch"]),
                human_bytes(one["stored_bytes"]),
                human_bytes(one["limit_bytes"]) if one["limit_bytes"] else "none",
                " ".join(one["readers"]) or "–",
            ]
            for one in (answer if isinstance(answer, list) else [answer])
        ],
    )
