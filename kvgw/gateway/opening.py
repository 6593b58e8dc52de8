"""Opening the chunks of a group, where they shall lie and one after the other: the work of one visit to a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from uuid import UUID

from kvgw.gateway.payloads import VISIT_BYTES_MIN, Chunk, Delivery, PayloadSink
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
    """It begins at 0 where a piece of the group begins, which fills the window anew."""


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


def parts_of(group: Sequence[Wanted], namespace: UUID, size: int) -> list[Part]:
    """The chunks of a group, one behind the other in pieces of `size`."""
    parts, at = [], 0
    names = blob_names(namespace, b"".join([found.blob_id for _, found in group]))
    for number, ((index, found), name) in enumerate(zip(group, names, strict=True)):
        at = at if number % size else 0
        parts.append(Part(index, found, name, slice(at, at + found.length)))
        at += found.length
    return parts


def pieces_of(parts: Sequence[Part], least: int = 1) -> Sequence[Part]:
    """The leading ones that are in the window at once; after them so many more pieces that they have `least` bytes."""
    moved = 0
    for at, part in enumerate(parts):
        if moved >= least and not part.span.start:
            return parts[:at]
        moved += part.found.length
    return parts


def open_all(
    openings: Sequence[Opening], room: Room, sink: PayloadSink, wanted: Callable[[], bool], *, push: bool, last: bool
) -> tuple[Delivery | None, int]:
    """Open chunks piece by piece; what has not left yet, and how many were opened. All left, the window is zeroed here.

    With `push`, in a worker thread: what is as it should be leaves at once, as far as the client takes it. When it does
    not, and without `push`, nothing is opened behind that piece. Nor is it when the thread is `wanted` for other work.
    """
    done = moved = 0
    while done < len(openings) and not (moved >= VISIT_BYTES_MIN and wanted()):
        opened: list[Chunk] = []
        for opening in _piece_of(openings[done:], room):
            target = room.target(opening.part)
            moved += len(target)
            if opening.open_into(target):
                opened.append((opening.part.index, target))
            done += 1
        delivery = sink.delivery(opened)
        if not push or not delivery.push():
            return delivery, done
        if room.window is not None:
            for _, payload in opened:
                payload.release()
    whole = done == len(openings) and all(opening.fault is None for opening in openings)
    if push and room.window is not None and last and whole:
        room.window.wipe()
    return None, done


def _piece_of(openings: Sequence[Opening], room: Room) -> Sequence[Opening]:
    if room.window is None:
        return openings
    return openings[: len(pieces_of([opening.part for opening in openings]))]
