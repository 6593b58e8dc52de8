"""Copies that let other threads go on."""

from __future__ import annotations

import random
import sys
import threading
import time

import pytest

from kvgw.copying import copy

MIB = 1024 * 1024


@pytest.mark.parametrize("nbytes", [0, 1, 128 * 1024 - 1, 128 * 1024, MIB + 3])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_copied_is_there_and_nothing_beside_it(nbytes: int, *, frozen: bool) -> None:
    content = random.Random(nbytes).randbytes(nbytes)
    source = memoryview(content if frozen else bytearray(content))
    target = bytearray(nbytes + 2)
    copy(memoryview(target)[1 : nbytes + 1], source)
    assert target == b"\0" + content + b"\0"


@pytest.mark.parametrize("nbytes", [10, MIB])
@pytest.mark.parametrize("frozen", [False, True])
def test_lengths_that_differ_are_refused_and_nothing_is_written(nbytes: int, *, frozen: bool) -> None:
    source = memoryview(bytes(nbytes) if frozen else bytearray(nbytes))
    for other in (nbytes - 1, nbytes + 1):
        target = bytearray(b"x" * other)
        with pytest.raises(ValueError, match=r"bytes|structures"):
            copy(memoryview(target), source)
        assert target == b"x" * other


def test_what_is_not_plain_bytes_is_refused() -> None:
    plain = memoryview(bytearray(MIB))
    for other in (plain.cast("B", (1024, 1024)), memoryview(bytearray(2 * MIB))[::2], plain.cast("I")):
        for target, source in ((plain, other), (other, plain)):
            with pytest.raises(ValueError, match="plain bytes"):
                copy(target, source)


def test_memory_is_let_go_of() -> None:
    source, target = bytearray(MIB), bytearray(MIB)
    copy(memoryview(target), memoryview(source))
    source += b"."
    target += b"."  # both raise while somebody holds a view


def test_other_threads_go_on() -> None:
    """Nobody can take the lock from the copying thread, so that others get on only if it gives the lock up."""
    source, target = memoryview(bytearray(64 * MIB)), memoryview(bytearray(64 * MIB))
    meanwhile, steps = [], 0

    def copied() -> None:
        before = steps
        copy(target, source)
        meanwhile.append(steps - before)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        thread = threading.Thread(target=copied)
        thread.start()
        while thread.is_alive():
            steps += 1
            time.sleep(0)
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert meanwhile[0] > 10
