"""What goes wrong: how often a call of which kind, and which disasters befall whom and when. All of it from one seed.

Each seed draws its own mixture: with everything at once nothing would ever get far enough to go wrong in a new way.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """What becomes of one call."""

    ERROR = "error"
    """It fails and nothing was done."""
    LOST_ANSWER = "lost answer"
    """It is done, and whoever asked hears nothing, or an error."""
    DUPLICATE = "duplicate"
    """It is done, and once more some seconds later."""
    LATE = "late"
    """It takes seconds instead of milliseconds."""
    FLIP = "flipped bit"
    """What was read comes with a wrong bit."""
    CANCEL = "cancelled"
    """The client gives up in its middle."""


class Disaster(StrEnum):
    """What befalls a gateway, or what all share."""

    KILL = "kill"
    POWER = "power loss"
    """As a kill, and what was not synced may be gone, torn or there."""
    WIPE = "disk wiped"
    """A kill, and the disk comes back empty: the loss of a node."""
    FREEZE = "freeze"
    """The process stands still for a while, and does not know it."""
    CUT_CATALOG = "cut from the catalog"
    CUT_S3 = "cut from S3"
    CUT_CLIENTS = "cut from its clients"
    DOWN_CATALOG = "catalog down"
    DOWN_S3 = "S3 down"
    CLOCK = "clock step"
    ROT = "stored bytes rot"
    SYNC_FAILS = "fsync fails"
    DISK_FULL = "disk full"
    SLOW = "slow"
    """Everything takes many times as long for a while."""
    ROTATE = "key rotation"
    RESTART = "restart in order"


LOSSY_KINDS: Final = frozenset({Kind.FLIP})
LOSSY_DISASTERS: Final = frozenset({Disaster.ROT})
"""After these a chunk that was acknowledged may be gone for good: no software could have kept it (laws 2 and 8)."""

ONLY_OFTEN: Final = (Disaster.KILL, Disaster.POWER)
"""Two of the many come in most mixtures: they are what the order of writing is for."""


@dataclass
class Mixture:
    """What may go wrong in one seed."""

    gateways: int
    rate: float
    """Of calls that meet a fault."""
    kinds: tuple[Kind, ...]
    disasters: tuple[Disaster, ...]
    pause_s: float
    """Between two disasters, on the average."""
    chunk_bytes: int
    narrow: bool
    """The disk is small, so that NVMe evicts."""
    on: bool = True
    fired: Counter[str] = field(default_factory=Counter)

    @property
    def lossy(self) -> bool:
        """Whether chunks that were acknowledged may have been lost by what has happened so far."""
        return self.narrow or any(self.fired[one] for one in (*LOSSY_KINDS, *LOSSY_DISASTERS))

    def fate(self, rng: random.Random, allowed: tuple[Kind, ...]) -> Kind | None:
        """What becomes of a call that may meet `allowed`; None: nothing happens to it."""
        if not self.on or rng.random() >= self.rate:
            return None
        possible = [kind for kind in allowed if kind in self.kinds]
        if not possible:
            return None
        kind = rng.choice(possible)
        self.fired[kind] += 1
        return kind


def draw(rng: random.Random) -> Mixture:
    """The mixture of one seed."""
    disasters = tuple(one for one in Disaster if rng.random() < (0.7 if one in ONLY_OFTEN else 0.35))
    kinds = tuple(one for one in Kind if rng.random() < (0.15 if one in LOSSY_KINDS else 0.6))
    if rng.random() < 0.75:  # most seeds are honest, so that law 8 is asked of them
        disasters = tuple(one for one in disasters if one not in LOSSY_DISASTERS)
    return Mixture(
        gateways=rng.choice((1, 2, 2)),
        rate=rng.choice((0.0, 0.004, 0.015, 0.04)),
        kinds=kinds,
        disasters=disasters,
        pause_s=rng.choice((4.0, 10.0, 25.0)),
        chunk_bytes=rng.choice((1024, 1024, 40_960)),
        narrow=rng.random() < 0.1,
    )
