"""S12: what five clients saw of a few keys can be explained by one order of what was done to them, misses aside."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvgw.client import Client
from kvgw.model import PutOutcome
from kvgw.reports import Registered
from tests.support.aio import run
from tests.support.gateways import format_of, house, read

CLIENTS, KEYS = 5, 4


@dataclass(frozen=True, slots=True)
class Act:
    """One call on one key and what came of it. Times are positions in the order of all begins and ends."""

    what: str
    key: int
    value: int
    """Of a put: what it offered. Of a get: what it read, -1 for a miss. Of a delete: how many it deleted."""
    outcome: str
    begun: int
    ended: int


class History:
    """Puts and gets carry values that no two puts share, so that each get names the put that it saw."""

    def __init__(self) -> None:
        self.acts: list[Act] = []
        self._clock = itertools.count()
        self._values = itertools.count(1)

    async def act(self, client: Client, part: Registered, chance: random.Random) -> None:
        key = chance.randrange(KEYS)
        what = chance.choice(("put", "put", "get", "get", "get", "delete"))
        value, begun, outcome = -1, next(self._clock), ""
        if what == "put":
            value = next(self._values)
            report = await client.put(part, [b"k%d" % key], [content(part, value)])
            outcome = report.outcomes[0].name
        elif what == "get":
            _, (found,) = await read(client, part, [b"k%d" % key])
            value = -1 if found is None else value_in(found)
            assert found is None or found == content(part, value), "law 3: a mixture"
        else:
            value = await client.delete(part, [b"k%d" % key])
        self.acts.append(Act(what, key, value, outcome, begun, next(self._clock)))


def content(part: Registered, value: int) -> bytes:
    return (b"%012d" % value * (part.chunk_bytes // 12 + 1))[: part.chunk_bytes]


def value_in(found: bytes) -> int:
    return int(found[:12])


def faults(acts: list[Act]) -> list[str]:
    """Sentences about what no order of these acts explains. A miss is always explained (law 2)."""
    found: list[str] = []
    of_key = defaultdict(list)
    for act in acts:
        of_key[act.key].append(act)
    for key, own in of_key.items():
        stored = {act.value: act for act in own if act.what == "put" and act.outcome == PutOutcome.STORED.name}
        ends = [act for act in own if act.what == "delete" and act.value == 1]
        for get in (act for act in own if act.what == "get" and act.value != -1):
            put = stored.get(get.value)
            if put is None:
                found.append(f"key {key}: {get} read what no put stored")
            elif put.begun > get.ended:
                found.append(f"key {key}: {get} read what {put} stored later")
            elif any(put.ended < end.begun and end.ended < get.begun for end in ends):
                found.append(f"law 5: key {key}: {get} read {put} after its deletion was acknowledged")
        # The first writer wins: a key is stored again only if it was deleted in between.
        ordered = sorted(stored.values(), key=lambda act: act.begun)
        for first, second in itertools.pairwise(ordered):
            if first.ended < second.begun and not any(
                end.ended > first.begun and end.begun < second.ended for end in ends
            ):
                found.append(f"key {key}: {second} was stored over {first}, which nobody had deleted")
        if len(ends) > len(stored):
            found.append(f"key {key}: {len(ends)} deletions of {len(stored)} chunks")
    return found


async def record(folder: Path, count: int, seed: int) -> list[Act]:
    history = History()
    async with house("unix", folder) as gateway:
        clients = [gateway.client() for _ in range(CLIENTS)]
        part = await clients[0].register(format_of(512))

        async def work(number: int) -> None:
            chance = random.Random(f"{seed}/{number}")
            for _ in range(count // CLIENTS):
                await history.act(clients[number], part, chance)

        await asyncio.gather(*(work(number) for number in range(CLIENTS)))
    return history.acts


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_S12_what_clients_saw_has_an_order(tmp_path: Path, count: int) -> None:
    seed = 12
    acts = run(record(tmp_path / "gw", count, seed), timeout=580)
    assert faults(acts) == [], f"seed {seed}"
    kinds = {(act.what, act.outcome or act.value == 1 or act.value > 0) for act in acts}
    assert len(kinds) >= 6, f"every kind of answer came: {kinds}"


def done(what: str, value: int, begun: int, ended: int, outcome: str = "") -> Act:
    return Act(what, 0, value, outcome, begun, ended)


PUT_1, PUT_2 = done("put", 1, 0, 1, "STORED"), done("put", 2, 6, 7, "STORED")


@pytest.mark.parametrize(
    "acts",
    [
        [PUT_1, done("get", 2, 2, 3)],
        [done("get", 1, 0, 1), done("put", 1, 2, 3, "STORED")],
        [PUT_1, done("delete", 1, 2, 3), done("get", 1, 4, 5)],
        [PUT_1, PUT_2],
        [PUT_1, done("put", 2, 2, 3, "CONFLICT"), done("get", 2, 4, 5)],
        [PUT_1, done("delete", 1, 2, 3), done("delete", 1, 4, 5)],
    ],
)
def test_S12_the_check_sees(acts: list[Act]) -> None:
    assert len(faults(acts)) == 1


@pytest.mark.parametrize(
    "acts",
    [
        [PUT_1, done("get", -1, 2, 3)],
        [PUT_1, done("delete", 1, 2, 5), done("get", 1, 3, 4)],
        [PUT_1, done("delete", 1, 2, 3), PUT_2, done("get", 2, 8, 9)],
        [PUT_1, done("delete", 0, 2, 3), done("get", 1, 4, 5)],
    ],
)
def test_S12_the_check_passes(acts: list[Act]) -> None:
    assert faults(acts) == []
