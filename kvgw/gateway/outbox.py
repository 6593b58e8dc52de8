"""The outbox as PUTs see it: whether write-back keeps up, and who has to wait until it does.

A PUT that was written through keeps its promise without write-back and never waits here; neither does any read. What is
only staged lives by write-back alone: once a tier is too far behind, such a PUT waits within its deadline, then is
refused as busy. What is known here is what write-back last found in the catalog.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvgw.errors import Code, Outage
from kvgw.gateway.turns import step_aside
from kvgw.metrics import Metrics
from kvgw.model import Durability
from storage.staging import Staging
from tenancy.model import Scope
from tenancy.outbox import Waiting
from tenancy.timekeeping import CatalogTime

SHORT_SHARE: Final = 0.25
"""Of staging: where more than this waits to be written, what this node's disk has need not stay."""


def is_short(staging: Staging) -> bool:
    """Whether so much of staging waits to be written that it keeps only what is nowhere else on this node.

    The rest is written on from the disk. So a tier that is away fills the disk, as far as that has room, not staging.
    """
    return dirty_room(staging) < 0


def is_roomy(staging: Staging) -> bool:
    """Whether what waits in staging is less than half of what would make it short: write-back may take its time."""
    now = staging.statistics()
    return 2 * now.dirty_bytes < SHORT_SHARE * (now.windows.capacity_bytes + now.residents.capacity_bytes)


def dirty_room(staging: Staging) -> int:
    """So many bytes more may wait in staging before it is short; less than 0 when it is."""
    now = staging.statistics()
    return int(SHORT_SHARE * (now.windows.capacity_bytes + now.residents.capacity_bytes)) - now.dirty_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxLimits:
    """What may wait for one tier on this node; 0: no limit."""

    bytes_max: int = 0
    seconds_max: float = 0.0


@dataclass(frozen=True, slots=True)
class Behind:
    """A tier whose outbox is over a limit, and the sentence about it."""

    tier: str
    sentence: str


class Outbox:
    """What waits to be written on this node, by tier; and how many PUTs are at work in the foreground."""

    def __init__(self, limits: OutboxLimits, time: CatalogTime, metrics: Metrics) -> None:
        self._limits = limits
        self._time = time
        self._metrics = metrics
        self._found: dict[Scope, Mapping[str, Waiting]] = {}
        self._moved = asyncio.Event()
        self._puts = 0

    @property
    def foreground(self) -> bool:
        """Whether a PUT is at work now; one that waits for the outbox is not."""
        return self._puts > 0

    @contextmanager
    def putting(self) -> Iterator[None]:
        """A PUT is at work meanwhile."""
        self._puts += 1
        try:
            yield
        finally:
            self._puts -= 1

    async def admit(self, durability: str, limit_s: float) -> None:
        """Return when a PUT of this durability may go on; call it within `putting`.

        Raises `Outage` (busy) with the tier, the age of its oldest write and the setting when that is not the case
        within `limit_s` seconds.
        """
        first = self.behind()
        if first is None or durability != Durability.STAGED:
            return
        self._puts -= 1
        step_aside()
        try:
            async with asyncio.timeout(limit_s):
                while self.behind() is not None:
                    await self._moved.wait()
        except TimeoutError:
            last = self.behind() or first
            self._metrics.held_puts.labels(last.tier, "refused").inc()
            raise Outage(
                f"{last.sentence}. Chunks that are only staged are not taken until it has moved; try again later, or "
                "ask for a durability of a tier that works",
                Code.BUSY,
            ) from None
        finally:
            self._puts += 1
        self._metrics.held_puts.labels(first.tier, "admitted").inc()

    def found(self, scope: Scope, waiting: Mapping[str, Waiting]) -> None:
        """What waits in one namespace now, by tier."""
        self._found[scope] = waiting
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def keep(self, scopes: Iterable[Scope]) -> None:
        """These are all namespaces: forget what was known of others."""
        self._found = {scope: self._found[scope] for scope in scopes if scope in self._found}

    def waiting(self) -> dict[str, Waiting]:
        """What waits in all namespaces, by tier."""
        by_tier: defaultdict[str, list[Waiting]] = defaultdict(list)
        for found in self._found.values():
            for tier, one in found.items():
                by_tier[tier].append(one)
        return {
            tier: Waiting(
                sum(one.blobs for one in parts), sum(one.bytes for one in parts), min(one.since_ms for one in parts)
            )
            for tier, parts in by_tier.items()
        }

    def behind(self) -> Behind | None:
        """The first tier whose outbox is over a limit, if any."""
        for tier, waiting in self.waiting().items():
            age_s = max(0, self._time.now_ms() - waiting.since_ms) / 1000
            what = f"the {tier} tier is behind: its oldest write has waited {age_s:.0f} s, {waiting.bytes} bytes wait"
            if 0 < self._limits.seconds_max < age_s:
                return Behind(tier, f"{what}, over writeback.outbox_seconds = {self._limits.seconds_max:g}")
            if 0 < self._limits.bytes_max < waiting.bytes:
                return Behind(tier, f"{what}, over writeback.outbox_bytes = {self._limits.bytes_max}")
        return None
