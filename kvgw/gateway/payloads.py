"""Where a request's payload comes from and goes to: a connection, or the caller's own buffers.

Chunks move in groups, so that small ones share a window, a worker thread and a system call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol, TypeAlias, TypeVar

GROUP_BYTES: Final = 1024 * 1024
"""Plaintext of a group of small chunks: enough to make its thread hop cheap, and little enough to stay in a cache."""

Chunk: TypeAlias = tuple[int, memoryview]
"""Batch index and payload, or memory for it."""

Item = TypeVar("Item")


class PayloadSource(Protocol):
    """Payloads of a PUT. Raises what its medium raises when the client is gone."""

    async def wanted(self, indices: Sequence[int]) -> None:
        """Tell the client which chunks are wanted, by batch index in ascending order; called exactly once."""
        ...

    async def receive(self, chunks: Sequence[Chunk]) -> None:
        """Receive the payloads of the next wanted chunks, each into memory of exactly its length."""
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

    def delivery(self, chunks: Sequence[Chunk]) -> Delivery:
        """What will hand over these chunks; may be called in a worker thread. One of them is used at a time."""
        ...


def groups(items: Sequence[Item], chunk_bytes: int, window_limit: int) -> Iterator[Sequence[Item]]:
    """Cut what a request moves into groups; of several groups in windows at once no tenant's limit is exceeded."""
    size = max(1, min(GROUP_BYTES, window_limit // 4) // chunk_bytes)
    return (items[start : start + size] for start in range(0, len(items), size))
