"""This node's outbox: how much waits to be written by it and for how long, what of it is safe on its disk, and what of
all that waits in staging is owed at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Select, and_, bindparam, exists, func, or_, select

from tenancy.model import Node, Scope
from tenancy.prepared import KeyStatement, Parameters, bound, owner
from tenancy.schema import UNSETTLED, chunk, owned, placement, reservation, states


@dataclass(frozen=True, slots=True)
class Waiting:
    """Placements that wait to be written into one tier."""

    blobs: int
    bytes: int
    since_ms: int
    """Since when (Unix ms) the oldest has waited, however often it was tried."""


@dataclass(frozen=True, slots=True)
class Debts:
    """What the catalog knows of blobs that wait in this gateway's staging; of the others it has no row."""

    owed: frozenset[bytes]
    """Still to be written, into this node's disk or into S3."""
    kept: frozenset[bytes]
    """Live, and nothing of them is to be written."""
    ended: frozenset[bytes]
    """On their way out."""
    under_way: frozenset[bytes]
    """This process's reservations: a blob without a row may belong to one of them."""


def _states(blob_ids: Parameters) -> Select[Any]:
    due = exists(
        select(1).where(
            *bound(placement),
            placement.c.blob_id == chunk.c.blob_id,
            placement.c.state.in_([states.DUE, states.WRITING]),
            or_(placement.c.tier == states.S3, placement.c.node == bindparam("here")),
        )
    )
    return select(chunk.c.blob_id, chunk.c.state, due).where(*bound(chunk), chunk.c.blob_id.in_(blob_ids))


STATES: Final = KeyStatement(_states)
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
            placement.c.state.in_([states.DUE, states.WRITING]),
            UNSETTLED,
            or_(
                placement.c.node == bindparam("here"),
                and_(placement.c.tier == states.S3, chunk.c.home_node == bindparam("here")),
            ),
        )
        .group_by(placement.c.tier)
    )
)


def own_outbox(connection: Connection, scope: Scope, node: Node) -> dict[str, Waiting]:
    """Per tier what this node is to write: into its disk, and into S3 what was stored through it."""
    rows = OWN.rows(connection, {**owner(scope), "here": node.node})
    return {tier: Waiting(count, int(length), since_ms) for tier, count, length, since_ms in rows}


def debts(connection: Connection, scope: Scope, node: Node, blob_ids: Sequence[bytes]) -> Debts:
    """What this node still owes of these blobs."""
    # The reservations first: of one that is over by now, the rows are there.
    under_way = connection.scalars(
        select(reservation.c.reservation_id).where(*owned(reservation, scope), reservation.c.owner == node.boot)
    ).all()
    rows = STATES.rows(connection, {**owner(scope), "here": node.node}, blob_ids)
    return Debts(
        owed=frozenset(blob_id for blob_id, state, due in rows if state == "live" and due),
        kept=frozenset(blob_id for blob_id, state, due in rows if state == "live" and not due),
        ended=frozenset(blob_id for blob_id, state, _ in rows if state != "live"),
        under_way=frozenset(under_way),
    )


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
