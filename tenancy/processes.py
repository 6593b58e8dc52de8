"""Gateway processes: who is alive, who does which shared job, and the catalog's idea of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Select, delete, func, insert, or_, select, text, update

from tenancy.errors import CatalogMisconfigured, NodeTaken
from tenancy.model import Node
from tenancy.schema import clock_mark, gateway_process, maintenance_lease
from tenancy.timekeeping import FURTHEST_MS

PROCESS_LEASE_MS: Final = 15_000
"""A gateway that was not heard for so long is taken for dead, and what only its staging held for lost."""


CLOCKS_MS: Final = 60_000
"""More than the times of two gateways of one catalog differ by."""


@dataclass(frozen=True, slots=True)
class Process:
    """A gateway process as it announced itself. Times in Unix milliseconds."""

    boot: str
    node: str
    version: str
    started_ms: int
    heartbeat_ms: int
    left_ms: int | None


def announce(connection: Connection, node: Node, version: str, now_ms: int, lease_ms: int) -> None:
    """A gateway process begins; earlier runs of its node are over.

    Raises `NodeTaken` when another process of this node was alive within the lease: two gateways with one name would
    take each other's disk for their own. Raises `CatalogMisconfigured` when another gateway is alive and one of the two
    has what only a single gateway may have.
    """
    serialise(connection)
    taken = connection.execute(
        select(gateway_process.c.boot_id, gateway_process.c.heartbeat_ms).where(
            gateway_process.c.node == node.node,
            gateway_process.c.boot_id != node.boot,
            gateway_process.c.left_ms.is_(None),
            gateway_process.c.heartbeat_ms > now_ms - lease_ms,
        )
    ).first()
    if taken is not None:
        raise NodeTaken(
            f"node {node.node!r} is run by another gateway process (boot {taken.boot_id}, last heard "
            f"{(now_ms - taken.heartbeat_ms) / 1000:.1f} s ago); give each gateway a data folder, and so a name, of "
            f"its own. After a crash its name is free {lease_ms / 1000:g} s later"
        )
    _check_company(connection, node, now_ms)
    connection.execute(delete(gateway_process).where(gateway_process.c.node == node.node))
    connection.execute(
        insert(gateway_process),
        {
            "boot_id": node.boot,
            "node": node.node,
            "version": version,
            "started_ms": now_ms,
            "heartbeat_ms": now_ms,
            "left_ms": None,
            "alone": node.alone or None,
            "coherent": True,
        },
    )
    raise_high_water(connection, now_ms)


def _check_company(connection: Connection, node: Node, now_ms: int) -> None:
    others = connection.execute(
        select(gateway_process.c.node, gateway_process.c.alone)
        .where(
            gateway_process.c.node != node.node,
            gateway_process.c.left_ms.is_(None),
            gateway_process.c.heartbeat_ms > now_ms - PROCESS_LEASE_MS,
        )
        .order_by(gateway_process.c.node)
    ).all()
    for other in others:
        name, reason = (node.node, node.alone) if node.alone else (other.node, other.alone)
        if reason:
            raise CatalogMisconfigured(
                f"node {other.node!r} is alive on this catalog, and node {name!r} can only be alone on it: {reason}. "
                "Several gateways need s3.bucket and keys.store = s3, each of them"
            )


def heartbeat(connection: Connection, node: Node, now_ms: int) -> bool:
    """This process is alive, and it is at least `now_ms`. False: it had been given up, and has to announce itself."""
    beaten = connection.execute(
        update(gateway_process)
        .where(gateway_process.c.boot_id == node.boot, gateway_process.c.left_ms.is_(None))
        .values(heartbeat_ms=now_ms)
    )
    raise_high_water(connection, now_ms)
    return beaten.rowcount == 1


def leave(connection: Connection, node: Node, now_ms: int) -> None:
    """A gateway process ends in good order; its node is remembered, since its disk still has blobs."""
    connection.execute(update(gateway_process).where(gateway_process.c.boot_id == node.boot).values(left_ms=now_ms))
    raise_high_water(connection, now_ms)  # the last beats may have been lost


def processes(connection: Connection) -> list[Process]:
    """All processes that are remembered: the last one of each node."""
    rows = connection.execute(select(gateway_process).order_by(gateway_process.c.node))
    return [Process(row.boot_id, row.node, row.version, row.started_ms, row.heartbeat_ms, row.left_ms) for row in rows]


def live_boots(connection: Connection, now_ms: int, lease_ms: int) -> list[str]:
    """Boot ids of the processes that were heard within the lease."""
    return list(connection.scalars(alive(now_ms, lease_ms)))


def alive(now_ms: int, lease_ms: int) -> Select[tuple[str]]:
    """The same as a part of another statement."""
    return select(gateway_process.c.boot_id).where(
        gateway_process.c.left_ms.is_(None), gateway_process.c.heartbeat_ms > now_ms - lease_ms
    )


def lead(connection: Connection, job: str, node: Node, until_ms: int, now_ms: int) -> bool:
    """Take or keep a job that one gateway does for all; whether this process has it until `until_ms`.

    Who has it for far longer than anybody asks for it had a clock that was ahead, and has ended.
    """
    over = or_(maintenance_lease.c.owner == node.boot, maintenance_lease.c.until_ms <= now_ms)
    if until_ms > now_ms:
        over = or_(over, maintenance_lease.c.until_ms > max(until_ms, now_ms + FURTHEST_MS) + CLOCKS_MS)
    taken = connection.execute(
        update(maintenance_lease).where(maintenance_lease.c.job == job, over).values(owner=node.boot, until_ms=until_ms)
    )
    if taken.rowcount == 1:
        return True
    serialise(connection)
    if connection.scalar(select(maintenance_lease.c.owner).where(maintenance_lease.c.job == job)) is not None:
        return False
    connection.execute(insert(maintenance_lease), {"job": job, "owner": node.boot, "until_ms": until_ms})
    return True


def high_water_ms(connection: Connection) -> int:
    """The latest time that was ever written down; a clock set back must not bring expired entries to life."""
    return connection.scalar(select(clock_mark.c.high_water_ms)) or 0


def database_now_ms(connection: Connection) -> int | None:
    """What time the database has, where it is a server that several gateways share; None on SQLite."""
    if connection.dialect.name != "postgresql":
        return None
    return int(connection.scalar(select(func.extract("epoch", func.clock_timestamp()) * 1000)) or 0)


def raise_high_water(connection: Connection, now_ms: int) -> None:
    """Write down that it is at least `now_ms`."""
    raised = connection.execute(
        update(clock_mark).where(clock_mark.c.high_water_ms < now_ms).values(high_water_ms=now_ms)
    )
    if raised.rowcount == 0 and connection.scalar(select(clock_mark.c.mark_id)) is None:
        serialise(connection)
        if connection.scalar(select(clock_mark.c.mark_id)) is None:
            connection.execute(insert(clock_mark), {"mark_id": 1, "high_water_ms": now_ms})


def serialise(connection: Connection) -> None:
    """Let one transaction at a time add such rows; SQLite's transactions are serial anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(5364714)"))
