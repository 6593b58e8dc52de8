"""Gateway processes and the catalog's idea of time: who is alive, and how late it has ever been."""

from __future__ import annotations

from sqlalchemy import Connection, delete, insert, select, update

from tenancy.model import Node
from tenancy.schema import clock_mark, gateway_process


def announce(connection: Connection, node: Node, version: str, now_ms: int) -> None:
    """A gateway process begins; earlier runs of its node are over."""
    connection.execute(delete(gateway_process).where(gateway_process.c.node == node.node))
    connection.execute(
        insert(gateway_process),
        {
            "boot_id": node.boot,
            "node": node.node,
            "version": version,
            "started_ms": now_ms,
            "heartbeat_ms": now_ms,
        },
    )
    _raise_high_water(connection, now_ms)


def heartbeat(connection: Connection, node: Node, now_ms: int) -> None:
    """This process is alive, and it is at least `now_ms`."""
    connection.execute(
        update(gateway_process).where(gateway_process.c.boot_id == node.boot).values(heartbeat_ms=now_ms)
    )
    _raise_high_water(connection, now_ms)


def leave(connection: Connection, node: Node) -> None:
    """A gateway process ends in good order."""
    connection.execute(delete(gateway_process).where(gateway_process.c.boot_id == node.boot))


def high_water_ms(connection: Connection) -> int:
    """The latest time that was ever written down; a clock set back must not bring expired entries to life."""
    return connection.scalar(select(clock_mark.c.high_water_ms)) or 0


def _raise_high_water(connection: Connection, now_ms: int) -> None:
    raised = connection.execute(
        update(clock_mark).where(clock_mark.c.high_water_ms < now_ms).values(high_water_ms=now_ms)
    )
    if raised.rowcount == 0 and connection.scalar(select(clock_mark.c.mark_id)) is None:
        connection.execute(insert(clock_mark), {"mark_id": 1, "high_water_ms": now_ms})
