"""Quota claimed by a PUT in flight: a row from `reserve` until its commit or abort, or until its lease runs out."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, bindparam, delete, insert, or_

from tenancy import quota
from tenancy.errors import ReservationExpired
from tenancy.model import Scope
from tenancy.prepared import KeyStatement, bound, owner
from tenancy.schema import owned, reservation
from tenancy.timekeeping import FURTHEST_MS

_COLUMNS: Final = tuple(column.name for column in reservation.columns)
_HELD: Final = (reservation.c.bytes, reservation.c.objects, reservation.c.s3_bytes)

BEGIN: Final = KeyStatement(
    lambda: insert(reservation).values({name: bindparam(name, type_=reservation.c[name].type) for name in _COLUMNS})
)
END: Final = KeyStatement(
    lambda: (
        delete(reservation)
        .where(*bound(reservation), reservation.c.reservation_id == bindparam("which"))
        .returning(*_HELD)
    )
)


def begin(
    connection: Connection, scope: Scope, reservation_id: bytes, held: quota.Change, boot: str, lease_until_ms: int
) -> None:
    """Write down that the process `boot` holds so much, which is counted already, until its lease ends."""
    BEGIN.count(
        connection,
        {
            "tenant_id": scope.tenant,
            "namespace_id": scope.namespace,
            "reservation_id": reservation_id,
            "bytes": held.stored_bytes,
            "objects": held.objects,
            "s3_bytes": held.s3_bytes,
            "owner": boot,
            "expires_ms": lease_until_ms,
        },
    )


def end(connection: Connection, scope: Scope, reservation_id: bytes) -> quota.Change:
    """Drop a reservation; what it held is counted still. Raises `ReservationExpired` when it is not there."""
    rows = END.rows(connection, {**owner(scope), "which": reservation_id})
    if not rows:
        raise ReservationExpired("the reservation of this PUT expired before it was finished; send it again")
    return quota.Change(*rows[0])


def end_expired(connection: Connection, scope: Scope, now_ms: int) -> tuple[int, quota.Change]:
    """Drop those whose lease ran out: their number, and what they held, which is counted still."""
    over = or_(reservation.c.expires_ms <= now_ms, reservation.c.expires_ms > now_ms + FURTHEST_MS)
    rows = connection.execute(delete(reservation).where(*owned(reservation, scope), over).returning(*_HELD)).all()
    return len(rows), quota.Change(*(sum(column) for column in zip(*rows, strict=True)))
