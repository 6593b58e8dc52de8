"""Statements of write-back's outbox, each compiled once; what they are for is in `tenancy.placements`."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Select,
    and_,
    bindparam,
    delete,
    exists,
    null,
    or_,
    select,
    update,
)

from tenancy.prepared import KeyStatement, Parameters, bound
from tenancy.schema import UNSETTLED, chunk, placement, states

_COPY: Final = placement.alias("copy")


def _copied(*there: ColumnElement[bool]) -> ColumnElement[bool]:
    return exists(
        select(1).where(*bound(_COPY), _COPY.c.blob_id == placement.c.blob_id, _COPY.c.state == states.OK, *there)
    )


def _is_over(until_ms: ColumnElement[int]) -> ColumnElement[bool]:
    """The time has come, or is further away than any time that was right."""
    return or_(until_ms <= bindparam("now"), until_ms > bindparam("furthest"))


def _free() -> Select[Any]:
    at_home = exists(
        select(1).where(*bound(chunk), chunk.c.blob_id == placement.c.blob_id, chunk.c.home_boot == bindparam("boot"))
    )
    on_nvme = _copied(_COPY.c.tier == states.NVME, _COPY.c.node == bindparam("here"))
    on_s3 = _copied(_COPY.c.tier == states.S3)
    free = or_(
        and_(placement.c.state == states.DUE, _is_over(placement.c.not_before_ms)),
        and_(placement.c.state == states.WRITING, _is_over(placement.c.lease_ms)),
        # The folder is one process's at a time: whoever else began a write into it has ended.
        and_(
            placement.c.state == states.WRITING,
            placement.c.tier == states.NVME,
            placement.c.owner != bindparam("boot"),
        ),
    )
    return (
        select(
            placement.c.blob_id,
            placement.c.object,
            placement.c.node,
            placement.c.length,
            placement.c.attempts,
            on_nvme.label("on_nvme"),
            on_s3.label("on_s3"),
        )
        .where(
            *bound(placement),
            placement.c.tier == bindparam("in_tier"),
            placement.c.state.in_((states.DUE, states.WRITING)),
            UNSETTLED,
            or_(placement.c.tier == states.S3, placement.c.node == bindparam("here")),
            free,
            or_(at_home, on_nvme, on_s3),
        )
        .order_by(placement.c.not_before_ms)
        .limit(bindparam("most", type_=BigInteger))
        .with_for_update(skip_locked=True)
    )


def _these(blob_ids: Parameters) -> tuple[ColumnElement[bool], ...]:
    return (
        *bound(placement),
        placement.c.blob_id.in_(blob_ids),
        placement.c.tier == bindparam("in_tier"),
        placement.c.node == bindparam("on_node"),
    )


def _mine() -> tuple[ColumnElement[bool], ...]:
    """A write of this process that goes on."""
    return placement.c.state == states.WRITING, placement.c.owner == bindparam("boot")


FREE: Final = KeyStatement(_free)
CLAIMED: Final = KeyStatement(
    lambda blob_ids: (
        update(placement)
        .where(*_these(blob_ids))
        .values(
            state=states.WRITING,
            owner=bindparam("boot"),
            lease_ms=bindparam("until", type_=BigInteger),
        )
    )
)
FINISHED: Final = KeyStatement(
    lambda blob_ids: (
        update(placement)
        .where(*_these(blob_ids), *_mine())
        .values(state=states.OK, owner=null(), lease_ms=null(), updated_ms=bindparam("now"))
        .returning(placement.c.blob_id)
    )
)
WHOLE: Final = KeyStatement(
    lambda blob_ids: select(placement.c.blob_id).where(*_these(blob_ids), placement.c.state == states.OK)
)
WAIT_ENDED: Final = KeyStatement(
    lambda blob_ids: (
        update(placement)
        .where(
            *_these(blob_ids),
            placement.c.state == states.DOOMED,
            placement.c.not_before_ms == bindparam("until", type_=BigInteger),
        )
        .values(not_before_ms=bindparam("now"))
        .returning(placement.c.blob_id)
    )
)
"""A doomed write has no owner any more; when its lease was to end tells it from one that was taken over."""
KNOWN: Final = KeyStatement(lambda blob_ids: select(placement.c.blob_id).where(*_these(blob_ids)))
POSTPONED: Final = KeyStatement(
    lambda: (
        update(placement)
        .where(
            *bound(placement),
            placement.c.blob_id == bindparam("blob"),
            placement.c.tier == bindparam("in_tier"),
            placement.c.node == bindparam("on_node"),
            *_mine(),
        )
        .values(
            state=states.DUE,
            owner=null(),
            lease_ms=null(),
            attempts=placement.c.attempts + 1,
            not_before_ms=bindparam("again_ms"),
        )
    )
)
DROPPED: Final = KeyStatement(
    lambda blob_ids: (
        delete(placement).where(*_these(blob_ids), *_mine()).returning(placement.c.tier, placement.c.length)
    )
)
OUTSTANDING: Final = KeyStatement(
    lambda blob_ids: select(placement.c.blob_id).where(
        *bound(placement),
        placement.c.blob_id.in_(blob_ids),
        placement.c.state.in_((states.DUE, states.WRITING)),
    )
)
