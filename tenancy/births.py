"""Rows that are born when a PUT commits: chunks with their placements, entries, labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Delete, bindparam, delete

from tenancy.model import DURABILITIES, FoundChunk, Node, Scope
from tenancy.prepared import KeyStatement, Parameters, RowsInsert, bound, owner
from tenancy.schema import chunk, entry, entry_label, placement


@dataclass(frozen=True, slots=True)
class Batch:
    """What a PUT asks: an ordered chain of keys under one format, all of one length."""

    scope: Scope
    format_id: int
    entry_keys: tuple[bytes, ...]
    parents: tuple[bytes | None, ...]
    """Entry key before each key in its chain."""
    depth: int
    tokens: int
    sealed_length: int
    ttl_ms: int
    durability: str
    label_macs: tuple[bytes, ...]
    writer: str
    tiers: tuple[tuple[str, str], ...]
    """Tiers that every new chunk is meant for, each with its node ("" where a tier has none)."""


@dataclass(frozen=True, slots=True)
class NewChunk:
    """A sealed chunk, whose bytes are where `written` says, ready to be announced."""

    index: int
    blob_id: bytes
    chunk_id: bytes
    salt: bytes
    tag_root: bytes
    epoch: int
    seg_log2: int
    length: int
    created_ms: int
    written: frozenset[str]
    """Tiers that already hold the blob durably."""
    object_name: str


_OWNER: Final = ("tenant_id", "namespace_id")
_CHUNKS: Final = RowsInsert(
    chunk,
    (*_OWNER, "format_id", "sealed_length", "home_node", "home_boot", "state"),
    (
        "blob_id",
        "chunk_id",
        "salt",
        "tag_root",
        "epoch",
        "seg_log2",
        "length",
        "created_ms",
        "durability",
    ),
)
_PLACEMENTS: Final = RowsInsert(
    placement,
    (*_OWNER, "offset", "length", "owner", "lease_ms", "not_before_ms", "attempts", "updated_ms"),
    ("blob_id", "tier", "node", "object", "state"),
)
_ENTRIES: Final = RowsInsert(
    entry,
    (
        *_OWNER,
        "format_id",
        "tokens",
        "ttl_ms",
        "expires_ms",
        "created_ms",
        "last_hit_ms",
        "hits",
        "writer",
    ),
    ("entry_key", "blob_id", "parent", "depth"),
)

_LABELS: Final = RowsInsert(entry_label, (*_OWNER, "format_id"), ("label_mac", "entry_key"))


def _unlabelled(label_macs: Parameters, keys: Parameters) -> Delete:
    return delete(entry_label).where(
        *bound(entry_label),
        entry_label.c.format_id == bindparam("format"),
        entry_label.c.label_mac.in_(label_macs),
        entry_label.c.entry_key.in_(keys),
    )


UNLABELLED: Final = KeyStatement(_unlabelled)


def insert_chunks(connection: Connection, batch: Batch, node: Node, chunks: Sequence[NewChunk], now_ms: int) -> None:
    """Insert chunks and one placement per tier: ``ok`` where the bytes are already, else ``due``."""
    _CHUNKS.run(
        connection,
        {
            **_owner(batch.scope),
            "format_id": batch.format_id,
            "sealed_length": batch.sealed_length,
            "home_node": node.node,
            "home_boot": node.boot,
            "state": "live",
        },
        [
            (
                new.blob_id,
                new.chunk_id,
                new.salt,
                new.tag_root,
                new.epoch,
                new.seg_log2,
                new.length,
                new.created_ms,
                _reached(new.written),
            )
            for new in chunks
        ],
    )
    _PLACEMENTS.run(
        connection,
        {
            **_owner(batch.scope),
            "offset": 0,
            "length": batch.sealed_length,
            "owner": None,
            "lease_ms": None,
            "not_before_ms": now_ms,
            "attempts": 0,
            "updated_ms": now_ms,
        },
        [
            (new.blob_id, tier, tier_node, new.object_name, "ok" if tier in new.written else "due")
            for new in chunks
            for tier, tier_node in batch.tiers
        ],
    )


def insert_entries(connection: Connection, batch: Batch, blob_of: Mapping[int, bytes], now_ms: int) -> None:
    """Insert entries: batch index → blob id. This is the moment in which they become visible."""
    _ENTRIES.run(
        connection,
        {
            **_owner(batch.scope),
            "format_id": batch.format_id,
            "tokens": batch.tokens,
            "ttl_ms": batch.ttl_ms,
            "expires_ms": now_ms + batch.ttl_ms,
            "created_ms": now_ms,
            "last_hit_ms": now_ms,
            "hits": 0,
            "writer": batch.writer,
        },
        [
            (batch.entry_keys[index], blob_id, batch.parents[index], batch.depth + index)
            for index, blob_id in blob_of.items()
        ],
    )
    attach_labels(connection, batch, [batch.entry_keys[index] for index in blob_of])


def born(batch: Batch, new: NewChunk, now_ms: int) -> FoundChunk:
    """What a look-up on this gateway finds of a chunk, announced at `now_ms`, with an entry and bytes of its own."""
    return FoundChunk(
        format_id=batch.format_id,
        entry_key=batch.entry_keys[new.index],
        ttl_ms=batch.ttl_ms,
        expires_ms=now_ms + batch.ttl_ms,
        blob_id=new.blob_id,
        chunk_id=new.chunk_id,
        salt=new.salt,
        tag_root=new.tag_root,
        epoch=new.epoch,
        seg_log2=new.seg_log2,
        length=new.length,
        sealed_length=batch.sealed_length,
        created_ms=new.created_ms,
        at_home=True,
        on_nvme="nvme" in new.written,
        on_s3="s3" in new.written,
    )


def attach_labels(connection: Connection, batch: Batch, keys: Sequence[bytes]) -> None:
    """Attach the batch's labels to entries that exist; a label that is there already stays."""
    if not batch.label_macs or not keys:
        return
    UNLABELLED.count(
        connection,
        {**owner(batch.scope), "format": batch.format_id},
        batch.label_macs,
        keys,
    )
    _LABELS.run(
        connection,
        {**_owner(batch.scope), "format_id": batch.format_id},
        [(mac, key) for mac in batch.label_macs for key in keys],
    )


def _reached(written: frozenset[str]) -> str:
    return max(written, key=DURABILITIES.index, default="staged")


def _owner(scope: Scope) -> dict[str, object]:
    return {"tenant_id": scope.tenant, "namespace_id": scope.namespace}
