"""The generation of a catalog: a number that grows with every deletion and is also kept beside the keys.

A catalog whose number is lower than the one beside the keys is an older copy that was put back: it still has what was
deleted since. It is refused until it is wiped to a cold start.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, select, update

from tenancy.errors import CatalogOutdated
from tenancy.prepared import KeyStatement
from tenancy.schema import clock_mark, tenant

GROWN: Final = KeyStatement(
    lambda: update(clock_mark).values(generation=clock_mark.c.generation + 1).returning(clock_mark.c.generation)
)


def current(connection: Connection) -> int:
    """The catalog's generation."""
    return connection.scalar(select(clock_mark.c.generation)) or 0


def grow(connection: Connection) -> int:
    """Make the generation one higher; the new one."""
    rows = GROWN.rows(connection, {})
    return int(rows[0][0]) if rows else 0


def catch_up(connection: Connection, known: int) -> int:
    """Make the generation higher than `known`, after a wipe; the new one."""
    connection.execute(update(clock_mark).where(clock_mark.c.generation < known).values(generation=known))
    return grow(connection)


def admit(connection: Connection, known: int) -> None:
    """Let a catalog in whose generation is not lower than `known`, the one beside the keys; an empty one catches up.

    Raises `CatalogOutdated` for an older copy.
    """
    mine = current(connection)
    if mine >= known:
        return
    if connection.scalar(select(tenant.c.tenant_id).limit(1)) is None:
        catch_up(connection, known)  # a lost catalog that begins anew: a cold cache, which lists nothing
    else:
        raise CatalogOutdated(
            f"this catalog is an older copy: its generation is {mine}, but the keys have seen {known}. It still lists "
            "chunks that were deleted since. Put back the newest catalog, or run kvgw wipe to keep tenants, tokens and "
            "policies and start with a cold cache"
        )
