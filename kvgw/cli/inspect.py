"""``kvgw status``, ``kvgw stats`` and ``kvgw namespace``: questions to the running gateway."""

from __future__ import annotations

from kvgw.cli.options import Data, EndpointOption, Json, ask
from kvgw.cli.output import console, human_bytes, human_limit, print_json, print_table
from kvgw.model import (
    NamespacesReply,
    NamespacesRequest,
    StatusReply,
    StatusRequest,
)


def status(data: Data = None, endpoint: EndpointOption = None, json: Json = False) -> None:
    """Show how the running gateway is: rooms, tiers, what waits to be written, and what needs attention."""
    reply = ask(data, endpoint, lambda transport: transport.ask(StatusRequest(), StatusReply))
    if json:
        print_json(reply)
        return
    out = console()
    out.print(f"kvgw {reply.version} on {reply.node}: {'ready' if reply.ready else 'NOT ready'}", highlight=False)
    out.print(f"catalog {reply.catalog} · root key {reply.root_key} · {reply.connections} connections", highlight=False)
    staging = reply.staging
    print_table(
        "Staging",
        ["capacity ", "windows ", "clean ", "dirty ", "free ", "waiting ", "memory"],
        [
            [
                *map(
                    human_bytes,
                    (
                        staging.capacity_bytes,
                        staging.window_bytes,
                        staging.clean_bytes,
                        staging.dirty_bytes,
                        staging.free_bytes,
                    ),
                ),
                str(staging.waiting),
                staging.locked,
            ]
        ],
    )
    print_table(
        "Tiers",
        ["tier", "state", "used ", "limit ", "to write ", "bytes ", "oldest "],
        [
            [
                tier.tier,
                tier.state,
                human_bytes(tier.used_bytes),
                human_bytes(tier.limit_bytes),
                str(tier.outbox_blobs),
                human_bytes(tier.outbox_bytes),
                f"{tier.outbox_age_ms / 1000:.1f} s",
            ]
            for tier in reply.tiers
        ],
    )
    for note in reply.notes:
        out.print(f"! {note}", highlight=False, soft_wrap=True)


def stats(data: Data = None, endpoint: EndpointOption = None, json: Json = False) -> None:
    """Show what each namespace of your tenant holds and may hold."""
    reply = ask(data, endpoint, lambda transport: transport.ask(NamespacesRequest(), NamespacesReply))
    if json:
        print_json(reply)
        return
    print_table(
        "Namespaces",
        ["namespace", "entries ", "chunks ", "formats ", "stored ", "limit ", "in S3 ", "objects "],
        [
            [
                one.name,
                str(one.usage.entries),
                str(one.usage.chunks),
                str(one.usage.formats),
                human_bytes(one.usage.stored_bytes),
                human_limit(one.usage.limit_bytes),
                human_bytes(one.usage.s3_bytes),
                str(one.usage.objects),
            ]
            for one in reply.namespaces
        ],
    )
