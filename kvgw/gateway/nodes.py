"""Forgetting a node that never returns, piece by piece: a request does as much as its time allows, and says if all."""

from __future__ import annotations

from typing import Final

from kvgw.gateway.rooms import Rooms
from kvgw.model import NodeForgetReply, NodeForgetRequest
from storage.tier import blob_name
from tenancy.access import Caller, Permission
from tenancy.errors import RegistryRefused

BATCH: Final = 1000
TIME_SHARE: Final = 0.5
"""Of a request's time; one piece more may follow."""


async def forget_node(rooms: Rooms, caller: Caller, request: NodeForgetRequest) -> NodeForgetReply:
    """Give up what was on a node's disk, in every tenant, and end what only that node had.

    Raises `AccessDenied`, and `RegistryRefused` when the node is alive, unknown or this gateway's own.
    """
    caller.require(Permission.OPERATOR)
    catalog = rooms.catalog
    until = rooms.clock.monotonic() + TIME_SHARE * request.deadline_ms / 1000
    placements = entries = chunks = 0
    for tenant, _ in await catalog.tenants():
        for namespace in await catalog.namespaces(tenant):
            scope = namespace.scope
            while True:
                piece = await catalog.forget_placements(scope, request.node, rooms.time.now_ms(), BATCH)
                placements, entries, chunks = (
                    placements + piece.placements, entries + piece.entries, chunks + piece.chunks
                )  # fmt: skip
                for blob_id in piece.unneeded:
                    rooms.staging.drop(blob_name(scope.namespace, blob_id))
                if piece.unneeded:
                    rooms.backlog.note_dead(scope)
                rooms.metrics.ended.labels("lost").inc(piece.entries)
                if not piece.placements:
                    break
                if rooms.clock.monotonic() >= until:
                    return NodeForgetReply(placements, entries, chunks, done=False)
    known = await catalog.forget_process(request.node, rooms.time.now_ms())
    if not known and not placements and not request.goes_on:
        names = ", ".join(sorted(one.node for one in await catalog.processes()))
        raise RegistryRefused(f"no node {request.node!r} is known; those that are: {names}")
    return NodeForgetReply(placements, entries, chunks, done=True)
