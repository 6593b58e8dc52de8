"""Quota: hard limits in SQL, in the transaction that adds the rows.

``stored_bytes`` and ``objects`` count each chunk once, by its sealed length, from its reservation until its row is
gone; ``s3_bytes`` counts S3 placements in every state. The tenant's row is always locked before the namespace's: that
order excludes deadlocks, and makes the namespace's quota row the mutex of every transaction that changes its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import BigInteger, Connection, bindparam, or_, select, update

from tenancy.errors import NamespaceUnknown
from tenancy.model import Scope, Usage
from tenancy.prepared import KeyStatement, owner
from tenancy.schema import TENANT_SCOPE, quota

_USAGE = (
    quota.c.limit_bytes,
    quota.c.limit_objects,
    quota.c.limit_s3_bytes,
    quota.c.stored_bytes,
    quota.c.objects,
    quota.c.s3_bytes,
)

LOCK: Final = KeyStatement(
    lambda: (
        select(*_USAGE)
        .where(
            quota.c.tenant_id == bindparam("tenant"),
            or_(quota.c.scope_id == TENANT_SCOPE, quota.c.scope_id == bindparam("namespace")),
        )
        .order_by(quota.c.scope_id)  # the tenant's row has the lowest id of all
        .with_for_update()
    )
)

# Typed, since a database that infers the type from "<= 0" would take them for 32-bit integers.
_MORE_BYTES = bindparam("more_bytes", type_=BigInteger)
_MORE_OBJECTS = bindparam("more_objects", type_=BigInteger)
_MORE_S3 = bindparam("more_s3", type_=BigInteger)

ADD: Final = KeyStatement(
    lambda: (
        update(quota)
        .where(
            quota.c.tenant_id == bindparam("tenant"),
            or_(quota.c.scope_id == TENANT_SCOPE, quota.c.scope_id == bindparam("namespace")),
            or_(_MORE_BYTES <= 0, quota.c.stored_bytes + _MORE_BYTES <= quota.c.limit_bytes),
            or_(_MORE_OBJECTS <= 0, quota.c.objects + _MORE_OBJECTS <= quota.c.limit_objects),
            or_(_MORE_S3 <= 0, quota.c.s3_bytes + _MORE_S3 <= quota.c.limit_s3_bytes),
        )
        .values(
            stored_bytes=quota.c.stored_bytes + _MORE_BYTES,
            objects=quota.c.objects + _MORE_OBJECTS,
            s3_bytes=quota.c.s3_bytes + _MORE_S3,
        )
    )
)


@dataclass(frozen=True, slots=True)
class Change:
    """What a transaction adds to (or, negative, takes from) the counters."""

    stored_bytes: int = 0
    objects: int = 0
    s3_bytes: int = 0


def lock(connection: Connection, scope: Scope) -> tuple[Usage, Usage]:
    """Lock the tenant's and the namespace's quota rows and return their counters, in this order."""
    rows = LOCK.rows(connection, owner(scope))
    if len(rows) != 2:
        raise NamespaceUnknown("the namespace does not exist")
    return Usage(*rows[0]), Usage(*rows[1])


def grant(usages: tuple[Usage, Usage], wanted: int, each: Change) -> int:
    """How many of `wanted` equal objects fit under both limits: the length of the leading run that is granted."""
    for usage in usages:
        wanted = min(wanted, usage.limit_objects - usage.objects)
        wanted = min(wanted, (usage.limit_bytes - usage.stored_bytes) // each.stored_bytes)
        if each.s3_bytes:
            wanted = min(wanted, (usage.limit_s3_bytes - usage.s3_bytes) // each.s3_bytes)
    return max(0, wanted)


def apply(connection: Connection, scope: Scope, change: Change) -> None:
    """Add `change` to both rows. The guard holds even if a caller's arithmetic is wrong: then nothing is written."""
    if change == Change():
        return
    changed = ADD.count(
        connection,
        {
            **owner(scope),
            "more_bytes": change.stored_bytes,
            "more_objects": change.objects,
            "more_s3": change.s3_bytes,
        },
    )
    if changed != 2:
        raise AssertionError(f"quota guard refused {change}: the counters and the grant disagree")
