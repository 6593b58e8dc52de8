"""kvgw comes through every attack of the suite; and each attack is one that a store can fall to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.attacks.__main__ import BEGIN, END, ROOT, table
from tests.attacks.gateway import KvgwSubject
from tests.attacks.subject import Asker
from tests.attacks.trials import HANG_S, TRIALS, Verdict, tried
from tests.support.aio import aio, run


@pytest.mark.timeout(180)
def test_kvgw_is_safe_from_every_attack(tmp_path: Path) -> None:
    async def main() -> None:
        store = await KvgwSubject.started(tmp_path / "gw")
        try:
            found = await tried(store)
        finally:
            await store.aclose()
        assert {name: verdict.word for name, verdict in found.items()} == dict.fromkeys(TRIALS, "safe"), found

    run(main(), 150)


class Naive:
    """A cache as it is written in an afternoon: one dictionary, the tokens its keys."""

    name, version = "naive", "1"

    def __init__(self) -> None:
        self.chunks: dict[tuple[int, ...], bytes] = {}
        self.deleted: set[tuple[int, ...]] = set()
        self.frozen = False

    async def store(self, who: Asker, tokens: list[int], payload: bytes) -> None:
        self.chunks[tuple(tokens)] = payload

    async def load(self, who: Asker, tokens: list[int], limit_s: float) -> bytes | None:
        if self.frozen:
            await asyncio.sleep(HANG_S + 0.1)
        return self.chunks.get(tuple(tokens))

    async def delete(self, who: Asker, tokens: list[int]) -> None:
        self.deleted.add(tuple(tokens))

    async def flip(self, who: Asker, tokens: list[int]) -> str:
        self.chunks[tuple(tokens)] = bytes([self.chunks[tuple(tokens)][0] ^ 1]) + self.chunks[tuple(tokens)][1:]
        return "in its dictionary"

    async def swap(self, who: Asker, victim: list[int], foreign: list[int]) -> str:
        self.chunks[tuple(victim)] = self.chunks[tuple(foreign)]
        return "in its dictionary"

    async def freeze(self) -> str:
        self.frozen = True
        return "it sleeps"

    async def aclose(self) -> None: ...


@aio
async def test_a_naive_cache_falls_to_every_attack() -> None:
    found = await tried(Naive())
    words = ["leaks", "corrupt", "corrupt", "corrupt", "corrupt", "corrupt", "leaks", "hangs"]
    assert [verdict.word for verdict in found.values()] == words


@aio
async def test_a_store_that_keeps_nothing_is_not_called_safe() -> None:
    class Forgetful(Naive):
        async def store(self, who: Asker, tokens: list[int], payload: bytes) -> None: ...

    with pytest.raises(AssertionError, match="does not read back"):
        await tried(Forgetful())


def test_the_page_shows_these_attacks_and_kvgw_safe_from_each() -> None:
    page = (ROOT / "docs" / "attacks.md").read_text(encoding="utf-8")
    shown = page.partition(BEGIN)[2].partition(END)[0].split("Python ")[0].strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown]
    assert cells[0][:2] == ["attack", "kvgw"], "run: make attacks ATTACK_ARGS='--page docs/attacks.md'"
    assert [row[:2] for row in cells[2:]] == [[name, "safe"] for name in TRIALS]
    report = table([(Naive(), dict.fromkeys(TRIALS, Verdict("safe", "x")))], ["A peer was left out."])
    assert report.endswith("A peer was left out.")
