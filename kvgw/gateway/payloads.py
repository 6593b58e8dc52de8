"""Where a request's payload comes from and goes to: a connection, or the caller's own buffers.

Chunks move in groups, so that small ones share a window, a worker thread and a system call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, TypeVar

GROUP_BYTES: Final = 1024 * 1024
"""Plaintext of a group of small chunks: enough to make its thread hop cheap, and little enough to stay in a cache."""

SHARED_GROUP_BYTES: Final = 32 * 1024 * 1024
"""The same where chunks pass through one segment's memory: they lie in the client's, or a thread receives them."""

TIER_GROUP_BYTES: Final = 8 * 1024 * 1024
"""The same where a tier gives or takes the chunks meanwhile: one group is sealed or opened while it has another."""

VISIT_BYTES: Final = 64 * 1024 * 1024
"""Plaintext that leaves in one visit to a thread, a group after the other, as long as the client takes it."""

VISIT_BYTES_MIN: Final = 4 * 1024 * 1024
"""After so much a visit ends if other work waits for a thread: to begin again costs as much as 1 MiB does."""

VISIT_CHUNKS: Final = 256
"""Chunks of one visit: to hold them and let them go is work for the event loop, 3 µs each."""

INLINE_BYTES: Final = 64 * 1024
"""Work on so little is done before a worker thread would have begun with it."""

Chunk: TypeAlias = tuple[int, memoryview]
"""Batch index and payload, or memory for it."""

Item = TypeVar("Item")

Turn: TypeAlias = tuple[Sequence[Item], int, asyncio.Event, asyncio.Event]
"""A group, how many follow it, when it may leave, and what tells the next one that it may."""


@dataclass(frozen=True, slots=True)
class Part:
    """Memory for some bytes of a chunk on its way in. Chunks come in order, and their parts too."""

    index: int
    """Of the chunk in the batch."""
    length: int
    """Of the whole chunk, in bytes."""
    start: int
    """Of the chunk's bytes, the first that belongs here."""
    target: memoryview


class Incoming(Protocol):
    """Payloads that are taken in part by part, by the thread that hashes and seals them while it has them in its cache.

    Raises what its medium raises when the client is gone.
    """

    async def begin(self) -> None:
        """Wait until the next wanted chunk begins to come: before that no thread is kept for it."""
        ...

    def pull(self, part: Part) -> int:
        """In a worker thread: take in what comes of the next part, almost without waiting for it; how many bytes."""
        ...

    async def receive_part(self, part: Part) -> None:
        """Take in the next part, or the rest that `pull` has left of it: such a rest is a part of its own."""
        ...


class PayloadSource(Protocol):
    """Payloads of a PUT. Raises what its medium raises when the client is gone."""

    @property
    def incoming(self) -> Incoming | None:
        """What takes in what is not shared; None: `receive` does."""
        ...

    async def wanted(self, indices: Sequence[int]) -> None:
        """Tell the client which chunks are wanted, by batch index in ascending order; called exactly once."""
        ...

    async def shared(self, most: int, nbytes: int) -> Sequence[memoryview]:
        """The next wanted chunks, `most` at most and of `nbytes` each, where they lie in memory of the client's.

        Its bytes may change while they are read. Empty: the next ones come by `receive`, and so do all after them.
        """
        ...

    async def receive(self, chunks: Sequence[Chunk]) -> None:
        """Receive the payloads of the next wanted chunks, each into memory of exactly its length."""
        ...

    def check(self) -> None:
        """Called when all has been read. Raises if the client gave up before: what it shared was free for other use."""
        ...


class Delivery(Protocol):
    """Verified chunks on their way to the client. Their memory is the gateway's again when all of it has left."""

    def push(self) -> bool:
        """In a worker thread: hand over what the client takes, almost without waiting for it; whether that was all."""
        ...

    async def finish(self) -> None:
        """Hand over all of it, or what `push` has left."""
        ...


class PayloadSink(Protocol):
    """Payloads of a GET."""

    pushes: bool
    """Whether `Delivery.push` is any use: then a group is opened when it can leave, and leaves while it is in cache."""

    def places(self, count: int, nbytes: int) -> Sequence[memoryview]:
        """Memory of the client's, `nbytes` each, into which the first of the batch's `count` chunks are opened.

        The others are opened into memory of the gateway's. Raises `RequestRefused` for memory that cannot be used.
        """
        ...

    def delivery(self, chunks: Sequence[Chunk]) -> Delivery:
        """What will hand over, or announce, these chunks; may be called in a worker thread. One is used at a time."""
        ...


def group_size(chunk_bytes: int, window_share: int) -> int:
    """Chunks of a group in a window; `window_share` is that of `Staging`."""
    return max(1, min(GROUP_BYTES, window_share) // chunk_bytes)


def visit_size(size: int, chunk_bytes: int, share: int) -> int:
    """Chunks of one visit to a thread, in pieces of `size`; `share`: the most bytes that should be held for it."""
    return max(1, min(min(VISIT_BYTES, share) // chunk_bytes, VISIT_CHUNKS) // size) * size


def shared_group_size(chunk_bytes: int, *, with_tier: bool = False) -> int:
    """Chunks of a group that is shared, or received by a thread; `with_tier`: which a tier gives or takes meanwhile."""
    return max(1, (TIER_GROUP_BYTES if with_tier else SHARED_GROUP_BYTES) // chunk_bytes)


def groups(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Cut what a request moves into groups."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def in_turn(of_all: Sequence[Sequence[Item]]) -> Iterator[Turn[Item]]:
    """Groups for whoever takes the next one; each leaves when the one before it has left."""
    turn = asyncio.Event()
    turn.set()
    for at, group in enumerate(of_all):
        next_turn = asyncio.Event()
        yield group, len(of_all) - 1 - at, turn, next_turn
        turn = next_turn
