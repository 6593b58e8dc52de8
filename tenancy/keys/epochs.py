"""Key epochs of a namespace: transaction bodies over its wrapped keys and the epochs that it seals and opens with.

The namespace's quota row is locked first, as by every transaction that changes its rows: a PUT that commits and a
rotation, or the end of an old key, come one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from sqlalchemy import Connection, Select, delete, func, insert, select, update

from tenancy import generation, quota, registry
from tenancy.errors import NamespaceUnknown, RegistryRefused, ReservationExpired
from tenancy.model import Scope
from tenancy.prepared import KeyStatement, Parameters, bound, owner
from tenancy.registry import KeyRow
from tenancy.removal import remove_entries
from tenancy.schema import chunk, entry, namespace, namespace_key, owned

EPOCH_MAX: Final = 2**31 - 1
NO_EPOCH: Final = 0
"""Epochs begin at 1."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """A data key's epoch."""

    epoch: int
    created_ms: int
    live_chunks: int


@dataclass(frozen=True, slots=True)
class EpochPolicy:
    """What is to be changed; None stays. As in Vault's transit engine."""

    min_decrypt_epoch: int | None = None
    """Chunks of lower epochs are misses on every gateway as soon as this is committed."""
    min_encrypt_epoch: int | None = None
    """A PUT that was sealed in a lower epoch is not announced any more."""
    deletion_allowed: bool | None = None


def _sealed(epochs: Parameters) -> Select[Any]:
    there = (
        select(func.count())
        .select_from(namespace_key)
        .where(*bound(namespace_key), namespace_key.c.purpose == "data", namespace_key.c.epoch.in_(epochs))
        .scalar_subquery()
    )
    return select(namespace.c.state, namespace.c.min_encrypt_epoch, there).where(*bound(namespace))


SEALED: Final = KeyStatement(_sealed)


def rotate(connection: Connection, scope: Scope, make: Callable[[int], KeyRow], now_ms: int) -> int:
    """Add the next data key, of which `make` gives the row, and seal with it from now on; its epoch."""
    quota.lock(connection, scope)
    epoch = _kept(connection, scope)[0] + 1
    if epoch > EPOCH_MAX:
        raise RegistryRefused(f"the namespace has used all {EPOCH_MAX} key epochs; make a new one")
    row = make(epoch)
    connection.execute(
        insert(namespace_key),
        {
            "tenant_id": scope.tenant,
            "namespace_id": scope.namespace,
            "purpose": row.purpose,
            "epoch": row.epoch,
            "wrapped": row.wrapped,
            "created_ms": now_ms,
        },
    )
    connection.execute(update(namespace).where(*owned(namespace, scope)).values(epoch=epoch))
    return epoch


def change(connection: Connection, scope: Scope, wanted: EpochPolicy) -> None:
    """Change what may be opened, sealed and destroyed. Raises `RegistryRefused` for what contradicts itself."""
    quota.lock(connection, scope)
    epoch, decrypt, encrypt = _kept(connection, scope)
    decrypt = decrypt if wanted.min_decrypt_epoch is None else wanted.min_decrypt_epoch
    if wanted.min_encrypt_epoch is not None:
        encrypt = wanted.min_encrypt_epoch
    elif wanted.min_decrypt_epoch is not None:
        encrypt = max(encrypt, decrypt)  # what could not be opened again must not be sealed
    if not 1 <= decrypt <= encrypt <= epoch:
        raise RegistryRefused(
            f"min_decrypt_epoch {decrypt} and min_encrypt_epoch {encrypt} must be from 1 to the key epoch {epoch}, "
            "the second not below the first; rotate first to go higher"
        )
    values: dict[str, object] = {"min_decrypt_epoch": decrypt, "min_encrypt_epoch": encrypt}
    if wanted.deletion_allowed is not None:
        values["deletion_allowed"] = wanted.deletion_allowed
    connection.execute(update(namespace).where(*owned(namespace, scope)).values(**values))


def check_sealed(connection: Connection, scope: Scope, epochs: Collection[int]) -> None:
    """Let chunks of these epochs be announced in an active namespace.

    Raises `NamespaceUnknown` when it takes no chunks, `ReservationExpired` when they were sealed with a key that is
    used or kept no more.
    """
    rows = SEALED.rows(connection, owner(scope), sorted(epochs) or [NO_EPOCH])
    if not rows or rows[0][0] != "active":
        raise NamespaceUnknown("the namespace takes no chunks: it is suspended or on its way out")
    _, lowest, there = rows[0]
    if there != len(epochs) or min(epochs, default=lowest) < lowest:
        raise ReservationExpired("the key that this PUT was sealed with is not used any more; send it again")


