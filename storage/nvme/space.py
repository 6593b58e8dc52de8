"""How much room an NVMe tier has. Shared by worker threads: every method is one short critical section."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from storage.errors import TierFull, TierUnavailable
from storage.ports import Clock

PLENTY: Final = 8
"""A spare is made where there is room for so many of its length."""


class NvmeState(StrEnum):
    """`FULL`: puts are refused until there is room. `SUSPECT`: puts are refused until the tier is opened anew."""

    OK = "ok"
    FULL = "full"
    SUSPECT = "suspect"


@dataclass(frozen=True, slots=True)
class NvmeStatistics:
    """An NVMe tier as status and metrics show it. Sizes in bytes.

    `limit_bytes` is what blobs may take in all. `foreign` counts what lay in the folder at opening and is no blob.
    `preallocates` is false where the file system cannot reserve space ahead.
    """

    state: NvmeState
    reason: str
    used_bytes: int
    in_flight_bytes: int
    limit_bytes: int
    foreign: int
    preallocates: bool


@dataclass(frozen=True, slots=True)
class Room:
    """What `Space` knows at one moment; sizes in bytes."""

    state: NvmeState
    reason: str
    used: int
    in_flight: int
    limit: int


class Claim:
    """Room for one blob being written. Counts as in flight until it is published or released."""

    def __init__(self, space: Space, length: int) -> None:
        self.length = length
        self._space = space
        self._open = True

    def publish(self, replaced: int) -> None:
        """The blob took its place, in which a file of `replaced` bytes (0: none) was before."""
        self._space.finish(self.length, self.length - replaced)
        self._open = False

    def release(self) -> None:
        """End the claim; what was published stays counted as used."""
        if self._open:
            self._space.abandon(self.length)
            self._open = False


class Space:
    """Used and claimed bytes against the limit, and what was learned about the disk."""

    def __init__(self, used: int, limit: int, clock: Clock, full_retry_s: float) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._full_retry_s = full_retry_s
        self._used = used
        self._in_flight = 0
        self._spare = 0
        self._limit = limit
        self._over_limit = ""
        self._disk_full = ""
        self._retry_at = 0.0
        self._suspect = ""

    def claim(self, length: int) -> Claim:
        """Claim `length` bytes. Raises `TierFull`, or `TierUnavailable` once the disk is suspect."""
        self._admit(length)
        return Claim(self, length)

    def finish(self, claimed: int, change: int) -> None:
        """A claim became a blob: `change` bytes more are used. The disk takes writes."""
        with self._lock:
            self._in_flight -= claimed
            self._used += change
            self._disk_full = ""

    def abandon(self, claimed: int) -> None:
        """A claim ended without a blob."""
        with self._lock:
            self._in_flight -= claimed

    def freed(self, length: int) -> None:
        """`length` bytes less are used, so the next put may try at once even if the disk was full."""
        with self._lock:
            self._used -= length
            if length > 0:
                self._over_limit = ""
                self._retry_at = 0.0

    def take_spare(self, length: int) -> bool:
        """Count a file that is no blob yet; False where blobs may soon need its room."""
        with self._lock:
            taken = self._used + self._in_flight + self._spare
            if self._suspect or self._disk_full or self._over_limit or taken + PLENTY * length > self._limit:
                return False
            self._spare += length
            return True

    def give_spare(self, length: int) -> None:
        """It is one, or gone. The next put may try at once even if the disk was full."""
        with self._lock:
            self._spare -= length
            self._over_limit = ""
            self._retry_at = 0.0

    def mark_full(self, reason: str) -> None:
        """The disk refused a write for want of space."""
        with self._lock:
            self._disk_full = reason
            self._retry_at = self._clock.monotonic() + self._full_retry_s

    def mark_suspect(self, reason: str) -> None:
        """The disk failed to keep what it had taken. Not undone: its later successes prove nothing."""
        with self._lock:
            self._suspect = self._suspect or reason

    def room(self) -> Room:
        """Where things stand now."""
        with self._lock:
            full = self._disk_full or self._over_limit
            state = NvmeState.SUSPECT if self._suspect else NvmeState.FULL if full else NvmeState.OK
            return Room(state, self._suspect or full, self._used, self._in_flight, self._limit)

    def _admit(self, length: int) -> None:
        with self._lock:
            if self._suspect:
                raise TierUnavailable(f"the tier is suspect since {self._suspect}; check the disk and restart")
            taken = self._used + self._in_flight + self._spare
            if taken + length > self._limit:
                self._over_limit = f"{taken} of {self._limit} bytes are taken, {length} more do not fit"
                raise TierFull(self._over_limit)
            if self._disk_full:
                now = self._clock.monotonic()
                if now < self._retry_at:
                    raise TierFull(self._disk_full)
                self._retry_at = now + self._full_retry_s  # this put is the probe; the others wait for its result
            self._over_limit = ""
            self._in_flight += length
