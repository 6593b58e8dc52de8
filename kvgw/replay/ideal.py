"""What a cache could have reused: pure figures of a trace, without a gateway.

Reuse is by prefix: a block counts as reused only if all blocks before it were there too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvgw.replay.trace import Request


class Order(StrEnum):
    """Which block of one request goes first when room is needed; between requests it is the longest unused."""

    TAIL_FIRST = "tail-first"
    """The deepest: what is left of a chain is still a prefix. kvgw's order."""
    HEAD_FIRST = "lru"
    """The one used first, as plain LRU has it: without its head a chain is of no use."""


@dataclass(frozen=True, slots=True)
class Ideal:
    """Blocks asked for, those found, and how many were made room for."""

    blocks: int
    reused: int
    evicted: int = 0

    @property
    def share(self) -> float:
        """Of the blocks asked for, those found."""
        return self.reused / self.blocks if self.blocks else 0.0


def infinite(requests: Iterable[Request]) -> Ideal:
    """With a cache that never evicts."""
    seen: set[int] = set()
    blocks = reused = 0
    for request in requests:
        blocks += len(request.hash_ids)
        reused += leading(request.hash_ids, seen)
        seen.update(request.hash_ids)
    return Ideal(blocks, reused)


def bounded(requests: Iterable[Request], capacity: int, order: Order) -> Ideal:
    """With a cache of `capacity` blocks that evicts by last use."""
    if capacity < 1:
        raise ValueError(f"a cache holds at least one block, not {capacity}")
    held: OrderedDict[int, None] = OrderedDict()
    blocks = reused = evicted = 0
    for request in requests:
        ids = request.hash_ids
        blocks += len(ids)
        reused += leading(ids, held)
        for block in ids if order is Order.HEAD_FIRST else reversed(ids):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
            evicted += 1
    return Ideal(blocks, reused, evicted)


def leading(ids: Sequence[int], held: Container[int]) -> int:
    """How many leading ones of `ids` are in `held`, which finds them by hash."""
    count = 0
    for block in ids:
        if block not in held:
            break
        count += 1
    return count


def distinct(requests: Iterable[Request]) -> int:
    """Different blocks of all requests: what an infinite cache would hold in the end."""
    return len({block for request in requests for block in request.hash_ids})
