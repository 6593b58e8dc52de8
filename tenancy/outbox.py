"""This node's outbox: how much waits to be written by it and for how long, and what of it is safe on its disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, and_, bindparam, func, literal_column, or_, select

from tenancy.model import Node, Scope
from tenancy.prepared import KeyStatement, bound, owner
from tenancy.schema import UNSETTLED, chunk, owned, placement


@dataclass(frozen=True, slots=True)
class Waiting:
    """Placements that wait to be written into one tier."""

    blobs: int
    bytes: int
    since_ms: int
    """Since when (Unix ms) the oldest has waited, however often it was tried."""


OWN: Final = KeyStatement(
    lambda: (
        select(placement.c.tier, func.count(), func.sum(placement.c.length), func.min(placement.c.updated_ms))
        .join(
            chunk,
            and_(
                chunk.c.tenant_id == placement.c.tenant_id,
                chunk.c.namespace_id == placement.c.namespace_id,
                chunk.c.blob_id == placement.c.blob_id,
            ),
        )
        .where(
            *bound(placement),
            placement.c.state.in_([literal_column("'due'"), literal_column("'writing'")]),
            UNSETTLED,
            or_(
                placement.c.node == bindparam("here"),
                and_(placement.c.tier == literal_column("'s3'"), chunk.c.home_node == bindparam("here")),
            ),
        )
        .group_by(placement.c.tier)
    )
)


def own_outbox(connection: Connection, scope: Scope, node: Node) -> dict[str, Waiting]:
    """Per tier what this node is to write: into its disk, and into S3 what was stored through it."""
    rows = OWN.rows(connection, {**owner(scope), "here": node.node})
    return {tier: Waiting(count, int(length), since_ms) for tier, count, length, since_ms in rows}


def on_disk(connection: Connection, scope: Scope, node: Node, blob_ids: Sequence[bytes]) -> set[bytes]:
    """Those blobs that this node's NVMe has for good."""
    return set(
        connection.scalars(
            select(placement.c.blob_id).where(
                *owned(placement, scope),
                placement.c.tier == "nvme",
                placement.c.node == node.node,
                placement.c.state == "ok",
                placement.c.blob_id.in_(blob_ids),
            )
        )
    )
