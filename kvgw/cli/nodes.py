"""``kvgw node``: what several gateways remember of each other."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from kvgw.cli.options import Data, EndpointOption, Json, ask
from kvgw.cli.output import console, print_json
from kvgw.model import NodeForgetReply, NodeForgetRequest
from kvgw.transport import SocketTransport

nodes = typer.Typer(help="Nodes of this catalog.", no_args_is_help=True)


@nodes.callback()
def _group() -> None:
    """Nodes of this catalog."""


@nodes.command("forget")
def forget(
    node: Annotated[str, typer.Argument(help="Name of the node, as kvgw status showed it there.")],
    data: Data = None,
    endpoint: EndpointOption = None,
    json: Json = False,
) -> None:
    """Give up a node that never returns: its disk's chunks no longer count, and what only it had ends.

    Refused while its gateway is alive. What is also in S3, or on another node, stays.
    """
    placements = entries = chunks = 0
    done = False
    while not done:
        request = NodeForgetRequest(node, goes_on=placements > 0)
        reply = ask(data, endpoint, partial(_send, request))
        placements, entries, chunks = placements + reply.placements, entries + reply.entries, chunks + reply.chunks
        done = reply.done
    if json:
        print_json(NodeForgetReply(placements, entries, chunks, done=True))
    else:
        console().print(
            f"forgot node {node}: {placements} blobs of its disk given up, {entries} entries ended, "
            f"{chunks} chunks gone and their quota given back",
            highlight=False,
            soft_wrap=True,
        )


async def _send(request: NodeForgetRequest, transport: SocketTransport) -> NodeForgetReply:
    return await transport.ask(request, NodeForgetReply)
