"""What a commit does with each of its chunks: a row of its own, another's bytes, or nothing. Reads, changes nothing.

Equal content is stored once, within one key epoch and where it is as durable as was asked; of two copies the more
durable one stays, of two writers of one key the first wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Select, bindparam, exists, select

from tenancy.births import Batch, NewChunk
from tenancy.model import FoundChunk, Node, suffices
from tenancy.prepared import KeyStatement, Parameters, bound, owner
from tenancy.schema import chunk, placement, states
from tenancy.visible import reachable_content


def _live(contents: Parameters) -> Select[Any]:
    on_a_disk = exists(
        select(1).where(
            *bound(placement),
            placement.c.blob_id == chunk.c.blob_id,
            placement.c.tier == states.NVME,
            placement.c.state == states.OK,
        )
    )
    return select(chunk.c.chunk_id, chunk.c.blob_id, on_a_disk).where(
        *bound(chunk),
        chunk.c.format_id == bindparam("format"),
        chunk.c.epoch == bindparam("epoch"),
        chunk.c.state == states.LIVE,
        chunk.c.chunk_id.in_(contents),
    )


LIVE: Final = KeyStatement(_live)


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of the chunks of a batch."""

    fresh: list[NewChunk]
    """Chunks that get a row of their own."""
    blob_of: dict[int, bytes]
    """Batch index → blob of every entry to insert."""
    have: frozenset[int]
    conflict: frozenset[int]
    discarded: list[bytes]
    replaced: list[tuple[bytes, bytes]]
    """(old, new) blob ids of equal content, where the new one is more durable, or the old one is unreachable from here
    and not more durable."""


def plan_commit(
    connection: Connection, batch: Batch, node: Node, chunks: Sequence[NewChunk], taken: Mapping[bytes, FoundChunk]
) -> Plan:
    """Decide for each of `chunks`; `taken` are the visible entries under the keys of the batch."""
    contents = [new.chunk_id for new in chunks]
    epochs = {new.epoch for new in chunks}
    live: dict[tuple[int, bytes], bytes] = {}
    strong: dict[tuple[int, bytes], bytes] = {}
    for epoch in epochs:
        there = _live_content(connection, batch, epoch, contents)
        if not there:
            continue
        live |= {(epoch, content): blob_id for content, blob_id, _ in there}
        if not suffices(batch.durability, "nvme"):
            # What another node's disk has was promised (law 8): it is not given up for a copy that promises nothing.
            # Should that node be gone for good, it is forgotten, and with it what only it had.
            strong |= {(epoch, content): blob_id for content, blob_id, on_a_disk in there if on_a_disk}
        known = [content for content, *_ in there]
        reachable = reachable_content(connection, batch.scope, batch.format_id, epoch, known, node)
        for content, (blob_id, durability) in reachable.items():
            if suffices(durability, batch.durability):
                strong[epoch, content] = blob_id
    plan = Plan([], {}, *_split_taken(batch, chunks, taken), [], [])
    for new in chunks:
        if new.index in plan.have or new.index in plan.conflict:
            plan.discarded.append(new.blob_id)
            continue
        address = (new.epoch, new.chunk_id)
        if address in strong:
            plan.blob_of[new.index] = strong[address]
            plan.discarded.append(new.blob_id)
            continue
        if address in live:
            plan.replaced.append((live[address], new.blob_id))
        strong[address] = new.blob_id
        plan.fresh.append(new)
        plan.blob_of[new.index] = new.blob_id
    return plan


def _split_taken(
    batch: Batch, chunks: Sequence[NewChunk], taken: Mapping[bytes, FoundChunk]
) -> tuple[frozenset[int], frozenset[int]]:
    """Of the chunks whose key is taken: those that need no other bytes, and those that came with other content."""
    same: set[int] = set()
    other: set[int] = set()
    for new in chunks:
        found = taken.get(batch.entry_keys[new.index])
        if found is None:
            continue
        if found.chunk_id != new.chunk_id:
            other.add(new.index)
        elif suffices(found.durability, batch.durability):
            same.add(new.index)
    return frozenset(same), frozenset(other)


def _live_content(
    connection: Connection, batch: Batch, epoch: int, contents: Sequence[bytes]
) -> list[tuple[bytes, bytes, bool]]:
    """Content, blob and whether any node's disk has it, of the live chunks with these contents."""
    values = {**owner(batch.scope), "format": batch.format_id, "epoch": epoch}
    return [
        (content, blob_id, bool(on_a_disk)) for content, blob_id, on_a_disk in LIVE.rows(connection, values, contents)
    ]
