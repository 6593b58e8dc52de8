"""Statements of the check of the house, each compiled once; what they are for is in `tenancy.inspecting`."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import BigInteger, Select, and_, bindparam, exists, select

from tenancy.prepared import KeyStatement, Parameters, bound
from tenancy.schema import chunk, entry, placement, states


def _looked_at(*among: Parameters) -> Select[Any]:
    of_chunk = (*bound(placement), placement.c.blob_id == chunk.c.blob_id)
    return (
        select(
            chunk.c.blob_id,
            chunk.c.state,
            chunk.c.home_boot,
            exists(select(1).where(*bound(entry), entry.c.blob_id == chunk.c.blob_id)).label("named"),
            exists(select(1).where(*of_chunk, placement.c.state == states.OK)).label("readable"),
            exists(select(1).where(*of_chunk, placement.c.state != states.DOOMED)).label("kept"),
        )
        .where(
            *bound(chunk),
            chunk.c.blob_id > bindparam("after"),
            *(chunk.c.blob_id.in_(blob_ids) for blob_ids in among),
        )
        .order_by(chunk.c.blob_id)
        .limit(bindparam("most", type_=BigInteger))
    )


def _placed(*among: Parameters) -> Select[Any]:
    of_placement = and_(*bound(chunk), chunk.c.blob_id == placement.c.blob_id)
    return (
        select(placement.c.blob_id, chunk.c.sealed_length, placement.c.updated_ms)
        .join(chunk, of_placement)
        .where(
            *bound(placement),
            placement.c.tier == bindparam("in_tier"),
            placement.c.node == bindparam("on_node"),
            placement.c.state == states.OK,
            placement.c.blob_id > bindparam("after"),
            placement.c.blob_id < bindparam("below"),
            *(placement.c.blob_id.in_(blob_ids) for blob_ids in among),
        )
        .order_by(placement.c.blob_id)
        .limit(bindparam("most", type_=BigInteger))
    )


LOOKED_AT: Final = KeyStatement(_looked_at)
PLACED: Final = KeyStatement(_placed)
"""Each with or without a list of the blobs that it is to look at."""
