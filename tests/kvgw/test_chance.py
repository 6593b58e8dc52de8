"""C09: a random generator that repeats itself stops the start, or the first key that it would make again."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvgw.chance import REMEMBERED_MAX, WatchedRng
from kvgw.errors import Code, Outage
from kvgw.runtime import SystemRng
from kvgw.settings import Settings
from kvgw.wiring import opened
from tests.support.aio import aio
from tests.support.gateways import SMALL


class Replayed:
    """Draws what it is given, in a circle."""

    def __init__(self, *draws: bytes) -> None:
        self._draws, self._at = draws, 0

    def token(self, size: int) -> bytes:
        self._at += 1
        return self._draws[(self._at - 1) % len(self._draws)][:size]

    def jitter(self) -> float:
        return 0.5


@aio
async def test_C09_a_constant_generator_refuses_the_start(tmp_path: Path) -> None:
    settings: Settings = SMALL
    with (
        mock.patch("secrets.token_bytes", return_value=b"x" * 64),
        pytest.raises(Outage, match="repeated itself") as no,
    ):
        async with opened(settings, tmp_path / "gw"):
            pytest.fail("it started")
    assert no.value.code is Code.INTERNAL
    assert not (tmp_path / "gw" / "keys").exists(), "no key was made of it"


def test_C09_the_first_repetition_is_the_last_draw() -> None:
    rng = WatchedRng(Replayed(*(bytes([number]) * 32 for number in range(5))))
    for _ in range(3):
        rng.token(32)
    for _ in range(3):
        with pytest.raises(Outage, match="repeated itself"):
            rng.token(32)


def test_short_draws_may_repeat_and_the_memory_is_bounded() -> None:
    rng = WatchedRng(SystemRng())
    for _ in range(2000):
        rng.token(1)
    for _ in range(REMEMBERED_MAX + 100):
        rng.token(16)
    assert len(rng._seen) == len(rng._order) == REMEMBERED_MAX


def draw(pipe: Any) -> None:
    pipe.send(SystemRng().token(32))


def test_C09_processes_and_threads_draw_apart() -> None:
    rng = WatchedRng(SystemRng())
    context = multiprocessing.get_context("fork")
    drawn = [rng.token(32)]
    for _ in range(4):
        here, there = context.Pipe()
        process = context.Process(target=draw, args=(there,))
        process.start()
        drawn.append(here.recv())
        process.join()
    threads = [threading.Thread(target=lambda: drawn.append(rng.token(32))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(drawn)) == 13
