"""Which resident to evict first. Pure: no I/O, no time, no bytes; names and an opaque owner only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol
from uuid import UUID


class EvictionPolicy(Protocol):
    """Ranks residents within their owner. Which owner has to give is not the policy's business but fairness's:
    no owner's accesses change the order of another's residents.
    """

    def admit(self, name: str, owner: UUID) -> None:
        """A resident may be evicted from now on. Its name must not be known yet."""
        ...

    def touch(self, name: str) -> None:
        """A known resident was used. An unknown name is no error: not every resident may be evicted."""
        ...

    def remove(self, name: str) -> None:
        """A known resident is gone, or may not be evicted for now."""
        ...

    def victims(self, owner: UUID) -> Iterator[str]:
        """The owner's names, the least valuable first. The policy must not change while this runs."""
        ...


class SegmentedLru:
    """Least recently used, in two segments per owner: a scan of blobs used once cannot push out those used again.

    A resident starts on probation and is protected from its second use on. Protected ones are at most
    `protected_part` of the owner's; the least recently used beyond that goes back to probation.
    """

    def __init__(self, protected_part: float = 0.8) -> None:
        if not 0 <= protected_part < 1:
            raise ValueError(f"the protected part is in [0, 1), not {protected_part}")
        self._protected_part = protected_part
        self._segments: dict[UUID, _Segments] = {}
        self._segments_of: dict[str, _Segments] = {}

    def admit(self, name: str, owner: UUID) -> None:
        assert name not in self._segments_of, f"{name} was admitted already"
        segments = self._segments.setdefault(owner, _Segments(owner))
        self._segments_of[name] = segments
        segments.probation[name] = None

    def touch(self, name: str) -> None:
        segments = self._segments_of.get(name)
        if segments is not None:
            segments.touch(name, self._protected_part)

    def remove(self, name: str) -> None:
        segments = self._segments_of.pop(name)
        segments.remove(name)
        if segments.empty:
            del self._segments[segments.owner]

    def victims(self, owner: UUID) -> Iterator[str]:
        segments = self._segments.get(owner)
        if segments is not None:
            yield from segments.probation
            yield from segments.protected


class _Segments:
    """One owner's names; each segment from the least to the most recently used.

    `OrderedDict`, because taking the first key of a plain dictionary again and again walks over all deleted ones.
    """

    __slots__ = ("owner", "probation", "protected")

    def __init__(self, owner: UUID) -> None:
        self.owner = owner
        self.probation: OrderedDict[str, None] = OrderedDict()
        self.protected: OrderedDict[str, None] = OrderedDict()

    @property
    def empty(self) -> bool:
        return not self.probation and not self.protected

    def touch(self, name: str, protected_part: float) -> None:
        if name in self.protected:
            self.protected.move_to_end(name)
        else:
            del self.probation[name]
            self.protected[name] = None
        if len(self.protected) > protected_part * (len(self.probation) + len(self.protected)):
            demoted = next(iter(self.protected))
            del self.protected[demoted]
            self.probation[demoted] = None

    def remove(self, name: str) -> None:
        del (self.protected if name in self.protected else self.probation)[name]
