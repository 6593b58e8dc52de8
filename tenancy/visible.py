"""Visible: the one predicate that match, get and reserve share.

An entry is visible to a gateway when it has not expired, its chunk is live, its key epoch is allowed, its namespace
active, and its bytes can be had from here: in S3, on this node's NVMe, or still in this very process's staging.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, and_, bindparam, exists, or_, select

from tenancy.model import FoundChunk, Node, Scope
from tenancy.schema import chunk, entry, namespace, placement


def _placed(tier: str, *conditions: object):  # type: ignore[no-untyped-def]  # a SQLAlchemy expression
    return exists(
        select(1).where(
            placement.c.tenant_id == chunk.c.tenant_id,
            placement.c.namespace_id == chunk.c.namespace_id,
            placement.c.blob_id == chunk.c.blob_id,
            placement.c.tier == tier,
            placement.c.state == "ok",
            *conditions,  # type: ignore[arg-type]
        )
    ).correlate(chunk)


_AT_HOME = and_(chunk.c.home_node == bindparam("node"), chunk.c.home_boot == bindparam("boot"))
_ON_NVME = _placed("nvme", placement.c.node == bindparam("node"))
_ON_S3 = _placed("s3")

_CHUNK_COLUMNS = (
    chunk.c.blob_id,
    chunk.c.chunk_id,
    chunk.c.salt,
    chunk.c.tag_root,
    chunk.c.epoch,
    chunk.c.seg_log2,
    chunk.c.length,
    chunk.c.sealed_length,
    chunk.c.created_ms,
    chunk.c.durability,
    _AT_HOME.label("at_home"),
    _ON_NVME.label("on_nvme"),
    _ON_S3.label("on_s3"),
)

_REACHABLE = (
    namespace.c.tenant_id == bindparam("tenant"),
    namespace.c.namespace_id == bindparam("namespace"),
    namespace.c.state == "active",
    chunk.c.tenant_id == bindparam("tenant"),
    chunk.c.namespace_id == bindparam("namespace"),
    chunk.c.state == "live",
    chunk.c.epoch >= namespace.c.min_decrypt_epoch,
    or_(_AT_HOME, _ON_NVME, _ON_S3),
)

_LOOKUP = select(entry.c.format_id, entry.c.entry_key, entry.c.ttl_ms, entry.c.expires_ms, *_CHUNK_COLUMNS).where(
    entry.c.tenant_id == bindparam("tenant"),
    entry.c.namespace_id == bindparam("namespace"),
    entry.c.format_id.in_(bindparam("formats", expanding=True)),
    entry.c.entry_key.in_(bindparam("keys", expanding=True)),
    entry.c.expires_ms > bindparam("now"),
    chunk.c.blob_id == entry.c.blob_id,
    *_REACHABLE,
)

_REACHABLE_CONTENT = select(chunk.c.chunk_id, chunk.c.blob_id, chunk.c.durability).where(
    chunk.c.format_id == bindparam("format"),
    chunk.c.epoch == bindparam("epoch"),
    chunk.c.chunk_id.in_(bindparam("chunk_ids", expanding=True)),
    *_REACHABLE,
)


def lookup(
    connection: Connection,
    scope: Scope,
    format_ids: Sequence[int],
    entry_keys: Sequence[bytes],
    node: Node,
    now_ms: int,
) -> dict[bytes, FoundChunk]:
    """Those of `entry_keys` that are visible to `node` at `now_ms`. One statement for the whole batch."""
    rows = connection.execute(
        _LOOKUP,
        {
            "tenant": scope.tenant,
            "namespace": scope.namespace,
            "formats": format_ids,
            "keys": entry_keys,
            "now": now_ms,
            "node": node.node,
            "boot": node.boot,
        },
    )
    return {row.entry_key: FoundChunk(*[*row]) for row in rows}


def reachable_content(
    connection: Connection, scope: Scope, format_id: int, epoch: int, chunk_ids: Sequence[bytes], node: Node
) -> dict[bytes, tuple[bytes, str]]:
    """Live chunks with this content that `node` can read: chunk id → (blob id, durability reached)."""
    rows = connection.execute(
        _REACHABLE_CONTENT,
        {
            "tenant": scope.tenant,
            "namespace": scope.namespace,
            "format": format_id,
            "epoch": epoch,
            "chunk_ids": chunk_ids,
            "node": node.node,
            "boot": node.boot,
        },
    )
    return {row.chunk_id: (row.blob_id, row.durability) for row in rows}
