"""What clients were promised, and the judgement of all that they read."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final, TypeAlias

from kvgw.model import Durability
from tests.simulation.world import Process, World

CONTENTS: Final = 30
"""So many contents of a namespace are shared by all its keys: entries come to share chunks."""
ZOMBIE_S: Final = 75.0
"""An act without an answer may still be done so long after its deadline: requests arrive late, handlers finish."""
MARGIN_MS: Final = 13_000
"""By so much two gateways' ideas of the catalog's time may differ, when its answers take long."""

_PLACED: Final = """
SELECT p.node, p.object FROM entry e JOIN chunk c USING (tenant_id, namespace_id, blob_id)
  JOIN placement p USING (tenant_id, namespace_id, blob_id)
WHERE e.entry_key = ? AND c.state = 'live' AND p.tier = 'nvme' AND p.state = 'ok'
"""
Name: TypeAlias = tuple[str, str]
"""Namespace, as ``tenant/namespace``, and key."""


class State(StrEnum):
    """What is known of a key."""

    NEVER = "never"
    """Nobody ever stored it."""
    DOUBT = "doubt"
    """It may be there or not."""
    KEPT = "kept"
    """It was acknowledged: it must be there as far as its durability goes."""
    GONE = "gone"
    """Its end was acknowledged: it must not be read."""


@dataclass
class Fact:
    """What is known of one key, and since which change."""

    state: State = State.NEVER
    change: int = 0
    durability: Durability = Durability.STAGED
    home: str = ""
    """Of a key that is kept by durability nvme: the node whose disk has it, if that is known for certain."""
    unsettled_until_s: float = 0.0
    """Until then something that was asked earlier may still be done."""
    ends_ms: int = 0
    fresh: bool = True
    """Whether nothing was there when its last change began: what is there goes on with the longer life of the two."""
    mortal: bool = False
    """Whether what is stored may have been given a short life."""
    """When it expires, if it has a short life; else 0."""
    read_s: float = -1e9
    """When somebody last asked for it: reads and touches let it live longer."""


@lru_cache(maxsize=4096)
def content_of(namespace: str, key: str, nbytes: int) -> bytes:
    """What `key` holds: it follows from its name."""
    number = random.Random(key).randrange(CONTENTS)
    return random.Random(f"{namespace}/{number}").randbytes(nbytes)


class Model:
    """Facts about all keys. A key is changed by the one client that owns it, and read by everybody."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.facts: dict[Name, Fact] = {}
        self.judged: Counter[str] = Counter()

    def fact(self, name: Name) -> Fact:
        return self.facts.setdefault(name, Fact())

    def begin(self, name: Name, *, mortal: bool = False) -> None:
        """A change begins: from now on nothing is certain, until its answer. `mortal`: it asks for a short life."""
        fact = self.fact(name)
        fact.fresh = fact.state in (State.NEVER, State.GONE)
        fact.state, fact.ends_ms = State.DOUBT, 0
        fact.mortal |= mortal
        fact.change += 1

    def unanswered(self, name: Name, limit_s: float) -> None:
        """It had no answer: it may still be done."""
        fact = self.fact(name)
        fact.unsettled_until_s = max(fact.unsettled_until_s, self._world.loop.now_s + limit_s + ZOMBIE_S)

    def stored(self, name: Name, durability: Durability, home: str, ends_ms: int) -> None:
        """It was acknowledged as stored."""
        fact = self.fact(name)
        unread = fact.read_s < self._world.loop.now_s - ZOMBIE_S
        fact.ends_ms = ends_ms if unread and fact.fresh else 0
        if home and fact.fresh and self._settled(fact):
            fact.mortal = bool(ends_ms)
        if durability is not Durability.STAGED and self._settled(fact) and not fact.mortal:
            fact.state, fact.durability, fact.home = State.KEPT, durability, home

    def ended(self, name: Name) -> None:
        """Its end was acknowledged, or has come."""
        fact = self.fact(name)
        fact.change += 1
        fact.state = State.GONE if self._settled(fact) else State.DOUBT
        fact.ends_ms = 0

    def expire(self, process: Process | None) -> None:
        """Note what has expired by now, for certain."""
        if process is None or process.opened is None:
            return
        if len(self._world.nodes) == 1:
            now_ms = process.opened.rooms.time.now_ms()
        else:
            now_ms = self._world.wall_ms() - MARGIN_MS
        for name, fact in self.facts.items():
            if 0 < fact.ends_ms <= now_ms and fact.state is State.DOUBT:
                self.ended(name)

    def lengthen(self, names: list[Name]) -> None:
        """These are about to be touched or read: what is still there may live longer by that."""
        for name in names:
            self.fact(name).ends_ms, self.fact(name).read_s = 0, self._world.loop.now_s

    def lost_disk(self) -> None:
        """A node's disk is gone, and with it all that only nvme durability promised."""
        for fact in self.facts.values():
            if fact.state is State.KEPT and fact.durability is not Durability.S3:
                fact.state = State.DOUBT

    def snapshot(self, names: list[Name]) -> dict[Name, tuple[State, int]]:
        """What is known as a read begins."""
        return {name: (self.fact(name).state, self.fact(name).change) for name in names}

    def judge(
        self, before: Mapping[Name, tuple[State, int]], found: Mapping[Name, bytes | None], node: str, *, whole: bool
    ) -> None:
        """Laws 1, 3, 5, 6 and 8. `whole`: the answer is no outage, so what is missing is missing.

        `node`: where it was read; empty when it should be readable from anywhere by now.
        """
        for name, chunk in found.items():
            state, change = before[name]
            fact = self.fact(name)
            unchanged = fact.change == change
            self.judged["read" if chunk is not None else "miss"] += 1
            if chunk is not None:
                if chunk != content_of(*name, len(chunk)):
                    self._world.breach(f"law 3: wrong bytes under {name[0]}/{name[1]}")
                if state is State.GONE and unchanged:
                    self._world.breach(f"law 5: {name[0]}/{name[1]} was read after its end")
                if state is State.NEVER and unchanged:
                    self._world.breach(f"law 6: {name[0]}/{name[1]} was read, and nobody stored it")
            elif (
                state is State.KEPT
                and unchanged
                and fact.state is State.KEPT
                and whole
                and self._promised(name, fact, node)
            ):
                if not self._world.mix.lossy:
                    self._world.breach(f"law 8: {name[0]}/{name[1]} was acknowledged ({fact.durability}) and is lost")
                fact.state = State.DOUBT

    def _promised(self, name: Name, fact: Fact, node: str) -> bool:
        """Whether the key must be readable at this node now.

        Equal content is stored once: what another node has stored as durably since is on its disk instead, and is read
        from here again when S3 has it.
        """
        if fact.durability is Durability.S3 or not node:
            return True
        return fact.home == node and not self._on_another_disk(name, node)

    def _on_another_disk(self, name: Name, node: str) -> bool:
        """Whether another node's disk has the key's chunk, so that it outlives a loss of power there."""
        disks = {one.name: one.disk for one in self._world.nodes if one.name != node}
        rows = self._world.connection.execute(_PLACED, (self._world.entry_of[name[1]],)).fetchall()
        return any(at in disks and (blob := disks[at].durable.get(blob_name)) and blob.synced for at, blob_name in rows)

    def _settled(self, fact: Fact) -> bool:
        return self._world.loop.now_s >= fact.unsettled_until_s
