"""Visible: the one predicate that match, get and reserve share.

An entry is visible to a gateway when it has not expired, its chunk is live, its key epoch is allowed, its namespace
active, and its bytes can be had from here: in S3, on this node's NVMe, or still in this very process's staging.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Exists,
    Select,
    and_,
    bindparam,
    exists,
    or_,
    select,
)

from tenancy.model import FoundChunk, Node, Scope, reached
from tenancy.prepared import KeyStatement, Parameters, bound, owner, pieces
from tenancy.schema import chunk, entry, gateway_process, namespace, placement, states, unexpired


def _placed(tier: ColumnElement[str], *among: ColumnElement[str], node: ColumnElement[str] | None = None) -> Exists:
    return exists(
        select(1).where(
            placement.c.tenant_id == chunk.c.tenant_id,
            placement.c.namespace_id == chunk.c.namespace_id,
            placement.c.blob_id == chunk.c.blob_id,
            placement.c.tier == tier,
            placement.c.state.in_(among),
            *(() if node is None else (placement.c.node == node,)),
        )
    ).correlate(chunk)


_AT_HOME = and_(chunk.c.home_node == bindparam("node"), chunk.c.home_boot == bindparam("boot"))
_ON_NVME = _placed(states.NVME, states.OK, node=bindparam("node"))
_ON_S3 = _placed(states.S3, states.OK)
_ON_HOME_NVME = _placed(states.NVME, states.OK, node=chunk.c.home_node)

_SEAL_COLUMNS = (
    chunk.c.blob_id,
    chunk.c.chunk_id,
    chunk.c.salt,
    chunk.c.tag_root,
    chunk.c.epoch,
    chunk.c.seg_log2,
    chunk.c.length,
    chunk.c.sealed_length,
    chunk.c.created_ms,
)

_KEPT = (
    namespace.c.tenant_id == bindparam("tenant"),
    namespace.c.namespace_id == bindparam("namespace"),
    namespace.c.state == states.ACTIVE,
    chunk.c.tenant_id == bindparam("tenant"),
    chunk.c.namespace_id == bindparam("namespace"),
    chunk.c.state == states.LIVE,
    chunk.c.epoch >= namespace.c.min_decrypt_epoch,
)

_REACHABLE = (*_KEPT, or_(_AT_HOME, _ON_NVME, _ON_S3))

_ARRIVING = (
    *_KEPT,
    gateway_process.c.boot_id == chunk.c.home_boot,
    gateway_process.c.left_ms.is_(None),
    gateway_process.c.heartbeat_ms > bindparam("heard_since"),
    _placed(states.S3, states.DUE, states.WRITING),
)

_ENTRY_COLUMNS = (entry.c.format_id, entry.c.entry_key, entry.c.ttl_ms, entry.c.expires_ms)
_KEY_AT = 1


def _lookup(formats: Parameters, keys: Parameters) -> Select[Any]:
    """Entries that are `_REACHABLE`, with a row for each placement that makes them so.

    One search in the placements of a chunk; EXISTS in the answer and again in the condition would be four.
    """
    here = or_(
        placement.c.tier == states.S3,
        and_(placement.c.tier == states.NVME, placement.c.node == bindparam("node")),
    )
    entries = namespace.join(
        entry, and_(entry.c.tenant_id == namespace.c.tenant_id, entry.c.namespace_id == namespace.c.namespace_id)
    )
    chunks = entries.join(
        chunk,
        and_(
            chunk.c.tenant_id == entry.c.tenant_id,
            chunk.c.namespace_id == entry.c.namespace_id,
            chunk.c.blob_id == entry.c.blob_id,
        ),
    )
    placed = chunks.outerjoin(
        placement,
        and_(
            placement.c.tenant_id == chunk.c.tenant_id,
            placement.c.namespace_id == chunk.c.namespace_id,
            placement.c.blob_id == chunk.c.blob_id,
            placement.c.state == states.OK,
            here,
        ),
    )
    return (
        select(*_ENTRY_COLUMNS, *_SEAL_COLUMNS, _AT_HOME.label("at_home"), placement.c.tier)
        .select_from(placed)
        .where(
            namespace.c.tenant_id == bindparam("tenant"),
            namespace.c.namespace_id == bindparam("namespace"),
            namespace.c.state == states.ACTIVE,
            entry.c.format_id.in_(formats),
            entry.c.entry_key.in_(keys),
            unexpired(bindparam("now")),
            chunk.c.state == states.LIVE,
            chunk.c.epoch >= namespace.c.min_decrypt_epoch,
            or_(_AT_HOME, placement.c.tier.is_not(None)),
        )
    )


LOOKUP: Final = KeyStatement(_lookup)


def _arriving(keys: Parameters) -> Select[Any]:
    return select(*_ENTRY_COLUMNS, *_SEAL_COLUMNS, _ON_HOME_NVME.label("on_nvme")).where(
        *bound(entry),
        entry.c.format_id == bindparam("format"),
        entry.c.entry_key.in_(keys),
        unexpired(bindparam("now")),
        chunk.c.blob_id == entry.c.blob_id,
        *_ARRIVING,
    )


def _reachable_content(chunk_ids: Parameters) -> Select[Any]:
    return select(chunk.c.chunk_id, chunk.c.blob_id, _ON_NVME.label("on_nvme"), _ON_S3.label("on_s3")).where(
        chunk.c.format_id == bindparam("format"),
        chunk.c.epoch == bindparam("epoch"),
        chunk.c.chunk_id.in_(chunk_ids),
        *_REACHABLE,
    )


ARRIVING: Final = KeyStatement(_arriving)
REACHABLE_CONTENT: Final = KeyStatement(_reachable_content)


def lookup(
    connection: Connection,
    scope: Scope,
    format_ids: Sequence[int],
    entry_keys: Sequence[bytes],
    node: Node,
    now_ms: int,
) -> dict[bytes, FoundChunk]:
    """Those of `entry_keys` that are visible to `node` at `now_ms`. One statement, unless bind parameters run out."""
    found: dict[bytes, FoundChunk] = {}
    at = {**owner(scope), "now": now_ms, "node": node.node, "boot": node.boot}
    for some in pieces(entry_keys):
        rows = LOOKUP.rows(connection, at, format_ids, some)
        for *columns, at_home, tier in rows:
            key = columns[_KEY_AT]
            before = found.get(key)
            on_nvme = tier == "nvme" or (before is not None and before.on_nvme)
            on_s3 = tier == "s3" or (before is not None and before.on_s3)
            found[key] = FoundChunk(*[*columns, bool(at_home), on_nvme, on_s3])
    return found


def arriving(
    connection: Connection, scope: Scope, format_id: int, entry_keys: Sequence[bytes], heard_since_ms: int, now_ms: int
) -> dict[bytes, FoundChunk]:
    """Those of `entry_keys` that another gateway, heard since then, is about to write to S3.

    They cannot be read from here yet, but need not be stored again: their durability is what they have at home.
    """
    rows = ARRIVING.rows(
        connection,
        {**owner(scope), "format": format_id, "now": now_ms, "heard_since": heard_since_ms},
        entry_keys,
    )
    return {columns[_KEY_AT]: FoundChunk(*[*columns, False, bool(on_nvme), False]) for *columns, on_nvme in rows}


def reachable_content(
    connection: Connection, scope: Scope, format_id: int, epoch: int, chunk_ids: Sequence[bytes], node: Node
) -> dict[bytes, tuple[bytes, str]]:
    """Live chunks with this content that `node` can read: chunk id → (blob id, durability that it has now)."""
    rows = REACHABLE_CONTENT.rows(
        connection,
        {**owner(scope), "format": format_id, "epoch": epoch, "node": node.node, "boot": node.boot},
        chunk_ids,
    )
    return {chunk_id: (blob_id, reached(on_nvme=on_nvme, on_s3=on_s3)) for chunk_id, blob_id, on_nvme, on_s3 in rows}
