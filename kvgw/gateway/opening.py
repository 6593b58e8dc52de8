"""Opening the chunks of a group, where they shall lie and one after the other: the work of one visit to a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias
from uuid import UUID

from kvgw.gateway.payloads import Chunk, Delivery, PayloadSink
from storage.access import Window
from storage.tier import blob_names
from tenancy.errors import SealBroken
from tenancy.keys.secret import SecretBytes
from tenancy.model import FoundChunk
from tenancy.sealing import BlobAddress, Sealed, open_sealed

Wanted: TypeAlias = tuple[int, FoundChunk]
"""Batch index, and what the catalog knows of the chunk."""


@dataclass(slots=True)
class Part:
    """One chunk of a group, and the part of the group's window that is for it."""

    index: int
    found: FoundChunk
    name: str
    """The blob's."""
    span: slice


@dataclass(slots=True)
class Room:
    """Where the chunks of a group are opened: in a window of ours, or in memory of the client's."""

    window: Window | None
    shared: Sequence[memoryview]

    def target(self, part: Part) -> memoryview:
        """Memory of exactly the chunk's length."""
        return self.shared[part.index] if self.window is None else self.window.view[part.span]


@dataclass(slots=True)
class Opening:
    """Everything that opening a chunk takes; `fault` tells why it could not be opened."""

    part: Part
    data_key: SecretBytes
    address: BlobAddress
    sealed: memoryview
    origin: str
    """Where the blob came from for this GET: a tier, or staging."""
    fault: SealBroken | None = None

    def open_into(self, target: memoryview) -> bool:
        """Whether `target` holds the chunk now, whole and verified; it is all zero otherwise."""
        found = self.part.found
        try:
            open_sealed(
                self.data_key,
                self.address,
                found.salt,
                Sealed(found.chunk_id, found.tag_root),
                self.sealed,
                target,
            )
        except SealBroken as error:
            # Anew: the one that was raised holds slices of the window in its traceback, which is about to be zeroed.
            self.fault = SealBroken(error.reason, error.detail)
        return self.fault is None


def parts_of(group: Sequence[Wanted], namespace: UUID) -> list[Part]:
    """The chunks of a group, one behind the other."""
    parts, at = [], 0
    names = blob_names(namespace, b"".join([found.blob_id for _, found in group]))
    for (index, found), name in zip(group, names, strict=True):
        parts.append(Part(index, found, name, slice(at, at + found.length)))
        at += found.length
    return parts


def open_all(openings: Sequence[Opening], room: Room, sink: PayloadSink, *, push: bool, last: bool) -> Delivery | None:
    """Open chunks; what has not left yet. When all of a window has left, it is zeroed here.

    With `push`, in a worker thread: what is as it should be leaves at once, as far as the client takes it.
    """
    opened: list[Chunk] = []
    for opening in openings:
        target = room.target(opening.part)
        if opening.open_into(target):
            opened.append((opening.part.index, target))
    delivery = sink.delivery(opened)
    if not push or not delivery.push():
        return delivery
    if room.window is not None and last and len(opened) == len(openings):
        for _, payload in opened:
            payload.release()
        room.window.wipe()
    return None