def rewrap(connection: Connection, scope: Scope, anew: Callable[[KeyRow], KeyRow | None]) -> int:
    """Replace each wrapped key by what `anew` makes of it, None leaves it; how many were replaced."""
    quota.lock(connection, scope)
    replaced = 0
    for row in registry.wrapped_keys(connection, scope):
        fresh = anew(row)
        if fresh is not None:
            connection.execute(
                update(namespace_key)
                .where(
                    *owned(namespace_key, scope),
                    namespace_key.c.purpose == row.purpose,
                    namespace_key.c.epoch == row.epoch,
                )
                .values(wrapped=fresh.wrapped)
            )
            replaced += 1
    return replaced


def epochs(connection: Connection, scope: Scope) -> list[Epoch]:
    """The data keys that there are, ascending, each with the chunks that need it."""
    counts = connection.execute(
        select(chunk.c.epoch, func.count()).where(*owned(chunk, scope), chunk.c.state == "live").group_by(chunk.c.epoch)
    )
    live: dict[int, int] = {row.epoch: row[1] for row in counts}
    return [Epoch(epoch, created_ms, live.get(epoch, 0)) for epoch, created_ms in _data_keys(connection, scope)]


def unused(connection: Connection, scope: Scope, superseded_before_ms: int) -> list[int]:
    """Epochs that no live chunk needs and that were followed by another before that time.

    Until some time after that a request that began before may still announce a chunk of it.
    """
    superseded = [
        epoch
        for (epoch, _), (_, next_created_ms) in pairwise(_data_keys(connection, scope))
        if next_created_ms < superseded_before_ms
    ]
    if not superseded:
        return []
    needed = connection.scalars(
        select(chunk.c.epoch)
        .where(*owned(chunk, scope), chunk.c.state == "live", chunk.c.epoch.in_(superseded))
        .distinct()
    ).all()
    return [epoch for epoch in superseded if epoch not in needed]


def prune(connection: Connection, scope: Scope, superseded_before_ms: int) -> list[int]:
    """Drop the wrapped data keys of `unused` epochs; which ones."""
    quota.lock(connection, scope)
    gone = unused(connection, scope, superseded_before_ms)
    connection.execute(
        delete(namespace_key).where(
            *owned(namespace_key, scope), namespace_key.c.purpose == "data", namespace_key.c.epoch.in_(gone)
        )
    )
    return gone


def end_unreadable(connection: Connection, scope: Scope, now_ms: int, limit: int) -> tuple[int, list[bytes]]:
    """Remove up to `limit` entries that nobody may open any more: sealed in an epoch that is too low, or shredded.

    Returns their number and the blobs that nothing needs any more.
    """
    quota.lock(connection, scope)
    row = connection.execute(
        select(namespace.c.state, namespace.c.min_decrypt_epoch).where(*owned(namespace, scope))
    ).one()
    too_low = () if row.state == "deleting" else (chunk.c.epoch < row.min_decrypt_epoch,)
    found = connection.execute(
        select(entry.c.format_id, entry.c.entry_key)
        .where(*owned(entry, scope), *owned(chunk, scope), chunk.c.blob_id == entry.c.blob_id, *too_low)
        .limit(limit)
    ).all()
    names = [(row.format_id, row.entry_key) for row in found]
    return len(names), remove_entries(connection, scope, names, "lost", now_ms)


def bury(connection: Connection, scope: Scope) -> int:
    """A namespace whose key was destroyed: nothing of it is visible any more; the catalog's new generation.

    Repeatable. The rows of wrapped keys go too, though nothing opens them. `deletion_allowed` was asked before.
    """
    quota.lock(connection, scope)
    connection.execute(update(namespace).where(*owned(namespace, scope)).values(state="deleting"))
    connection.execute(delete(namespace_key).where(*owned(namespace_key, scope)))
    return generation.grow(connection)


def _data_keys(connection: Connection, scope: Scope) -> list[tuple[int, int]]:
    """Epoch and creation of each data key, ascending."""
    rows = connection.execute(
        select(namespace_key.c.epoch, namespace_key.c.created_ms)
        .where(*owned(namespace_key, scope), namespace_key.c.purpose == "data")
        .order_by(namespace_key.c.epoch)
    )
    return [(row.epoch, row.created_ms) for row in rows]


def _kept(connection: Connection, scope: Scope) -> tuple[int, int, int]:
    """Epoch, min_decrypt_epoch and min_encrypt_epoch of a namespace that is not on its way out."""
    row = connection.execute(
        select(namespace.c.epoch, namespace.c.min_decrypt_epoch, namespace.c.min_encrypt_epoch).where(
            *owned(namespace, scope), namespace.c.state != "deleting"
        )
    ).first()
    if row is None:
        raise NamespaceUnknown("the namespace does not exist, or is being deleted")
    return row[0], row[1], row[2]
